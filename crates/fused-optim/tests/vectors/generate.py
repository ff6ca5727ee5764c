"""Writes another folder of vectors, in the format that README.md describes, with other shapes, values and
hyper-parameters for each seed. Needs NumPy, and PyTorch for `clip.json`.

    python generate.py FOLDER SEED && ORACLE_DIR=FOLDER cargo test -p gradstack-fused-optim

Arguments after SEED are the kinds to generate, by default all.
"""

import json
import struct
import sys
from pathlib import Path

import numpy as np
import torch
from ref_optim import DEFAULTS, Opt

SCHEDULES = ["warmup_linear", "warmup_cosine", "warmup_constant", "warmup_poly"]
ADJUSTMENTS = ["original", "match_rms_adamw", "spectral_unclamped"]
CASES = 12


def hyper(rng, kind, steps):
    def chance(p=0.5):
        return bool(rng.random() < p)

    def near(value):
        return float(np.float32(value * 10 ** rng.uniform(-1, 1)))

    h = dict(DEFAULTS[kind])
    for name in h:
        if isinstance(h[name], bool):
            h[name] = chance()
    h["lr"] = near(h["lr"])
    if "eps" in h:
        h["eps"] = 10 ** rng.uniform(-9, -3)
    if "betas" in h:
        h["betas"] = [float(rng.uniform(0, 0.99)), float(rng.uniform(0.5, 0.9999))]
    h["weight_decay"] = float(rng.choice([0.0, 10 ** rng.uniform(-5, -1)]))
    if kind == "adadelta":
        h["rho"] = float(rng.uniform(0.3, 0.99))
    if kind == "adafactor":
        h |= {"lr": near(0.3), "beta2_decay": float(rng.uniform(-1, -0.3)),
              "d": float(rng.choice([1.0, rng.uniform(1, 1.5)]))}
        h["eps"] = [float(rng.choice([2.0**-23, rng.uniform(0.1, 1.5)])),
                    float(rng.choice([1e-3, rng.uniform(0.5, 2)]))]
        h["weight_decay"] = float(rng.choice([0.0, rng.uniform(0.1, 1.0)]))
    if kind == "muon":
        h |= {"lr": near(0.1), "momentum": float(rng.uniform(0.3, 0.95)),
              "weight_decay": float(rng.choice([0.0, rng.uniform(0.1, 1.0)]))}
        h |= {"adjust_lr_fn": str(rng.choice(ADJUSTMENTS)), "use_muon": chance(0.8),
              "ns_steps": int(rng.integers(3, 7))}
        h |= {"eps": float(rng.choice([1e-7, rng.uniform(1, 30)])), "adamw_eps": 10 ** rng.uniform(-10, -3)}
    if kind == "adamp":
        h |= {"delta": near(0.1), "wd_ratio": float(rng.random()), "cos_eps": str(rng.choice(["add", "torch"]))}
    if kind == "bert_adam":
        h |= {"b1": float(rng.uniform(0, 0.99)), "b2": float(rng.uniform(0.5, 0.9999)), "e": 10 ** rng.uniform(-9, -3)}
        h |= {"max_grad_norm": float(rng.choice([-1.0, near(1.0)])), "clip": str(rng.choice(["group", "tensor"]))}
        if chance(0.7):
            h |= {"warmup": float(rng.uniform(0.05, 0.9)), "t_total": steps + int(rng.integers(1, 9))}
            h["schedule"] = SCHEDULES[rng.integers(4)]
    if kind.startswith("rmsprop"):
        h |= {"alpha": float(rng.uniform(0.5, 0.99)), "momentum": float(rng.choice([0.0, rng.uniform(0.1, 0.95)]))}
        h["eps"] = 10 ** rng.uniform(-6, -3)
    if kind == "schedule_free_adamw":
        h |= {"warmup_steps": int(rng.integers(0, 6))}
        h |= {"lr": near(0.1), "weight_decay": float(rng.choice([0.0, rng.uniform(0.1, 1.0)]))}
        h["betas"][0] = float(rng.uniform(0.3, 0.99))
    if kind == "sgd":
        h |= {"momentum": float(rng.choice([0.0, rng.uniform(0.1, 0.95)])),
              "dampening": float(rng.choice([0.0, rng.random()]))}
        h["nesterov"] = h["nesterov"] and h["momentum"] > 0 and h["dampening"] == 0
    return h


def shape(rng):
    """Shapes: a scalar, an empty tensor, one of several dimensions, one of several blocks."""
    way = rng.integers(8)
    if way == 0:
        return []
    if way == 1:
        return [int(rng.integers(1, 4)), 0, 3]
    if way == 2:
        return [int(rng.integers(1000, 2600))]
    dims = int(rng.integers(1, 5))
    return [int(n) for n in rng.integers(1, (70, 24, 9, 6)[dims - 1], dims)]


def run(case, shapes, start, grads, dtype):
    def split(row):
        parts = np.split(row, np.cumsum([int(np.prod(s)) for s in shapes])[:-1])
        return [part.reshape(s) for part, s in zip(parts, shapes)]

    opt = Opt(case["kind"], case["groups"], split(start), dtype)
    rows = []
    for step, row in enumerate(grads):
        present = case.get("grad_present", [[1] * len(shapes)] * len(grads))[step]
        if not case.get("found_inf", [0] * len(grads))[step]:
            opt.step([g if here else None for g, here in zip(split(row), present)])
        rows.append(np.concatenate([p.ravel() for p in opt.p]).astype(np.float64))
    return opt, rows


