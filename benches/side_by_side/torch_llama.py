"""PyTorch's side of llama.sh: `torch_llama.py f32|bf16 ROUNDS`, tokens a second, median of the steps."""

import statistics
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F

torch.set_num_threads(1)
VOCABULARY, WIDTH, INNER, LAYERS, HEADS, KV_HEADS, SAMPLES, COUNT = 512, 256, 688, 4, 8, 4, 16, 128
DEPTH = WIDTH // HEADS
angles = torch.outer(torch.arange(COUNT).float(), 10000.0 ** (-torch.arange(0, DEPTH, 2) / DEPTH))
cos, sin = (torch.cat([f(angles)] * 2, 1)[:, None] for f in (torch.cos, torch.sin))


def rope(x):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        linear = lambda i, o: nn.Linear(i, o, bias=False)
        self.norm, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.o = linear(WIDTH, WIDTH), linear(WIDTH, WIDTH)
        self.k, self.v = (linear(WIDTH, KV_HEADS * DEPTH) for _ in range(2))
        self.gate, self.up, self.down = linear(WIDTH, INNER), linear(WIDTH, INNER), linear(INNER, WIDTH)

    def forward(self, x):
        y = self.norm(x)
        q, k, v = (f(y).view(SAMPLES, COUNT, -1, DEPTH) for f in (self.q, self.k, self.v))
        q, k, v = (t.transpose(1, 2) for t in (rope(q), rope(k), v))
        q, k = q.to(v.dtype), k.to(v.dtype)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).reshape(SAMPLES, COUNT, WIDTH))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


net = nn.Sequential(
    nn.Embedding(VOCABULARY, WIDTH), *(Layer() for _ in range(LAYERS)), nn.RMSNorm(WIDTH),
    nn.Linear(WIDTH, VOCABULARY, bias=False),
)
optimizer = torch.optim.AdamW(net.parameters(), fused=True)
text = (torch.arange(SAMPLES * COUNT + 1) * 7919) % VOCABULARY
tokens, after = text[:-1].view(SAMPLES, COUNT), text[1:]


def step():
    start = time.perf_counter()
    with torch.autocast("cpu", torch.bfloat16, enabled=sys.argv[1] == "bf16"):
        loss = F.cross_entropy(net(tokens).flatten(0, 1), after)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return time.perf_counter() - start


step()
print(f"{SAMPLES * COUNT / statistics.median(step() for _ in range(int(sys.argv[2]))):.0f}")
