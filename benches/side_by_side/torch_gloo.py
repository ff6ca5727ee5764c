"""Sums floats over the ranks with torch.distributed's gloo, timed as every program of this folder
is: one call that is checked, then per repetition a barrier and ITERATIONS calls on the same buffer.

Usage: torch_gloo.py NAME WORLD REPETITIONS BYTES:ITERATIONS... (or one rank of it, by a launcher)
Prints, per size: NAME WORLD BYTES BEST MEDIAN, times in microseconds a call.
"""

import os
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(rank, name, world, repetitions, sizes, init_method):
    # One thread a rank, as the other programs.
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world)
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
    arguments = (name, int(world), int(repetitions), sizes)
    if "LOCAL_RANK" in os.environ:
        run(int(os.environ["RANK"]), *arguments, "env://")
    else:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        with tempfile.TemporaryDirectory() as folder:
            init_method = f"file://{folder}/store"
            mp.spawn(run, args=(*arguments, init_method), nprocs=int(world))
