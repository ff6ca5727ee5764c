"""What MMEngine's DefaultOptimWrapperConstructor makes of `paramwise_cfg`: paramwise.json.

    pip install torch mmengine==0.10.7 && python paramwise.py > paramwise.json

Recorded with mmengine 0.10.7 on torch 2.15.0, 2026-11-21.
"""

import json
import sys

import mmengine
import torch
from mmengine.logging import MMLogger
from mmengine.optim import build_optim_wrapper
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(8, 8, 3, groups=8)
        self.bn1 = nn.BatchNorm2d(8)
        self.ln = nn.LayerNorm(8)
        self.bare = nn.LayerNorm(8, bias=False)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.bias = nn.Parameter(torch.ones(2, 2))
        # One input channel: MMEngine counts it as depth-wise.
        self.stem = nn.Conv2d(1, 8, 3)
        self.backbone = nn.Sequential(Block(), nn.Conv2d(8, 4, 1))
        self.conv1d = nn.Conv1d(1, 4, 3)
        self.head = nn.Linear(4, 2)
        self.embed = nn.Embedding(5, 4)


CASES = [
    {"norm_decay_mult": 0.0},
    {"bias_lr_mult": 2.0, "bias_decay_mult": 0.0},
    {"dwconv_decay_mult": 0.5},
    {"flat_decay_mult": 0.25},
    {"norm_decay_mult": 0.0, "bias_decay_mult": 0.5, "dwconv_decay_mult": 0.25, "flat_decay_mult": 0.125},
    {"bias_lr_mult": 3.0, "norm_decay_mult": 0.5, "bypass_duplicate": True},
    {"custom_keys": {"backbone": {"lr_mult": 0.1, "decay_mult": 0.9}}, "norm_decay_mult": 0.0},
    {"custom_keys": {"backbone.0": {"lr_mult": 0.5}, "bone": {"decay_mult": 0.0}, "head": {}}, "bias_lr_mult": 2.0},
    {"custom_keys": {".scale": {"lr_mult": 0.0}, "bn": {"decay_mult": 0.0}, "ln": {"decay_mult": 0.3}}},
    {"custom_keys": {"conv1": {"lr_mult": 0.5}, "conv2": {"lr_mult": 0.25}, "ead.w": {"lr_mult": 7.0}}},
]

MMLogger.get_instance("quiet", log_level="ERROR")
torch.nn.Module.__repr__ = lambda self: ""
net = Net()
names = {id(p): n for n, p in net.named_parameters()}
cases = []
stdout, sys.stdout = sys.stdout, sys.stderr
for case in CASES:
    optim = dict(optimizer=dict(type="SGD", lr=0.1, weight_decay=0.01), paramwise_cfg=case)
    groups = build_optim_wrapper(net, optim).optimizer.param_groups
    rows = [[names[id(p)], g["lr"], g["weight_decay"]] for g in groups for p in g["params"]]
    cases.append({"paramwise_cfg": case, "groups": rows})
sys.stdout = stdout
print(json.dumps({
    "mmengine": mmengine.__version__,
    "params": [[n, list(p.shape)] for n, p in net.named_parameters()],
    "cases": cases,
}))
