"""Times of our kernels beside PyTorch's, in one process, on the same tensors and stream, in turn.

Rows go to `times.json` in the folder `--out`, each as soon as it is there, and to standard output. A part that fails
gives a row with the reason, and the other parts continue. Correctness is the tests': `run.sh tests`.
"""

import argparse
import ctypes
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys

import torch

DEVICE = "cuda"
F32, F16, BF16 = (ctypes.c_int(code) for code in range(3))


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


# The most important first.
CASES = {
    "10000 x 64": [64] * 10_000,
    "1e9 in 300": [1_000_000_000 // 300 // 8 * 8] * 300,
    "ResNet-50": resnet50(),
    "1000 x 1024": [1024] * 1000,
}
ELEMENTS = dict(copy=1 << 30, cast=1 << 29, step=100_000_000)


def random(sizes):
    return [torch.randn(n, device=DEVICE) for n in sizes]


def words(numbers):
    return (ctypes.c_uint64 * len(numbers))(*numbers)


def addresses(tensors):
    return words([t.data_ptr() for t in tensors])


def lengths(tensors):
    return words([t.numel() for t in tensors])


class Library:
    """Our kernels by their C interface; any failure is an exception."""

    def __init__(self, path):
        self.lib = ctypes.CDLL(path)
        self.lib.gpu_error.restype = ctypes.c_char_p
        self.lib.gpu_group_end.restype = None

    def __getattr__(self, name):
        """Calls `gpu_NAME`: integers are 64 bits wide there, unless they are `ctypes`."""
        def call(*arguments):
            plain = {int: ctypes.c_uint64, bool: ctypes.c_int}
            if getattr(self.lib, "gpu_" + name)(*[plain.get(type(a), lambda a: a)(a) for a in arguments]):
                raise RuntimeError(self.lib.gpu_error().decode())
        return call


class Session:
    """Our optimizer, scaler and casts, on PyTorch's current stream."""

    def __init__(self, lib):
        self.lib, self.session = lib, ctypes.c_void_p()
        lib.open(ctypes.c_void_p(torch.cuda.current_stream().cuda_stream), ctypes.byref(self.session))

    def optimizer(self, rule, weights, grads, places=None):
        self.lib.optimizer(self.session, rule, len(weights), addresses(weights), places or addresses(grads),
                           lengths(weights), F32, F32)

    def step(self, check=False, max_norm=-1.0):
        self.lib.step(self.session, ctypes.c_float(1.0), check, ctypes.c_double(max_norm))

    def scaled(self):
        self.lib.loss_scale(self.session, ctypes.c_float(1.0))


def optimizer_of_torch(kind, weights, grads, **options):
    """On the same memory."""
    params = [torch.nn.Parameter(w) for w in weights]
    for param, grad in zip(params, grads):
        param.grad = grad
    return kind(params, lr=1e-3, **options)


def milliseconds(call, repeats):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats


def times(calls, rounds=9):
    """Milliseconds a call of each, medians of rounds in which they run in turn."""
    repeats = {}
    for name, call in calls.items():
        milliseconds(call, 1)
        repeats[name] = max(1, min(50, int(20 / max(milliseconds(call, 1), 1e-3))))
    all_times = [[milliseconds(call, repeats[name]) for name, call in calls.items()] for _ in range(rounds)]
    return dict(zip(calls, map(statistics.median, zip(*all_times))))


class Record:
    """The rows of a run, with its date, command and machine."""

    def __init__(self, path):
        smi = "nvidia-smi --query-gpu=name,driver_version,clocks.max.mem --format=csv,noheader"
        gpu = subprocess.run(smi, shell=True, capture_output=True, text=True).stdout.strip()
        self.path, self.rows, self.bandwidth = path, [], None
        self.head = dict(date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
                         command=" ".join(sys.argv), machine=platform.platform(), gpu=gpu, torch=torch.__version__,
                         cuda=torch.version.cuda, nvrtc=os.environ.get("NVRTC_LIBRARY"))

    def row(self, **fields):
        self.rows.append(fields)
        print("  ".join(f"{key} {value}" for key, value in fields.items()), flush=True)
        with open(self.path, "w") as file:
            json.dump(dict(self.head, rows=self.rows), file, indent=1)

    def compare(self, what, case, moved, **calls):
        """Times `ours`, which moves so many bytes, and others."""
        ms = times(calls)
        for who, time in ms.items():
            of_copy = round(moved / time / self.bandwidth, 3) if who == "ours" and self.bandwidth else None
            self.row(what=what, case=case, who=who, ms=round(time, 4), torch_by_ours=round(time / ms["ours"], 3),
                     of_copy=of_copy)

    def part(self, call, *arguments):
        try:
            call(*arguments)
            torch.cuda.empty_cache()
        except Exception as error:
            self.row(what="failed", part=f"{call.__name__} {arguments}", error=f"{type(error).__name__}: {error}"[:500])

    def finish(self):
        failed = [row for row in self.rows if row["what"] == "failed" or row.get("same") is False]
        if failed:
            sys.exit(f"{len(failed)} parts failed or gave wrong results")


class Times(Record):
    def __init__(self, lib, path):
        super().__init__(path)
        self.lib, self.ours = lib, Session(lib)

    def copy(self):
        source = torch.empty(ELEMENTS["copy"], device=DEVICE)
        target = torch.empty_like(source)
        self.bandwidth = 8 * ELEMENTS["copy"] / times(dict(copy=lambda: target.copy_(source)))["copy"]
        self.row(what="copy", case="4 GiB", gb_per_s=round(self.bandwidth / 1e6))

    def amp_step(self, case, clip):
        weights, grads = random(CASES[case]), random(CASES[case])
        self.ours.optimizer(b"adamw", weights, grads)
        self.ours.scaled()
        peer = optimizer_of_torch(torch.optim.AdamW, weights, grads, fused=True)
        scaler = torch.amp.GradScaler(DEVICE, init_scale=1.0, growth_interval=10**9)
        scaler.scale(torch.ones((), device=DEVICE))

        def fused():
            if clip:
                scaler.unscale_(peer)
                torch.nn.utils.clip_grad_norm_(peer.param_groups[0]["params"], 1.0, foreach=True)
            scaler.step(peer)
            scaler.update()

        ours = lambda: self.ours.step(True, 1.0 if clip else -1.0)
        self.compare("AMP step" + ", clipped" * clip, case, 32 * sum(CASES[case]), ours=ours, fused=fused)

    def optimizers(self, case):
        weights, grads = random(CASES[case]), random(CASES[case])
        for rule, kind, options, moved in ((b"adamw", torch.optim.AdamW, {}, 28),
                                           (b"sgd", torch.optim.SGD, dict(momentum=0.9), 20)):
            self.ours.optimizer(rule, weights, grads)
            peers = {how: optimizer_of_torch(kind, weights, grads, **{how: True}, **options).step
                     for how in ("fused", "foreach")}
            self.compare(rule.decode(), case, moved * sum(CASES[case]), ours=self.ours.step, **peers)

    def cast(self, source, target, codes):
        a = torch.randn(ELEMENTS["cast"], device=DEVICE).to(source)
        b = torch.empty_like(a, dtype=target)
        ours = lambda: self.lib.cast(self.ours.session, a.data_ptr(), codes[0], b.data_ptr(), codes[1], a.numel())
        self.compare("cast", f"{source} to {target}", 6 * a.numel(), ours=ours, torch=lambda: b.copy_(a))

    def graph(self, case):
        """A step in a CUDA graph."""
        weights, grads, stream = random(CASES[case]), random(CASES[case]), torch.cuda.Stream()
        peer = optimizer_of_torch(torch.optim.AdamW, weights, grads, fused=True, capturable=DEVICE == "cuda")
        torch.cuda.synchronize()
        replays = {}
        with torch.cuda.stream(stream):
            session = Session(self.lib)
            session.optimizer(b"adamw", weights, grads)
            for who, call in dict(ours=lambda: session.step(True, 1.0), fused=peer.step).items():
                call()
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                    call()
                replays[who] = graph.replay
        self.compare("graph of a clipped step", case, 32 * sum(CASES[case]), **replays)

    def step(self):
        """Three steps, for ncu."""
        weights, grads = random([ELEMENTS["step"]]), random([ELEMENTS["step"]])
        self.ours.optimizer(b"adamw", weights, grads)
        for _ in range(3):
            self.ours.step()
        torch.cuda.synchronize()

    def all(self):
        self.part(self.copy)
        for case in CASES:
            self.part(self.amp_step, case, False)
            self.part(self.amp_step, case, True)
            self.part(self.optimizers, case)
        self.part(self.graph, "ResNet-50")
        self.part(self.cast, torch.float32, torch.float16, (F32, F16))
        self.part(self.cast, torch.float32, torch.bfloat16, (F32, BF16))
        self.part(self.cast, torch.bfloat16, torch.float32, (BF16, F32))


def arguments(doc):
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--library", required=True, help="path of libgpu_bench.so")
    parser.add_argument("--out", default=".", help="the folder for rows")
    return parser


def main():
    parser = arguments(__doc__)
    parser.add_argument("--step", action="store_true", help="only what ncu is to see")
    args = parser.parse_args()
    record = Times(Library(args.library), os.path.join(args.out, "times.json"))
    if args.step:
        return record.step()
    record.all()
    record.finish()


if __name__ == "__main__":
    main()
