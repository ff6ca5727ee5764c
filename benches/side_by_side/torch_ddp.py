"""PyTorch's side of trainer.sh: `torch_ddp.py WIDTH STEPS`, ms per training step of a ResNet-18 on 32 images, median.
Under torchrun with DDP over gloo.
"""

import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from torch_models import resnet

torch.set_num_threads(1)
width, steps = int(sys.argv[1]), int(sys.argv[2])
model, rank = resnet(width).train(), int(os.environ.get("RANK", 0))
if "RANK" in os.environ:
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
sgd = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9, weight_decay=1e-4, fused=True)
x, labels = torch.randn(32, 1, 28, 28), torch.arange(32) % 10


def step():
    sgd.zero_grad(set_to_none=True)
    F.cross_entropy(model(x), labels).backward()
    sgd.step()


# DDP rebuilds its buckets in the second step.
step()
step()
times = []
for _ in range(steps):
    start = time.perf_counter()
    step()
    times.append(time.perf_counter() - start)
if rank == 0:
    print(f"{statistics.median(times) * 1e3:.4f}")
if dist.is_initialized():
    dist.destroy_process_group()