def state(opt, name):
    initial = 1.0 if opt.kind == "rmsprop_tf" and name == "square_avg" else 0.0
    # Means of rows and columns are written for each element.
    parts = [np.broadcast_to(s[name], (len(p), p.size // len(p))) if name in ("row_var", "col_var") and name in s
             else s.get(name, np.full_like(p, initial)) for s, p in zip(opt.state, opt.p)]
    return np.concatenate([part.ravel() for part in parts]).astype(np.float64)


def make(rng, kind, at, tensors, sets):
    """One case, or None if rounding could decide a branch."""
    shapes = [shape(rng) for _ in range(int(rng.integers(2, 8)))]
    steps, count = int(rng.integers(3, 9)), sum(int(np.prod(s)) for s in shapes)
    start = rng.standard_normal(count).astype(np.float32)
    spread = 10 ** rng.uniform(-3, 1, count) if rng.random() < 0.3 else 1
    grads = (rng.standard_normal((steps, count)) * spread).astype(np.float32)
    split = int(rng.integers(1, len(shapes)))
    members = [range(len(shapes))] if rng.random() < 0.5 else [range(split), range(split, len(shapes))]
    case = {"name": f"{kind}_{at}", "kind": kind, "file": f"optim_{kind}.safetensors", "input": str(at)}
    case["groups"] = [hyper(rng, kind, steps) | {"idx": list(idx)} for idx in members]
    if kind == "lamb":
        for group in case["groups"]:
            group["use_global_grad_norm"] = case["groups"][0]["use_global_grad_norm"]
    case["snapshots"] = sorted({1, int(rng.integers(1, steps + 1)), steps})
    if rng.random() < 0.3:
        case["grad_present"] = (rng.random((steps, len(shapes))) < 0.7).astype(int).tolist()
    if rng.random() < 0.3:
        case["found_inf"] = (rng.random(steps) < 0.3).astype(int).tolist()
        case["grad_scale"] = float(2.0 ** rng.integers(1, 17))
    exact, rows = run(case, shapes, start, grads, np.float64)
    if min(exact.margins, default=1) < 1e-3:
        return None
    naive, naive_rows = run(case, shapes, start, grads, np.float32)
    case["states"] = sorted({name for s in exact.state for name in s})
    case["steps_taken"] = exact.steps
    at_snapshots = [step - 1 for step in case["snapshots"]]
    expected = np.stack([rows[step] for step in at_snapshots])

    def error(a, b):
        return float(np.abs(a - b).max(initial=0.0))

    case["naive_f32_max_abs_err"] = error(expected, np.stack([naive_rows[step] for step in at_snapshots]))
    case["naive_f32_state_err"] = {n: error(state(exact, n), state(naive, n)) for n in case["states"]}
    sets[f"{kind}/{at}"] = {"shapes": shapes, "steps": steps}
    tensors |= {f"set/{at}/p0": start, f"set/{at}/g": grads, f"case/{case['name']}/p": expected}
    tensors |= {f"case/{case['name']}/{n}": state(exact, n) for n in case["states"]}
    return case


def save(path, tensors):
    head, data = {}, b""
    for name, values in tensors.items():
        bytes_ = np.ascontiguousarray(values).tobytes()
        dtype = {"float32": "F32", "float64": "F64"}[values.dtype.name]
        head[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [len(data), len(data) + len(bytes_)]}
        data += bytes_
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def clip(rng):
    # PyTorch has no maximum of an empty tensor.
    shapes = [s for s in (shape(rng) for _ in range(int(rng.integers(1, 6)))) if 0 not in s]
    params = [torch.nn.Parameter(torch.zeros(s)) for s in shapes or [[1]]]
    for p in params:
        p.grad = torch.from_numpy(np.asarray(rng.standard_normal(tuple(p.shape)), dtype=np.float32)).reshape(p.shape)
    bits = [p.grad.reshape(-1).view(torch.int32).numpy().view(np.uint32).tolist() for p in params]
    max_norm, norm_type = 10 ** rng.uniform(-2, 2), [2.0, 1.0, 3.0, "inf"][rng.integers(4)]
    total = torch.nn.utils.clip_grad_norm_(params, max_norm, float(norm_type))
    return {
        "max_norm": max_norm,
        "norm_type": norm_type,
        "grad_bits": bits,
        "total_norm": float(total),
        "clipped": [p.grad.reshape(-1).tolist() for p in params],
    }


def main(folder, seed, *kinds):
    rng, cases, sets = np.random.default_rng(int(seed)), [], {}
    folder.mkdir(parents=True, exist_ok=True)
    for kind in kinds or DEFAULTS:
        tensors, made = {}, []
        while len(made) < CASES:
            made += filter(None, [make(rng, kind, len(made), tensors, sets)])
        save(folder / f"optim_{kind}.safetensors", tensors)
        cases += made
    (folder / "optim.json").write_text(json.dumps({"format": 1, "input_sets": sets, "cases": cases}))
    (folder / "clip.json").write_text(json.dumps([clip(rng) for _ in range(40)]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
