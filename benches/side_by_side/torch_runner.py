"""PyTorch's side of runner.sh: `torch_runner.py NAME ROUNDS [compile]`, ms per forward and backward."""

import statistics
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F

from torch_models import resnet

torch.set_num_threads(1)
name, rounds = sys.argv[1], int(sys.argv[2])


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.position = nn.Linear(4, 128), nn.Parameter(torch.randn(64, 128) * 0.02)
        layer = nn.TransformerEncoderLayer(
            128, 4, 512, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(
            layer, 2, norm=nn.LayerNorm(128), enable_nested_tensor=False
        )
        self.fc = nn.Linear(128, 10)

    def forward(self, x):
        n = x.shape[0]
        x = x.reshape(n, 1, 8, 2, 8, 2).permute(0, 2, 4, 1, 3, 5).reshape(n, 64, 4)
        return self.fc(self.layers(self.embed(x) + self.position).mean(1))


MODELS = {
    "mlp": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    ),
    "resnet16": lambda: resnet(16),
    "resnet64": lambda: resnet(64),
    "transformer": Transformer,
}

side, count = (16, 16) if name == "transformer" else (28, 64)
model = MODELS[name]().train()
if "compile" in sys.argv[3:]:
    model = torch.compile(model)
x, labels = torch.randn(count, 1, side, side), torch.arange(count) % 10


def step():
    model.zero_grad(set_to_none=True)
    F.cross_entropy(model(x), labels).backward()


step()
times = []
for _ in range(rounds):
    start = time.perf_counter()
    step()
    times.append(time.perf_counter() - start)
print(f"{statistics.median(times) * 1e3:.4f}")
