"""Prints what torchvision's transforms make of images and batches, as JSON.

`transforms.json` is `python transforms.py`, made with PyTorch 2.15.0, torchvision 0.29.2 and Pillow 13.0.0, 2026-11-27.
With `--many SEED`, larger images, and more of them: what a test with torchvision at hand compares.
"""

import json
import sys

import numpy
import torch
from PIL import Image
from torchvision import transforms
from torchvision.transforms import functional as F
from torchvision.transforms import v2
from torchvision.transforms.functional import _compute_resized_output_size

FILTERS = ["NEAREST", "BOX", "BILINEAR", "HAMMING", "BICUBIC", "LANCZOS"]


def pixels(count, seed):
    """Bytes of a generator that the test has, too; every fourth image is black and white."""
    out, state = numpy.empty(count, numpy.uint8), seed
    for i in range(count):
        state = (state * 1103515245 + 12345) % 2**31
        out[i] = state >> 16 & 255
    return out if seed % 4 else numpy.where(out < 128, 0, 255).astype(numpy.uint8)


def image(channels, height, width, seed):
    planes = pixels(channels * height * width, seed).reshape(channels, height, width)
    return Image.fromarray(planes.transpose(1, 2, 0) if channels == 3 else planes[0])


def planes(picture):
    array = numpy.asarray(picture)
    return (array.transpose(2, 0, 1) if array.ndim == 3 else array).tobytes().hex()


def sizes(rng, largest):
    return [int(x) for x in rng.integers(1, largest + 1, 4)]


def resized(rng, count, largest):
    for i in range(count):
        height, width, *to = sizes(rng, largest)
        channels, name = (3, 1)[i % 2], FILTERS[i % 6]
        out = F.resize(image(channels, height, width, i), to, getattr(F.InterpolationMode, name))
        yield {"shape": [channels, height, width], "seed": i, "to": to, "filter": name, "pixels": planes(out)}


def short_edges(rng, count, largest):
    for _ in range(count):
        height, width, short, _ = sizes(rng, largest)
        size = _compute_resized_output_size((height, width), [short])
        yield {"size": [height, width], "short": short, "to": [int(x) for x in size]}


def cropped(rng, count, largest):
    for i in range(count):
        height, width, *to = sizes(rng, largest)
        out = F.center_crop(image(3, height, width, i), to)
        yield {"shape": [3, height, width], "seed": i, "to": to, "pixels": planes(out)}


def regions(rng, count, largest):
    """Random parts of images, from given numbers instead of PyTorch's."""
    torch.set_default_dtype(torch.float64)
    uniform, randint = torch.Tensor.uniform_, torch.randint
    for i in range(count):
        height, width = sizes(rng, largest)[:2]
        scale, ratio = ([0.08, 1.0], [3 / 4, 4 / 3]) if i % 3 else ([0.9, 1.0], [2.0, 2.5])
        units = rng.random(22).tolist()
        left = iter(units)
        torch.Tensor.uniform_ = lambda self, low, high: self.fill_(low + (high - low) * next(left))
        torch.randint = lambda low, high, size: torch.tensor([int(next(left) * high)])
        region = transforms.RandomResizedCrop.get_params(image(1, height, width, i), scale, ratio)
        yield {"size": [height, width], "scale": scale, "ratio": ratio, "units": units, "region": list(region)}
    torch.Tensor.uniform_, torch.randint = uniform, randint
    torch.set_default_dtype(torch.float32)


def jittered(rng, count, largest):
    names = ["brightness", "contrast", "saturation", "hue"]
    for i in range(count):
        height, width = sizes(rng, largest)[:2]
        factor = float(
            rng.uniform(-0.5, 0.5) if i % 4 == 3 else rng.choice([0, 1, rng.uniform(0, 1), rng.uniform(1, 3)]))
        out = getattr(F, f"adjust_{names[i % 4]}")(image(3, height, width, i + 1), factor)
        shape = [3, height, width]
        yield {"shape": shape, "seed": i + 1, "name": names[i % 4], "factor": factor, "pixels": planes(out)}


def normalized(rng, count, largest):
    for i in range(count):
        height, width = sizes(rng, largest)[:2]
        mean, std = rng.random((2, 3)).astype(numpy.float32).tolist()
        out = F.normalize(F.to_tensor(image(3, height, width, i)), mean, std)
        bits = out.numpy().tobytes().hex()
        yield {"shape": [3, height, width], "seed": i, "mean": mean, "std": std, "floats": bits}


def mixed(rng, count, largest):
    """Images of bytes / 255, labels 0, 1, 2, ...; both as the transforms make them of given parameters."""
    for i in range(count):
        height, width = sizes(rng, largest)[:2]
        shape, lam = [int(rng.integers(1, 5)), 2, height, width], float(rng.random())
        flat = pixels(int(numpy.prod(shape)), i).astype(numpy.float32) / numpy.float32(255)
        inputs, labels = torch.tensor(flat).reshape(shape), torch.arange(shape[0])
        transform = (v2.MixUp if i % 2 else v2.CutMix)(num_classes=shape[0])
        case = {"shape": shape, "seed": i, "lambda": lam}
        params = {"labels": labels, "batch_size": shape[0], "lam": lam}
        if i % 2 == 0:
            transform._dist = torch.distributions.Beta(torch.tensor(1.0), torch.tensor(1.0))
            transform._dist.sample = lambda _, lam=lam: torch.tensor(lam, dtype=torch.float64)
            centers = [int(rng.integers(width)), int(rng.integers(height))]
            randint, left = torch.randint, iter(centers)
            torch.randint = lambda high, size: torch.tensor([next(left)])
            made = transform.make_params([inputs])
            torch.randint = randint
            params |= {"box": made["box"], "lam": made["lam_adjusted"], "lam_adjusted": made["lam_adjusted"]}
            x1, y1, x2, y2 = [int(x) for x in made["box"]]
            case |= {"center": centers[::-1], "region": [y1, x1, y2 - y1, x2 - x1]}
        out = transform.transform(inputs, params).numpy().tobytes().hex()
        labels = transform.transform(labels, params).flatten().tolist()
        yield case | {"floats": out, "labels": labels}


def main():
    many = "--many" in sys.argv
    rng = numpy.random.default_rng(int(sys.argv[2]) if many else 0)
    count, largest = (300, 90) if many else (18, 9)
    parts = [resized, short_edges, cropped, regions, jittered, normalized, mixed]
    cases = {part.__name__: list(part(rng, count, largest)) for part in parts}
    print(json.dumps(cases).replace('}, {"', '},\n{"'))


if __name__ == "__main__":
    main()
