"""What `times.py` and `nccl.py` share: our library by ctypes, rows, and times of calls that run in turn.

With `--dry` every line runs on few small tensors without a GPU: PyTorch on the CPU, our library on the fake GPU that
the tests use. Times mean nothing then.
"""

import argparse
import contextlib
import ctypes
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time

F32, F16, BF16 = 0, 1, 2


def resnet50():
    sizes, inputs = [64 * 3 * 49, 64, 64], 64
    for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(blocks):
            for out, size in ((width, inputs), (width, 9 * width), (4 * width, width)):
                sizes += [out * size, out, out]
            if block == 0:
                sizes += [4 * width * inputs, 4 * width, 4 * width]
            inputs = 4 * width
    return sizes + [2048 * 1000, 1000]


CASES = {
    "10000 x 64": [64] * 10_000,
    "1e9 in 300": [1_000_000_000 // 300 // 8 * 8] * 300,
    "ResNet-50": resnet50(),
    "1000 x 1024": [1024] * 1000,
}
SIZES = dict(copy=1 << 30, cast=1 << 29, step=100_000_000)  # elements


class Failure(Exception):
    pass


def words(numbers):
    return (ctypes.c_uint64 * len(numbers))(*numbers)


def addresses(tensors):
    return words([t.data_ptr() for t in tensors])


def lengths(tensors):
    return words([t.numel() for t in tensors])


class Gpu:
    """PyTorch on a GPU."""

    device, backend = "cuda", "nccl"

    def __init__(self, torch):
        self.torch = torch

    def stream(self):
        return self.torch.cuda.current_stream().cuda_stream

    def other_stream(self):
        return self.torch.cuda.Stream()

    def on(self, stream):
        return self.torch.cuda.stream(stream)

    def wait(self):
        self.torch.cuda.synchronize()

    def milliseconds(self, call, repeats):
        start, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            call()
        end.record()
        self.wait()
        return start.elapsed_time(end) / repeats

    def captured(self, call, stream):
        """Captures a call in a CUDA graph without running it; returns the graph's launch."""
        self.wait()
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            call()
        return graph.replay

    def tensor(self, address, count):
        """Wraps memory that torch did not allocate in a tensor."""
        class At:
            __cuda_array_interface__ = dict(shape=(count,), typestr="<f4", version=3, data=(address, False))
        return self.torch.as_tensor(At(), device=self.device)


class Dry(Gpu):
    """PyTorch on the CPU, and our library on a fake GPU; times mean nothing."""

    device, backend = "cpu", "gloo"

    def __init__(self, torch):
        super().__init__(torch)
        self.driver = ctypes.CDLL("libcuda.so.1")
        SIZES.update(copy=1000, cast=4096, step=3000)
        for case, sizes in CASES.items():
            CASES[case] = [min(size, 700) for size in sizes[:12]]

    def stream(self):
        return None

    def other_stream(self):
        return argparse.Namespace(cuda_stream=None)

    def on(self, stream):
        return contextlib.nullcontext()

    def wait(self):
        self.driver.cuStreamSynchronize(None)

    def milliseconds(self, call, repeats):
        start = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - start)

    def captured(self, call, stream):
        return call

    def tensor(self, address, count):
        return self.torch.frombuffer((ctypes.c_float * count).from_address(address), dtype=self.torch.float32)


class Library:
    """Our kernels by their C interface; any failure is an exception."""

    def __init__(self, path, gpu):
        self.lib, self.gpu = ctypes.CDLL(path), gpu
        self.lib.gpu_error.restype = ctypes.c_char_p
        self.lib.gpu_group_end.restype = None

    def __getattr__(self, name):
        """Calls `gpu_NAME`: integers are 64 bits wide there, unless they are `ctypes`."""
        def call(*arguments):
            plain = {int: ctypes.c_uint64, bool: ctypes.c_int}
            if getattr(self.lib, "gpu_" + name)(*[plain.get(type(a), lambda a: a)(a) for a in arguments]):
                raise Failure(self.lib.gpu_error().decode())
            if isinstance(self.gpu, Dry):
                self.gpu.wait()
        return call


