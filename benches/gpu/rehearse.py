"""Runs bench.py without a GPU: PyTorch's tensors on the CPU, our library on the fake GPU of the tests.

All parts and comparisons run, on few small tensors; the times are meaningless. run.sh --rehearse compiles the
fake and sets the environment variables by which it is found.
"""

import contextlib
import ctypes
import os
import time
import types

import torch
from torch.overrides import TorchFunctionMode

import bench


class OnTheCpu(TorchFunctionMode):
    def __torch_function__(self, function, _, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        if function is torch.as_tensor and hasattr(args[0], "__cuda_array_interface__"):
            memory = args[0].__cuda_array_interface__
            numbers = (ctypes.c_float * memory["shape"][0]).from_address(memory["data"][0])
            return torch.frombuffer(numbers, dtype=torch.float32)
        return function(*args, **kwargs)


class Streams:
    """Streams of the fake GPU, which are synchronized before PyTorch continues."""

    def __init__(self):
        self.fake = ctypes.CDLL(os.environ["COLLECTIVE_CUDA_LIB"])
        self.fake.fake_stream.restype = ctypes.c_void_p
        self.all = []

    def make(self):
        self.all.append(self.fake.fake_stream())
        return types.SimpleNamespace(cuda_stream=self.all[-1])

    def wait(self):
        for stream in self.all:
            self.fake.fake_stream_sync(ctypes.c_void_p(stream))


class Synchronous:
    """The library, synchronized after every call."""

    def __init__(self, lib, streams):
        self.lib, self.streams, self.path = lib, streams, lib.path

    def __getattr__(self, name):
        def call(*arguments):
            result = getattr(self.lib, name)(*arguments)
            self.streams.wait()
            return result

        return call


class Event:
    def __init__(self, **_):
        self.at = None

    def record(self):
        self.at = time.perf_counter()

    def elapsed_time(self, other):
        return 1e3 * (other.at - self.at)


class Rehearsal(bench.Bench):
    nccl_backend = "gloo"
    capturable = False
    program = os.path.abspath(__file__)

    def nccl_version(self):
        return max(23000, super().nccl_version())

    def times(self, calls, rounds=2):
        return super().times(calls, rounds)

    def capture(self, call, stream):
        return types.SimpleNamespace(replay=call)


def on_the_fake(lib, out):
    streams = Streams()
    current = streams.make()
    cuda = torch.cuda
    cuda.Event, cuda.Stream, cuda.synchronize = Event, streams.make, streams.wait
    cuda.current_stream = lambda: current
    cuda.stream = lambda _: contextlib.nullcontext()
    cuda.empty_cache = lambda: None
    cuda.get_device_name = lambda: "a fake"
    bench.COPIED, bench.SWEPT, bench.STEP_COUNT = 1000, 4096, 3000
    bench.REDUCED = (1000, 3, 70_000)
    for name, sizes in bench.CASES.items():
        bench.CASES[name] = [min(size, 700) for size in sizes[:12]]
    OnTheCpu().__enter__()
    return Rehearsal(Synchronous(lib, streams), torch, out)


if __name__ == "__main__":
    bench.main(on_the_fake)
