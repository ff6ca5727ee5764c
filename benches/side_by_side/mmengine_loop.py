"""Times an iteration of MMEngine's training loop with an empty step and the default hooks.

    mmengine_loop.py ITERATIONS INTERVAL    # ns per iteration, on one line
"""

import sys
import tempfile
import time

import torch
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.runner import Runner
from torch.utils.data import Dataset


class Nothing(Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return 0


class Empty(BaseModel):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(1))

    def train_step(self, data, optim_wrapper):
        return LOSSES

    def forward(self, inputs):
        return LOSSES


class Watch(Hook):
    """Times from the first batch to the last, without the constant work before and after."""

    priority = "VERY_HIGH"

    def before_train_epoch(self, runner):
        self.start = time.perf_counter()

    def after_train_epoch(self, runner):
        self.took = time.perf_counter() - self.start


LOSSES = {"loss": torch.tensor(1.0)}

count, interval = int(sys.argv[1]), int(sys.argv[2])
watch = Watch()
sys.stdout, out = open("/dev/null", "w"), sys.stdout
with tempfile.TemporaryDirectory() as work_dir:
    runner = Runner(
        model=Empty(),
        work_dir=work_dir,
        train_dataloader=dict(
            batch_size=1, dataset=Nothing(count), sampler=dict(type="DefaultSampler", shuffle=True)
        ),
        optim_wrapper=dict(type="OptimWrapper", optimizer=dict(type="SGD", lr=0.1)),
        train_cfg=dict(by_epoch=True, max_epochs=1),
        default_hooks=dict(logger=dict(type="LoggerHook", interval=interval)),
        custom_hooks=[watch],
    )
    runner.train()
    print(f"{watch.took * 1e9 / count:.0f}", file=out)
