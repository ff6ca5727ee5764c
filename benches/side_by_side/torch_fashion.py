"""Trains configs/resnet_fashion.toml in PyTorch for SECONDS: the same network, optimizer and batches of 32 a rank
with DDP over gloo, in f32, one thread a rank; `torchrun --nproc-per-node 2 torch_fashion.py SECONDS`.
"""

import gzip
import sys
import time

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from torch_models import Block

ROOT = "/usr/share/datasets/fashion-mnist/"


def read(part):
    with gzip.open(f"{ROOT}{part}-images-idx3-ubyte.gz") as file:
        images = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 1, 28, 28)
    with gzip.open(f"{ROOT}{part}-labels-idx1-ubyte.gz") as file:
        labels = np.frombuffer(file.read(), np.uint8, offset=8).astype(np.int64)
    return torch.from_numpy(images.copy()), torch.from_numpy(labels)


def normal(images):
    return (images.float() / 255 - 0.2860) / 0.3530


def main():
    seconds, start = float(sys.argv[1]), time.monotonic()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    stem = [nn.Conv2d(1, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    blocks = [Block(8, 8, 1), Block(8, 16, 2), Block(16, 32, 2)]
    net = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    model = nn.parallel.DistributedDataParallel(net.train())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9, weight_decay=1e-4)
    images, labels = read("train")
    steps = epoch = 0
    over = torch.zeros(1)
    while not over:
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
        for batch in order[rank::world].split(32):
            optimizer.zero_grad(set_to_none=True)
            F.cross_entropy(model(normal(images[batch])), labels[batch]).backward()
            optimizer.step()
            steps += 1
            if steps % 50 == 0:
                over.fill_(time.monotonic() - start > seconds)
                dist.all_reduce(over, dist.ReduceOp.MAX)
                if over:
                    break
        epoch += 1
    if rank == 0:
        images, labels = read("t10k")
        net.eval()
        with torch.no_grad():
            parts = zip(images.split(250), labels.split(250))
            right = sum((net(normal(x)).argmax(1) == y).sum().item() for x, y in parts)
        print(f"{steps * 32 * world} images, accuracy {100 * right / len(labels):.2f}")
    dist.destroy_process_group()


main()
