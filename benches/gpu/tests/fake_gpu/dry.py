"""Runs `times.py` or `nccl.py` without a GPU: PyTorch on the CPU, our library on the fake GPU, few small tensors.

    SCRIPT=times dry.py ARGUMENTS OF THE SCRIPT

Times mean nothing.
"""

import contextlib
import ctypes
import importlib
import os
import sys
import time
import types

import torch

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../.."))
import times  # noqa: E402

driver = ctypes.CDLL("libcuda.so.1")


def wait():
    driver.cuStreamSynchronize(None)


class Event:
    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.time = time.perf_counter()

    def elapsed_time(self, end):
        return 1e3 * (end.time - self.time)


class Graph:
    """Its calls run when they are captured."""

    def replay(self):
        pass


@contextlib.contextmanager
def capture(graph, stream, capture_error_mode):
    yield


class Library(times.Library):
    """Waits for each call: PyTorch reads results on the CPU."""

    def __getattr__(self, name):
        call = super().__getattr__(name)
        return lambda *arguments: (call(*arguments), wait())


times.Library = Library
torch.cuda.Event, torch.cuda.CUDAGraph, torch.cuda.graph = Event, Graph, capture
torch.cuda.Stream = torch.cuda.current_stream = lambda: types.SimpleNamespace(cuda_stream=None)
torch.cuda.stream = lambda stream: contextlib.nullcontext()
torch.cuda.synchronize = wait
times.DEVICE = "cpu"
times.ELEMENTS.update(copy=1000, cast=4096, step=3000)
for case, sizes in times.CASES.items():
    times.CASES[case] = [min(size, 700) for size in sizes[:12]]

script = importlib.import_module(os.environ["SCRIPT"])
if script is not times:
    script.BACKEND, script.COUNTS, script.NCCL_OF_TWO_RANKS = "gloo", (1000, 3, 70_000), 0
    script.tensor_at = lambda address, count: torch.frombuffer(
        (ctypes.c_float * count).from_address(address), dtype=torch.float32)
script.main()
