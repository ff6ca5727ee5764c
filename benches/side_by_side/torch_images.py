"""PyTorch's side of images.sh. `torch_images.py make FOLDER COUNT` writes JPEGs as large as ImageNet's;
`torch_images.py load FOLDER WORKERS pil|tensors` prints the images a second that its loader makes of them: decoded and
transformed by Pillow, as `ImageFolder` does, or by torchvision on tensors of bytes.
"""

import pathlib
import sys
import time

import numpy
import torch
from PIL import Image
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms import v2


def make(folder, count):
    """Smooth colours of all scales and a little noise: 500 x 375, about 60 KB each."""
    rng = numpy.random.default_rng(0)
    for index in range(count):
        pixels = numpy.full((375, 500, 3), 118.0)
        for octave in range(1, 8):
            for channel in range(3):
                coarse = rng.normal(0, 60 / 1.45**octave, (2**octave * 3 // 4 + 1, 2**octave + 1))
                coarse = Image.fromarray(coarse.astype(numpy.float32))
                pixels[:, :, channel] += numpy.asarray(coarse.resize((500, 375), Image.BICUBIC))
        pixels += rng.normal(0, 6, (375, 500, 1))
        path = pathlib.Path(folder, str(index % 10), f"{index}.jpg")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.clip(0, 255).astype(numpy.uint8)).save(path, quality=90)


def to_tensor(path):
    return decode_image(path, ImageReadMode.RGB)


def load(folder, workers, kind):
    # As in workers. With more, threads that wait for one another take several times as long on a
    # busy machine.
    torch.set_num_threads(1)
    steps = [v2.Resize(256), v2.CenterCrop(224), v2.RandomHorizontalFlip()]
    steps += [v2.ToImage()] if kind == "pil" else []
    steps += [v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])]
    options = {} if kind == "pil" else {"loader": to_tensor}
    images = ImageFolder(folder, v2.Compose(steps), **options)
    loader = DataLoader(images, 32, shuffle=True, num_workers=workers, persistent_workers=workers > 0)
    # The first epoch brings files into memory and starts the workers.
    for _ in range(2):
        start = time.perf_counter()
        seen = sum(len(labels) for _, labels in loader)
        seconds = time.perf_counter() - start
    print(f"{seen / seconds:.1f}")


def main():
    match sys.argv[1:]:
        case ["make", folder, count]:
            make(folder, int(count))
        case ["load", folder, workers, kind]:
            load(folder, int(workers), kind)
        case _:
            sys.exit("see the head of this file")


if __name__ == "__main__":
    main()
