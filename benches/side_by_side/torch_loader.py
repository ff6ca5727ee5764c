"""PyTorch's side of loader.sh, and as its own program: the head of benches/src/bin/side_by_side_loader.rs says what it
measures. `torch_loader.py hide wait|spin WORKERS ITERATIONS`, `torch_loader.py memory WORKERS`.
"""

import os
import statistics
import sys
import time

import torch
from torch.utils.data import DataLoader, Dataset

BATCH, WAIT = 4, 0.005
torch.set_num_threads(1)


def calibrate():
    """Rounds of `spin` that take as long as a sample of `wait`."""
    rounds = 1000
    start = time.perf_counter()
    spin(100 * rounds)
    return max(1, int(100 * rounds * WAIT / (time.perf_counter() - start)))


def spin(rounds):
    x = 1
    for i in range(rounds):
        x = (x * 5 ^ i) & 0xFFFFFFFF
    return x


ROUNDS = None


def take(samples, spins):
    if spins:
        spin(samples * ROUNDS)
    else:
        time.sleep(WAIT * samples)


class Slow(Dataset):
    def __init__(self, length, spins):
        self.length, self.spins = length, spins

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        take(1, self.spins)
        return index


class Large(Dataset):
    def __len__(self):
        return 64 * BATCH

    def __getitem__(self, index):
        return torch.full((1 << 20,), float(index))


def hide(spins, workers, iterations):
    """Medians of five rounds' means, by turns."""
    global ROUNDS
    ROUNDS = calibrate()
    rounds = [], [], []

    def mean(steps, batches):
        start = time.perf_counter()
        for _ in range(iterations):
            if steps:
                take(BATCH, spins)
            if batches:
                next(batches)
        return (time.perf_counter() - start) * 1e3 / iterations

    def batches(count, **options):
        return iter(DataLoader(Slow(BATCH * count, spins), BATCH, shuffle=True, **options))

    for _ in range(5):
        rounds[0].append(mean(False, batches(iterations)))
        rounds[1].append(mean(True, None))
        both = batches(iterations + 1, num_workers=workers)
        # The first batch cannot be hidden.
        next(both)
        rounds[2].append(mean(True, both))
    print(*(f"{statistics.median(times):.3f}" for times in rounds))


def proportional_kib():
    """Memory of this process and its children, shared memory counted once."""
    total, processes = 0, ["self"]
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/children") as file:
            processes += file.read().split()
    for process in processes:
        with open(f"/proc/{process}/smaps_rollup") as file:
            total += next(int(line.split()[1]) for line in file if line.startswith("Pss:"))
    return total


def memory(workers):
    before = most = proportional_kib()
    for _ in DataLoader(Large(), BATCH, shuffle=True, num_workers=workers):
        time.sleep(0.005)
        most = max(most, proportional_kib())
    print(f"{(most - before) / 1024:.0f}")


def main():
    match sys.argv[1:]:
        case ["hide", kind, workers, iterations]:
            hide(kind == "spin", int(workers), int(iterations))
        case ["memory", workers]:
            memory(int(workers))
        case _:
            sys.exit("see the head of this file")


main()
