"""Writes rnn.json: outputs, states and gradients of PyTorch's LSTM and GRU in float64, for tests/it/torch_rnn.rs.

    python record_rnn.py > rnn.json
"""

import json

import torch
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

torch.manual_seed(41)
torch.set_default_dtype(torch.float64)
BATCH, TIMES, INPUTS, HIDDEN = 3, 4, 2, 3


def randn(*shape):
    return (torch.randn(shape) * 1000).round() / 1000


def numbers(tensor):
    values = [float(f"{v:.10g}") for v in tensor.detach().flatten().tolist()]
    return {"shape": list(tensor.shape), "values": values}


def case(kind, layers, bidirectional, lengths=None, bias=True, state=True):
    torch_kind = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}[kind]
    model = torch_kind(INPUTS, HIDDEN, layers, bias=bias, batch_first=True, bidirectional=bidirectional)
    inputs = {name: randn(*p.shape).requires_grad_() for name, p in model.named_parameters()}
    parameters = dict(inputs)
    inputs["x"] = randn(BATCH, TIMES, INPUTS).requires_grad_()
    states = ["h", "c"] if kind == "lstm" else ["h"]
    directions = 2 if bidirectional else 1
    if state:
        inputs |= {s: randn(layers * directions, BATCH, HIDDEN).requires_grad_() for s in states}
    x = inputs["x"]
    if lengths:
        x = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    initial = tuple(inputs[s] for s in states) if state else None
    if state and kind == "gru":
        (initial,) = initial
    y, last = torch.func.functional_call(model, parameters, (x, initial))
    if lengths:
        y, _ = pad_packed_sequence(y, batch_first=True, total_length=TIMES)
    outputs = {"y": y} | dict(zip(states, last if kind == "lstm" else [last]))
    weights = {name: randn(*v.shape) for name, v in outputs.items()}
    sum((outputs[name] * weights[name]).sum() for name in outputs).backward()
    return {
        "kind": kind,
        "layers": layers,
        "bidirectional": bidirectional,
        "bias": bias,
        "lengths": lengths,
        "inputs": {name: numbers(v) for name, v in inputs.items()},
        "outputs": {name: numbers(v) for name, v in outputs.items()},
        "dy": {name: numbers(v) for name, v in weights.items()},
        "gradients": {name: numbers(v.grad) for name, v in inputs.items()},
    }


cases = []
for kind in ["lstm", "gru"]:
    for layers in [1, 2]:
        for bidirectional in [False, True]:
            cases.append(case(kind, layers, bidirectional))
            cases.append(case(kind, layers, bidirectional, lengths=[2, 4, 1]))
    cases.append(case(kind, 1, True, bias=False, state=False))
print(json.dumps({"torch": torch.__version__, "cases": cases}))
