"""Runs the cases of a folder with PyTorch's optimizers and the authors' packages in float64, and prints the largest
differences from the vectors. Needs PyTorch and schedulefree.

    python compare.py newer

Each tensor has its own optimizer, as our step counts are per tensor. PyTorch's Muon computes in bfloat16; here this is
replaced by float64.
"""

import json
import math
import struct
import sys
from pathlib import Path

import numpy as np
import schedulefree
import torch

torch.bfloat16 = torch.float64


def read(path):
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    tensors = {}
    for name, entry in json.loads(data[8 : 8 + length]).items():
        start, end = (8 + length + at for at in entry["data_offsets"])
        dtype = {"F32": np.float32, "F64": np.float64}[entry["dtype"]]
        tensors[name] = np.frombuffer(data[start:end], dtype).reshape(entry["shape"]).astype(np.float64)
    return tensors


def optimizer(kind, h, p):
    """The optimizer of one tensor, and the sign of its gradients."""
    h = {name: value for name, value in h.items() if name != "idx"}
    sign = -1 if h.pop("maximize") else 1
    if kind == "adafactor":
        return torch.optim.Adafactor([p], **h), sign
    if kind == "schedule_free_adamw":
        made = schedulefree.AdamWScheduleFree([p], **h)
        made.train()
        return made, sign
    betas, eps, use_muon = h.pop("betas"), h.pop("adamw_eps"), h.pop("use_muon")
    if p.ndim == 2 and use_muon:
        return torch.optim.Muon([p], **h), sign
    return torch.optim.AdamW([p], lr=h["lr"], betas=betas, eps=eps, weight_decay=h["weight_decay"]), sign


def run(case, shapes, tensors):
    """The largest difference, relative to the values' size."""
    def split(row):
        # Tensors of more than two dimensions are matrices here.
        parts = np.split(row, np.cumsum([math.prod(s) for s in shapes])[:-1])
        matrix = [s if len(s) < 2 else [s[0], math.prod(s[1:])] for s in shapes]
        return [torch.from_numpy(part.copy()).reshape(s) for part, s in zip(parts, matrix)]

    params = [torch.nn.Parameter(p) for p in split(tensors[f"set/{case['input']}/p0"])]
    made = {i: optimizer(case["kind"], group, params[i]) for group in case["groups"] for i in group["idx"]}
    worst, rows = 0.0, iter(tensors[f"case/{case['name']}/p"])
    for step, grads in enumerate(tensors[f"set/{case['input']}/g"]):
        if not case.get("found_inf", [0] * 99)[step]:
            for i, grad in enumerate(split(grads)):
                # PyTorch divides by the number of elements.
                if params[i].numel() and case.get("grad_present", [[1] * 99] * 99)[step][i]:
                    params[i].grad = made[i][1] * grad
                    made[i][0].step()
        if step + 1 in case["snapshots"]:
            got = np.concatenate([p.detach().numpy().ravel() for p in params])
            expected = next(rows)
            worst = max(worst, float((np.abs(got - expected) / (1 + np.abs(expected))).max(initial=0.0)))
    return worst


def main(folder):
    oracle = json.loads((folder / "optim.json").read_text())
    worst = {}
    for case in oracle["cases"]:
        if case["kind"] in ("adafactor", "muon", "schedule_free_adamw"):
            shapes = oracle["input_sets"][f"{case['kind']}/{case['input']}"]["shapes"]
            worst.setdefault(case["kind"], []).append(run(case, shapes, read(folder / case["file"])))
    for kind, errors in worst.items():
        print(f"{kind}: {len(errors)} cases, off by at most {max(errors):.1e}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
