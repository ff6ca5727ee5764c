"""Records another folder of vectors with the installed PyTorch, in the format that README.md describes:

    python record.py FOLDER SEED && ORACLE_DIR=FOLDER cargo test -p gradstack-amp
"""

import json
import math
import random
import struct
import sys
from pathlib import Path

import torch

INFINITIES = [math.inf, -math.inf, math.nan]


def bits(x):
    return struct.unpack("<I", struct.pack("<f", x))[0]


def sgd(count):
    params = [torch.nn.Parameter(torch.zeros(())) for _ in range(count)]
    return params, [torch.optim.SGD([p], lr=1.0) for p in params]


def trace(rng):
    config = {
        "init_scale": rng.choice([65536.0, 2.0**-10, 2.0**120, 10 ** rng.uniform(-40, 38)]),
        "growth_factor": rng.choice([2.0, rng.uniform(1.01, 5)]),
        "backoff_factor": rng.choice([0.5, rng.uniform(0.01, 0.99), 1e-20]),
        "growth_interval": rng.randint(1, 6),
    }
    scaler = torch.amp.GradScaler("cpu", **config)
    load = None
    if rng.random() < 0.3:
        load = dict(scaler.state_dict(), scale=2.0 ** rng.randint(-8, 8))
        load["_growth_tracker"] = rng.randint(0, 8)
        scaler.load_state_dict(load)
    flags, rows, set_scale = [], [], {}
    for i in range(rng.randint(1, 80)):
        param = torch.nn.Parameter(torch.ones(4))
        optimizer = torch.optim.SGD([param], lr=1.0)
        used = scaler.scale(torch.ones(())).item()
        flags.append(rng.choice([0, 0, 0, 0, 1, 2, 3]))
        param.grad = torch.ones(4)
        if flags[-1]:
            param.grad[1] = [None, math.inf, math.nan, -math.inf][flags[-1]]
        before = param.detach().clone()
        scaler.step(optimizer)
        broken = not torch.isfinite(param).all().item()
        # A step so small that it changes nothing is a step.
        stepped = flags[-1] == 0
        assert stepped or torch.equal(param, before)
        if rng.random() < 0.1:
            set_scale[i] = rng.uniform(0.5, 1000)
            scaler.update(set_scale[i])
        else:
            scaler.update()
        state = scaler.state_dict()
        after = f"{bits(state['scale']):08x}"
        rows.append([f"{bits(used):08x}", int(stepped), int(broken), after, state["_growth_tracker"]])
    return {"config": config, "load_state_dict": load, "set_scale": set_scale or None,
            "flags": flags, "rows": rows, "final_state_dict": scaler.state_dict()}


def sequence(rng):
    enabled = rng.random() < 0.95
    params, optimizers = sgd(2)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2, enabled=enabled)
    without = [i for i in range(2) if rng.random() < 0.1]
    names = ["scale", "scale", "unscale0", "unscale1", "step0", "step1", "update", "update",
             "get_scale", "state_dict", "inf0", "setf"]
    ops, result = [], []
    for _ in range(rng.randint(1, 30)):
        op = rng.choice(names)
        i = int(op[-1]) if op[-1].isdigit() else None
        if op == "inf0" and params[0].grad is None:
            continue
        try:
            if op == "scale":
                for j, p in enumerate(params):
                    p.grad = None if j in without else torch.full((), 8.0)
                value = scaler.scale(torch.ones(())).item()
            elif op == "inf0":
                value = params[0].grad.fill_(math.inf) and None
            elif i is not None:
                value = getattr(scaler, {"u": "unscale_", "s": "step"}[op[0]])(optimizers[i])
            elif op == "setf":
                value = scaler.update(4.0)
            else:
                value = getattr(scaler, op)()
            result.append(["ok", value])
        except Exception as error:
            result.append([type(error).__name__, str(error)])
        ops.append(op)
    if not all(math.isfinite(p.item()) for p in params):
        return sequence(rng)
    return {"enabled": enabled, "params_without_grad": without, "ops": ops, "result": result,
            "params": [p.item() for p in params]}


def unscaled(rng):
    values = [rng.uniform(-1, 1) * 10 ** rng.uniform(-44, 38) for _ in range(rng.randint(0, 70))]
    if values and rng.random() < 0.5:
        values[rng.randrange(len(values))] = rng.choice(INFINITIES)
    grads = torch.tensor(values, dtype=torch.float32)
    before = grads.view(torch.int32).tolist()
    inv_scale = torch.tensor(rng.choice([1.0, 2.0**-16, 10 ** rng.uniform(-10, 10)]))
    found_inf = torch.zeros(())
    torch._amp_foreach_non_finite_check_and_unscale_([grads], found_inf, inv_scale)
    after = grads.view(torch.int32).tolist()
    word = lambda x: x & 0xFFFFFFFF
    return {"inv_scale_bits": f"{bits(inv_scale.item()):08x}", "input_bits": [*map(word, before)],
            "output_bits": [*map(word, after)], "found_inf": found_inf.item()}


def casts(rng):
    words = torch.tensor([rng.getrandbits(32) - 2**31 for _ in range(100_000)], dtype=torch.int32)
    floats = words.view(torch.float32)
    nans, numbers = floats[floats.isnan()], floats[~floats.isnan()]
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int16).roll(2**15)
    entries = {"f32_bits": numbers, "nan_f32_bits": nans}
    for name, dtype in [("f16", torch.float16), ("bf16", torch.bfloat16)]:
        entries[f"{name}_bits"] = numbers.to(dtype)
        entries[f"{name}_bits_to_f32_bits"] = halves.view(dtype).float()
    header, data = {}, b""
    for name, tensor in entries.items():
        raw = tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32).numpy().tobytes()
        header[name] = {"dtype": "U16" if tensor.element_size() == 2 else "U32",
                        "shape": [len(tensor)], "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    header = json.dumps(header).encode()
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header + data


def main(folder, seed):
    rng = random.Random(int(seed))
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    many = lambda make, count: [make(rng) for _ in range(count)]
    (folder / "scaler_trace.json").write_text(json.dumps({"traces": many(trace, 300)}))
    (folder / "scaler_ops.json").write_text(json.dumps(many(sequence, 2000)))
    (folder / "unscale.json").write_text(json.dumps(many(unscaled, 300)))
    (folder / "casts.safetensors").write_bytes(casts(rng))


main(*sys.argv[1:])
