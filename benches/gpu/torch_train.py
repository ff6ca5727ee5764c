"""Times whole mixed-precision training steps in PyTorch: the models of `configs/resnet_fashion.toml`, `resnet18.toml`,
`resnet50.toml`, `transformer.toml` and `gpt2.toml`.

    torch_train.py MODEL HOW [--seconds S] [--out FILE]

HOW: `eager`, `inductor` (`torch.compile`) or `graphs` (`torch.compile(mode="reduce-overhead")`, which captures CUDA
graphs); with `-nhwc` for channels-last, `-flash` for attention without cuDNN's, so by FlashAttention 2, or
`-deterministic` for deterministic algorithms only. A row is printed, and appended to FILE; `attention` is the kernel
that PyTorch chose.
"""

import argparse
import json
import os
import statistics
import time

import torch
from torch import nn
from torch.nn import functional as F

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ON_GPU = DEVICE == "cuda"


class Block(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
        self.short = None
        if stride != 1 or inputs != outputs:
            self.short = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + (x if self.short is None else self.short(x)))


def resnet(width, blocks, stem_stride=1):
    layers = [nn.Conv2d(1, width, 3, stem_stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    inputs = width
    for stage, count in enumerate(blocks):
        for block in range(count):
            layers.append(Block(inputs, width << stage, 2 if stage and not block else 1))
            inputs = width << stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 10))


class Bottleneck(nn.Module):
    def __init__(self, inputs, width, stride):
        super().__init__()
        outputs = 4 * width
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        self.short = None
        if stride != 1 or inputs != outputs:
            self.short = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        y = F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))
        return F.relu(self.bn3(self.conv3(y)) + (x if self.short is None else self.short(x)))


def resnet50(width, blocks, classes):
    layers = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    inputs = width
    for stage, count in enumerate(blocks):
        for block in range(count):
            layers.append(Bottleneck(inputs, width << stage, 2 if stage and not block else 1))
            inputs = 4 * width << stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


class GptLayer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        n, t, c = x.shape
        q, k, v = (y.view(n, t, self.heads, -1).transpose(1, 2) for y in self.qkv(self.norm1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(n, t, c))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self, vocab, context, width, heads, layers):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(context, width)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)
        self.layers = nn.Sequential(*[GptLayer(width, heads) for _ in range(layers)], nn.LayerNorm(width))

    def forward(self, tokens):
        x = self.layers(self.tokens(tokens) + self.positions.weight)
        return F.linear(x, self.tokens.weight).flatten(0, 1)


