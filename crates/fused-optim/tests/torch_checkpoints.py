"""Trains a few steps with torch.optim, saves the optimizer, and continues: torch_checkpoints.py FOLDER.

For each case it writes <name>.state (the input of StateDict::from_torch) and <name>.run (F32: `weights.<i>` when
saved, `grads.<step>.<i>` of the later steps in which tensor i has a gradient, `expected.<i>` after them).
"""

import json
import struct
import sys

import torch

CASES = {
    "adadelta": (torch.optim.Adadelta, dict(lr=0.5, weight_decay=0.01)),
    "adam": (torch.optim.Adam, dict(lr=0.01, betas=(0.8, 0.95), weight_decay=0.1)),
    "adam_amsgrad": (torch.optim.Adam, dict(lr=0.01, amsgrad=True, maximize=True)),
    "adamw": (torch.optim.AdamW, dict(lr=0.01)),
    "adamw_amsgrad": (torch.optim.AdamW, dict(lr=0.01, amsgrad=True, fused=True)),
    "rmsprop": (torch.optim.RMSprop, dict(lr=0.01)),
    "rmsprop_both": (torch.optim.RMSprop, dict(lr=0.01, centered=True, momentum=0.9, eps=1e-3)),
    "sgd": (torch.optim.SGD, dict(lr=0.1, weight_decay=0.01)),
    "sgd_momentum": (torch.optim.SGD, dict(lr=0.1, momentum=0.9, dampening=0.3)),
    "sgd_nesterov": (torch.optim.SGD, dict(lr=0.1, momentum=0.9, nesterov=True, maximize=True)),
}


def save_file(tensors, path, metadata=None):
    """safetensors.torch.save_file, for interpreters without it."""
    header, data = {"__metadata__": metadata or {}}, b""
    for name, tensor in tensors.items():
        raw = struct.pack(f"<{tensor.numel()}f", *tensor.flatten().tolist())
        header[name] = {
            "dtype": "F32",
            "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + data)


def save_optimizer(optimizer, path):
    saved = optimizer.state_dict()
    tensors = {f"state.{index}.{name}": torch.as_tensor(value).detach().float().contiguous()
               for index, state in saved["state"].items()
               for name, value in state.items() if value is not None}
    header = {"kind": type(optimizer).__name__, "param_groups": saved["param_groups"]}
    save_file(tensors, path, {"torch_optim": json.dumps(header)})


def main(folder):
    for name, (make, options) in CASES.items():
        torch.manual_seed(7)
        shapes = [[33], [4, 3, 3], [], [17]]
        params = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
        groups = [{"params": params[:2]}, {"params": params[2:], "lr": options["lr"] / 2}]
        optimizer = make(groups, **options)
        run = {}
        for step in range(7):
            if step == 3:
                save_optimizer(optimizer, f"{folder}/{name}.state")
                run.update({f"weights.{i}": p.detach().clone() for i, p in enumerate(params)})
            for i, param in enumerate(params):
                # The last tensor has no gradient, hence no state, until after the checkpoint.
                missing = i == 3 and step < 4
                param.grad = None if missing else torch.randn(param.shape)
                if step >= 3 and not missing:
                    run[f"grads.{step}.{i}"] = param.grad.clone()
            optimizer.step()
        run.update({f"expected.{i}": p.detach() for i, p in enumerate(params)})
        save_file(run, f"{folder}/{name}.run")
    print(torch.__version__)


main(sys.argv[1])
