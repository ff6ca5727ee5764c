"""Writes pretrained.pth, pretrained_plain.pth: weights as PyTorch saves them. Made with PyTorch 2.15, 2026-11-27."""

from collections import OrderedDict
from pathlib import Path

import torch


def numbers(*shape, dtype=torch.float32):
    count = torch.Size(shape).numel()
    return (torch.arange(count) / 8).reshape(shape).to(dtype)


def main():
    here = Path(__file__).parent
    # As of a model under `DataParallel`, in MMEngine's checkpoint: a half, a transposed view, a
    # tied weight, a counter.
    tied = numbers(5, 3)
    state = OrderedDict(
        [
            ("module.embed.weight", tied),
            ("module.fc.weight", numbers(3, 4).t()),
            ("module.fc.bias", numbers(4, dtype=torch.float16)),
            ("module.norm.gamma", numbers(4, dtype=torch.float64)),
            ("module.norm.num_batches_tracked", torch.tensor(7)),
            ("module.head.weight", tied),
        ]
    )
    meta = {"epoch": 3, "mmengine_version": "0.10.7"}
    torch.save({"meta": meta, "state_dict": state}, here / "pretrained.pth")
    model = torch.nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.copy_(numbers(2, 3))
        model.bias.copy_(numbers(2))
    torch.save(model.state_dict(), here / "pretrained_plain.pth")


if __name__ == "__main__":
    main()
