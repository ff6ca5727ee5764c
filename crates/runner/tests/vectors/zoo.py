"""Makes `zoo.pth`: small networks of PyTorch's and torchvision's by the names of the zoo's, their inputs and results.

    zoo.py FOLDER
"""

import sys

import torch
from torch import nn
from torch.nn import functional as F
from torchvision.models.resnet import Bottleneck


class ResNet(nn.Module):
    """torchvision's `ResNet` of bottlenecks, but for its width, which is fixed there."""

    def __init__(self, width=4, blocks=(1, 2), classes=5):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width)
        inputs = width
        for stage, count in enumerate(blocks):
            planes, layers = width << stage, []
            for block in range(count):
                stride, down = 2 if stage and not block else 1, None
                if stride != 1 or inputs != 4 * planes:
                    down = nn.Sequential(nn.Conv2d(inputs, 4 * planes, 1, stride, bias=False),
                                         nn.BatchNorm2d(4 * planes))
                layers.append(Bottleneck(inputs, planes, stride, down))
                inputs = 4 * planes
            setattr(self, f"layer{stage + 1}", nn.Sequential(*layers))
        self.stages, self.fc = len(blocks), nn.Linear(inputs, classes)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        for stage in range(self.stages):
            x = getattr(self, f"layer{stage + 1}")(x)
        return self.fc(x.mean((2, 3)))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.ln_1, self.ln_2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.ModuleDict(dict(c_attn=nn.Linear(width, 3 * width), c_proj=nn.Linear(width, width)))
        self.mlp = nn.ModuleDict(dict(c_fc=nn.Linear(width, 4 * width), c_proj=nn.Linear(4 * width, width)))

    def forward(self, x):
        n, t, c = x.shape
        qkv = self.attn["c_attn"](self.ln_1(x)).view(n, t, 3, self.heads, c // self.heads)
        y = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4), is_causal=True)
        x = x + self.attn["c_proj"](y.transpose(1, 2).reshape(n, t, c))
        return x + self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](self.ln_2(x))))


class Gpt(nn.Module):
    """GPT-2 with `nn.Linear` for `Conv1D`, and exact GELU."""

    def __init__(self, vocab=19, context=6, width=8, heads=2, layers=2):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(context, width)
        self.h = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.ln_f = nn.LayerNorm(width)

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe.weight[:tokens.shape[1]]
        for block in self.h:
            x = block(x)
        return F.linear(self.ln_f(x), self.wte.weight)


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    resnet, gpt, out = ResNet().train(), Gpt(), {}
    # Norms that do something.
    for name, tensor in list(resnet.named_parameters()) + list(gpt.named_parameters()):
        if "bn" in name or "ln_" in name or "downsample.1" in name:
            tensor.data.add_(torch.randn_like(tensor) * 0.2)
    out |= {f"resnet.{name}": tensor.clone() for name, tensor in resnet.state_dict().items()}
    images = torch.randn(3, 3, 32, 32)
    with torch.no_grad():
        out |= {"images": images, "logits_of_training": resnet(images)}
        # With the running statistics of that pass.
        out["logits"] = resnet.eval()(images)
    out |= {f"gpt.{name}": tensor.detach().clone() for name, tensor in gpt.state_dict().items()}
    text = torch.randint(0, 19, (3, 7))
    logits = gpt(text[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
    loss.backward()
    out |= {"text": text, "logits_of_text": logits.detach(), "loss_of_text": loss.detach().reshape(1)}
    out |= {f"gradient.{name}": tensor.grad for name, tensor in gpt.named_parameters()}
    out = {name: tensor for name, tensor in out.items() if "num_batches" not in name}
    torch.save(out, sys.argv[1] + "/zoo.pth")


main()