class Transformer(nn.Module):
    def __init__(self, width, heads, layers, feed_forward, patch):
        super().__init__()
        self.patch, positions = patch, (28 // patch) ** 2
        self.embed = nn.Linear(patch * patch, width)
        self.position = nn.Parameter(torch.randn(positions, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, heads, feed_forward, dropout=0.0, activation="gelu",
                                           batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        self.fc = nn.Linear(width, 10)

    def forward(self, x):
        n, p, side = x.shape[0], self.patch, 28 // self.patch
        x = x.reshape(n, 1, side, p, side, p).permute(0, 2, 4, 1, 3, 5).reshape(n, side * side, p * p)
        return self.fc(self.layers(self.embed(x) + self.position).mean(1))


def attention_kernel(model, dtype):
    """The name of PyTorch's kernel for the model's attention; `None` for a model without."""
    if model not in ATTENTION:
        return None
    shape, is_causal = ATTENTION[model]
    q = torch.empty(shape, device=DEVICE, dtype=dtype, requires_grad=True)
    return torch.nn.attention.SDPBackend(torch._fused_sdp_choice(q, q, q, is_causal=is_causal)).name


def optimizer(model, is_transformer):
    if is_transformer:
        return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, weight_decay=1e-4, fused=True)


# The model; a batch's shape; classes or tokens; the type on a GPU.
MODELS = {
    "resnet_fashion": (lambda: resnet(8, [1, 1, 1], 2), (32, 1, 28, 28), 10, torch.float16),
    "resnet18": (lambda: resnet(64, [2, 2, 2, 2]), (256, 1, 28, 28), 10, torch.float16),
    "resnet50": (lambda: resnet50(64, [3, 4, 6, 3], 1000), (128, 3, 224, 224), 1000, torch.bfloat16),
    "transformer": (lambda: Transformer(512, 8, 8, 2048, 2), (128, 1, 28, 28), 10, torch.float16),
    "gpt2": (lambda: Gpt(50304, 1024, 768, 12, 12), (16, 1024), 50257, torch.bfloat16),
}
# Shape of attention's operands, and whether it is causal.
ATTENTION = {"transformer": ((128, 8, 196, 64), False), "gpt2": ((16, 12, 1024, 64), True)}
# Without a GPU: to see that every line runs.
if not ON_GPU:
    MODELS = {
        "resnet_fashion": (lambda: resnet(4, [1, 1, 1], 2), (4, 1, 28, 28), 10, torch.bfloat16),
        "resnet18": (lambda: resnet(4, [1, 1, 1, 1]), (4, 1, 28, 28), 10, torch.bfloat16),
        "resnet50": (lambda: resnet50(4, [1, 1], 10), (4, 3, 32, 32), 10, torch.bfloat16),
        "transformer": (lambda: Transformer(16, 2, 1, 32, 7), (4, 1, 28, 28), 10, torch.bfloat16),
        "gpt2": (lambda: Gpt(64, 16, 16, 2, 1), (2, 16), 60, torch.bfloat16),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("how")
    parser.add_argument("--seconds", type=float, default=4.0, help="of timed steps")
    parser.add_argument("--out", help="file for the row")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    how, *options = args.how.split("-")
    if set(options) - {"nhwc", "flash", "deterministic"}:
        parser.error(f"unknown HOW {args.how}")
    layout = torch.channels_last if "nhwc" in options else torch.contiguous_format
    if "flash" in options:
        # Read at the first attention.
        os.environ["TORCH_CUDNN_SDPA_DEPRIORITIZED"] = "1"
    if "deterministic" in options:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True)
    make, shape, classes, dtype = MODELS[args.model]
    is_text = len(shape) == 2
    model = make().train().to(DEVICE).to(memory_format=layout)
    stepper = optimizer(model, args.model in ("transformer", "gpt2"))
    # bf16 needs none.
    scaler = torch.amp.GradScaler(DEVICE, enabled=dtype == torch.float16)
    modes = {"eager": None, "inductor": "default", "graphs": "reduce-overhead"}
    net = model if modes[how] is None else torch.compile(model, mode=modes[how])
    data = torch.randint(0, classes if is_text else 256, (16, *shape), dtype=torch.int64 if is_text else torch.uint8)
    labels = torch.randint(0, classes, (16, *(shape if is_text else shape[:1])))
    if ON_GPU:
        data, labels = data.pin_memory(), labels.pin_memory()

    def step(i):
        x, y = data[i % 16].to(DEVICE, non_blocking=True), labels[i % 16].to(DEVICE, non_blocking=True).flatten()
        if not is_text:
            x = x.float().div_(255).sub_(0.286).div_(0.353).contiguous(memory_format=layout)
        with torch.autocast(DEVICE, dtype=dtype):
            loss = F.cross_entropy(net(x), y)
        stepper.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.step(stepper)
        scaler.update()

    def wait():
        if ON_GPU:
            torch.cuda.synchronize()

    def timed(steps):
        wait()
        start = time.perf_counter()
        for i in range(steps):
            step(i)
        wait()
        return (time.perf_counter() - start) / steps

    timed(12 if ON_GPU else 2)
    # Rounds of about a fifth of the time.
    steps = max(1, int(args.seconds / 5 / timed(3)))
    rounds = sorted(1e3 * timed(steps) for _ in range(5))
    row = dict(what="step", model=args.model, who="torch", how=args.how, ms=round(statistics.median(rounds), 3),
               best=round(rounds[0], 3), attention=attention_kernel(args.model, dtype))
    print(json.dumps(row), flush=True)
    if args.out:
        with open(args.out, "a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
