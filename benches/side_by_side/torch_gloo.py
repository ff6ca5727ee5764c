"""Sums floats over the ranks with torch.distributed's gloo, timed as every program of this folder
is: one call that is checked, then per repetition a barrier and ITERATIONS calls on the same buffer.

Usage: torch_gloo.py NAME WORLD REPETITIONS BYTES:ITERATIONS...
Prints, per size: NAME WORLD BYTES BEST MEDIAN, times in microseconds a call.
"""

import os
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(rank, name, world, repetitions, sizes, rendezvous):
    # One thread a rank, as the other programs.
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    for size in sizes:
        bytes_, iterations = map(int, size.split(":"))
        x = torch.full((bytes_ // 4,), float(rank + 1))
        dist.all_reduce(x)
        assert bool((x == world * (world + 1) // 2).all())
        # Zeros stay zeros however often they are summed.
        x.zero_()
        times = []
        for _ in range(repetitions):
            dist.barrier()
            start = time.perf_counter()
            for _ in range(iterations):
                dist.all_reduce(x)
            times.append((time.perf_counter() - start) / iterations * 1e6)
        times.sort()
        if rank == 0:
            print(f"{name} {world} {bytes_} {times[0]:.3f} {times[len(times) // 2]:.3f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    name, world, repetitions, *sizes = sys.argv[1:]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        arguments = (name, int(world), int(repetitions), sizes, os.path.join(folder, "store"))
        mp.spawn(run, args=arguments, nprocs=int(world))