class Ours:
    """A session on a stream."""

    def __init__(self, lib, stream):
        self.lib, self.session = lib, ctypes.c_void_p()
        lib.open(ctypes.c_void_p(stream), ctypes.byref(self.session))

    def optimizer(self, rule, weights, grads, places=None):
        self.lib.optimizer(self.session, rule, len(weights), addresses(weights), places or addresses(grads),
                           lengths(weights), ctypes.c_int(F32), ctypes.c_int(F32))

    def step(self, check=False, max_norm=-1.0):
        self.lib.step(self.session, ctypes.c_float(1.0), check, ctypes.c_double(max_norm))

    def scaled(self):
        self.lib.loss_scale(self.session, ctypes.c_float(1.0))


class Bench:
    def __init__(self, args, name):
        import torch

        self.torch, self.gpu, self.rows = torch, (Dry if args.dry else Gpu)(torch), []
        self.path, self.deadline = os.path.join(args.out, name + ".json"), time.monotonic() + args.seconds
        self.lib = Library(args.library, self.gpu)
        self.ours, self.bandwidth = Ours(self.lib, self.gpu.stream()), None
        smi = ["nvidia-smi", "--query-gpu=name,driver_version,clocks.max.mem", "--format=csv,noheader"]
        self.head = dict(date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
                         command=" ".join(sys.argv), machine=platform.platform(), gpu=output(smi),
                         torch=torch.__version__, cuda=torch.version.cuda, python=platform.python_version(),
                         nvrtc=os.environ.get("NVRTC_LIBRARY"))

    def row(self, **fields):
        self.rows.append(fields)
        print("  ".join(f"{key} {value}" for key, value in fields.items()), flush=True)
        with open(self.path, "w") as file:
            json.dump(dict(self.head, rows=self.rows), file, indent=1)

    def part(self, call, *arguments):
        """Runs a part if there is time; a failure gives a row."""
        name = f"{call.__name__} {arguments[0] if arguments else ''}".strip()
        if time.monotonic() > self.deadline:
            return self.row(what="out of time", part=name)
        try:
            call(*arguments)
            self.torch.cuda.empty_cache()
        except Exception as error:
            self.row(what="failed", part=name, error=f"{type(error).__name__}: {error}"[:500])

    def random(self, sizes):
        return [self.torch.randn(n, device=self.gpu.device) for n in sizes]

    def params(self, weights, grads):
        """The same memory as PyTorch's parameters."""
        params = [self.torch.nn.Parameter(w) for w in weights]
        for param, grad in zip(params, grads):
            param.grad = grad
        return params

    def adamw(self, weights, grads, **how):
        params = self.params(weights, grads)
        return self.torch.optim.AdamW(params, lr=1e-3, weight_decay=0.01, **(how or dict(fused=True)))

    def times(self, calls, rounds=9):
        """Milliseconds a call of each, medians of rounds in which they run in turn."""
        repeats = {}
        for name, call in calls.items():
            self.gpu.milliseconds(call, 1)
            once = self.gpu.milliseconds(call, 1)
            repeats[name] = max(1, min(50, int(20 / max(once, 1e-3))))
        times = [[self.gpu.milliseconds(call, repeats[name]) for name, call in calls.items()] for _ in range(rounds)]
        return dict(zip(calls, map(statistics.median, zip(*times))))

    def report(self, what, case, calls, moved):
        """`moved`: bytes of our call."""
        times = self.times(calls)
        for name, ms in times.items():
            ours = name == "ours" and self.bandwidth
            self.row(what=what, case=case, who=name, ms=round(ms, 4), torch_by_ours=round(ms / times["ours"], 3),
                     of_copy=round(moved / ms / self.bandwidth, 3) if ours else None)


def output(command):
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5).stdout.strip() or None
    except (OSError, subprocess.TimeoutExpired):
        return None


def arguments(doc):
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--library", required=True, help="path of libgpu_bench.so")
    parser.add_argument("--out", default=".", help="the folder for rows")
    parser.add_argument("--seconds", type=float, default=300, help="no part begins later")
    parser.add_argument("--dry", action="store_true", help="without a GPU")
    return parser


def finish(bench):
    failed = [row for row in bench.rows if row["what"] == "failed" or row.get("same") is False]
    if failed:
        sys.exit(f"{len(failed)} parts failed or gave wrong results")
