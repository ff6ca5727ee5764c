"""PyTorch's side of rnn.sh: `torch_rnn.py lstm|gru ROUNDS`, median ms of forward and backward."""

import statistics
import sys
import time

import torch

torch.set_num_threads(1)
model = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}[sys.argv[1]](128, 128, batch_first=True)
x = torch.randn(32, 64, 128)


def step():
    start = time.perf_counter()
    model.zero_grad(set_to_none=True)
    model(x)[0].square().mean().backward()
    return (time.perf_counter() - start) * 1e3


step()
print(f"{statistics.median(step() for _ in range(int(sys.argv[2]))):.3f}")
