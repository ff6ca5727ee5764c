"""Compares our kernels with PyTorch's in one process, on the same tensors and stream, in turn.

First it checks correctness (bits of our CPU optimizers, values in float64), then it measures times: medians of
rounds in which each program runs once. Rows go to a JSON file and a table. A part that fails gives a row, and
the other parts continue. `--dry` needs neither GPU nor PyTorch: it calls the functions that need no GPU, and
checks that a missing GPU is an error.

run.sh runs `--small` under compute-sanitizer and `--step` under ncu; `--traffic` reads ncu's table; `--record`
writes all rows to one dated file.
"""

import argparse
import array
import csv
import ctypes
import datetime
import glob
import json
import math
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
F32, F16, BF16 = 0, 1, 2
DEADLINE = time.monotonic() + 280  # seconds; run.sh is to end before nine minutes
RULES = ("adamw", "sgd", "lamb", "adam", "adamp", "adadelta", "bert_adam", "rmsprop", "rmsprop_tf")
COPIED = 1 << 30  # elements
SWEPT = 1 << 29
REDUCED = (1 << 18, 25 << 18, 1 << 28)


def library(path):
    lib = ctypes.CDLL(path)
    pointer, word, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
    lib.gpu_error.restype = ctypes.c_char_p
    lib.gpu_open.argtypes = [pointer, pointer]
    lib.gpu_optimizer.argtypes = [pointer, ctypes.c_char_p, size, pointer, pointer, pointer, word, word]
    lib.gpu_tune.argtypes = [pointer, pointer]
    lib.gpu_loss_scale.argtypes = [pointer, ctypes.c_float]
    lib.gpu_step.argtypes = [pointer, ctypes.c_float, word, ctypes.c_double]
    lib.gpu_reference.argtypes = [ctypes.c_char_p, size, size, pointer, pointer, pointer, word, word,
                                  ctypes.c_float, word, ctypes.c_double]
    lib.gpu_cast.argtypes = [pointer, ctypes.c_uint64, word, ctypes.c_uint64, word, size]
    lib.gpu_scaler.argtypes = [pointer, size, pointer, pointer, word]
    lib.gpu_unscale.argtypes = [pointer]
    lib.gpu_nccl_version.argtypes = []
    lib.gpu_group.argtypes = [pointer, word, word, word, word, pointer]
    lib.gpu_group_end.argtypes, lib.gpu_group_end.restype = [pointer], None
    lib.gpu_join.argtypes = [pointer, ctypes.c_char_p, size, pointer, pointer, word, ctypes.c_double,
                             ctypes.c_float]
    lib.gpu_joined_average.argtypes = [pointer, pointer]
    lib.gpu_joined_step.argtypes = [pointer]
    lib.gpu_all_reduce.argtypes = [pointer, ctypes.c_uint64, size, word]
    lib.gpu_reducer.argtypes = [pointer, size, pointer, word]
    lib.gpu_reduce.argtypes = [pointer, pointer, pointer]
    return lib


class Failure(Exception):
    pass


def words(numbers):
    return (ctypes.c_uint64 * len(numbers))(*numbers)


class Ours:
    def __init__(self, lib, stream):
        self.lib, self.session = lib, ctypes.c_void_p()
        self.check(lib.gpu_open(stream, ctypes.byref(self.session)))

    def check(self, status):
        if status:
            raise Failure(self.lib.gpu_error().decode())

    def optimizer(self, rule, weights, grads, weight_type, grad_type):
        self.check(self.lib.gpu_optimizer(
            self.session, rule, len(weights), words([w.data_ptr() for w in weights]),
            words([g.data_ptr() for g in grads]), words([w.numel() for w in weights]), weight_type,
            grad_type))

    def tune(self):
        found = (ctypes.c_uint32 * 3)()
        self.check(self.lib.gpu_tune(self.session, found))
        return "{} blocks, {} a warp, {} a thread".format(*found)

    def step(self, grad_scale=1.0, check=0, max_norm=-1.0):
        self.check(self.lib.gpu_step(self.session, grad_scale, check, max_norm))


def reference(lib, rule, steps, weights, grads, lens, types, grad_scale=1.0, check=0, max_norm=-1.0):
    status = lib.gpu_reference(rule, steps, len(lens), words(weights), words(grads), words(lens), *types,
                               grad_scale, check, max_norm)
    if status:
        raise Failure(lib.gpu_error().decode())


def adamw_by_hand(weight, grad, steps):
    m = [0.0] * len(weight)
    v = [0.0] * len(weight)
    for t in range(1, steps + 1):
        for i, g in enumerate(grad):
            m[i] = 0.9 * m[i] + 0.1 * g
            v[i] = 0.999 * v[i] + 0.001 * g * g
            root = math.sqrt(v[i] / (1 - 0.999**t)) + 1e-8
            weight[i] = weight[i] * (1 - 1e-5) - 1e-3 * m[i] / (1 - 0.9**t) / root
    return weight


def dry(lib):
    weight = array.array("f", [math.sin(i) for i in range(3000)])
    grad = array.array("f", [math.cos(3 * i) for i in range(3000)])
    expected = adamw_by_hand(list(weight), list(grad), 3)
    reference(lib, b"adamw", 3, [weight.buffer_info()[0]], [grad.buffer_info()[0]], [3000], (F32, F32))
    worst = max(abs(a - b) for a, b in zip(weight, expected))
    assert worst < 1e-6, worst
    print(f"reference: within {worst:.1e} of float64")
    for rule in RULES:
        reference(lib, rule.encode(), 1, [weight.buffer_info()[0]], [grad.buffer_info()[0]], [3000],
                  (F32, F32))
    try:
        reference(lib, b"none", 1, [0], [0], [0], (F32, F32))
        raise AssertionError("no such rule, but no error")
    except Failure as error:
        print(f"unknown rule: {error}")
    try:
        Ours(lib, None)
        print("there is a GPU: run without --dry")
    except Failure as error:
        print(f"no GPU: {error}")
        assert "libcuda" in str(error) or "CUDA_ERROR" in str(error), error
    group = ctypes.c_void_p()
    if lib.gpu_group(None, 0, 0, 1, 0, ctypes.byref(group)):
        print(f"no NCCL: {lib.gpu_error().decode()}")
    with tempfile.TemporaryDirectory() as folder:
        table = os.path.join(folder, "ncu.csv")
        with open(table, "w") as file:
            file.write(NCU_TABLE)
        rows = traffic(table)
        print(f"ncu's table: {rows}")
        assert rows[0]["bytes_per_parameter"] == 28.0, rows
        with open(os.path.join(folder, "rows.json"), "w") as file:
            json.dump(rows, file)
        name = record(folder, folder, "the command")
        with open(name) as file:
            assert json.load(file)["rows"] == rows
        print(f"record: {os.path.basename(name)}")


# As ncu prints `--csv`: lines of the program, then a table.
NCU_TABLE = """==PROF== Connected to process 7
"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","look","dram__bytes_read.sum","byte","1,024"
"0","look","dram__bytes_write.sum","byte","0"
"1","step","dram__bytes_read.sum","Mbyte","1,600"
"1","step","dram__bytes_write.sum","Mbyte","1,200"
"""
UNITS = {"byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}
STEP_COUNT = 100_000_000  # parameters of --step


def traffic(path):
    """Bytes per parameter that the last `step` moved, from ncu's table."""
    with open(path) as file:
        lines = file.read().splitlines()
    head = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if head is None:
        raise Failure("ncu gave no table: " + " ".join(lines[-3:]))
    found = {}
    for row in csv.DictReader(lines[head:]):
        if row["Kernel Name"].split("(")[0] == "step" and row["ID"]:
            size = float(row["Metric Value"].replace(",", "")) * UNITS[row["Metric Unit"]]
            found.setdefault(int(row["ID"]), {})[row["Metric Name"]] = size
    if not found:
        raise Failure("ncu saw no kernel `step`")
    last = found[max(found)]
    total = sum(last.values()) / STEP_COUNT
    return [dict(what="traffic", who="adamw, step", bytes_per_parameter=round(total, 2))]


def version(command):
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5)
        return done.stdout.strip() or None
    except (OSError, subprocess.TimeoutExpired):
        return None


def record(rows_in, folder, command):
    """Writes the record of this run: date, command, device, and all rows. Returns its name."""
    rows = []
    for name in sorted(glob.glob(os.path.join(rows_in, "rows*.json"))):
        with open(name) as file:
            rows += json.load(file)
    now = datetime.datetime.now(datetime.timezone.utc)
    smi = ["nvidia-smi", "--query-gpu=name,driver_version,clocks.max.mem", "--format=csv,noheader"]
    commit = ["git", "-C", HERE, "rev-parse", "HEAD"]
    out = dict(date=now.isoformat(timespec="seconds"), command=command, machine=platform.platform(),
               gpu=version(smi), commit=version(commit), rows=rows)
    # If that folder is not writable, next to the rows.
    for place in (folder, rows_in):
        name = os.path.join(place, now.strftime("gpu-%Y-%m-%d-%H%M.json"))
        try:
            os.makedirs(place, exist_ok=True)
            with open(name, "w") as file:
                json.dump(out, file, indent=1)
            return name
        except OSError as error:
            print(f"no record there: {error}", file=sys.stderr)
    raise Failure("no record could be written")


def resnet50():
    sizes = [64 * 3 * 49, 64, 64]
    inputs = 64
    for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(blocks):
            for out, size in ((width, inputs), (width, 9 * width), (4 * width, width)):
                sizes += [out * size, out, out]
            if block == 0:
                sizes += [4 * width * inputs, 4 * width, 4 * width]
            inputs = 4 * width
    return sizes + [2048 * 1000, 1000]


CASES = {
    "1e9 in 300": [1_000_000_000 // 300 // 8 * 8] * 300,
    "ResNet-50": resnet50(),
    "1000 x 1024": [1024] * 1000,
    "10000 x 64": [64] * 10_000,
}


class Bench:
    nccl_backend = "nccl"
    capturable = True
    program = os.path.abspath(__file__)

    def __init__(self, lib, torch, out):
        self.lib, self.torch, self.rows, self.out = lib, torch, [], out
        self.ours = Ours(lib, torch.cuda.current_stream().cuda_stream)
        self.ceiling = None

    def row(self, **fields):
        self.rows.append(fields)
        print("  ".join(f"{key} {value}" for key, value in fields.items()), flush=True)
        with open(self.out, "w") as file:
            json.dump(self.rows, file, indent=1)

    def left(self):
        return DEADLINE - time.monotonic()

    def part(self, name, seconds, call):
        """Runs a part if there is time; a failure gives a row."""
        if self.left() < seconds:
            return self.row(what="out of time", part=name)
        try:
            call()
        except Exception as error:
            self.row(what="failed", part=name, error=f"{type(error).__name__}: {error}"[:500])
        finally:
            try:
                self.torch.cuda.empty_cache()
            except Exception as error:
                self.row(what="failed", part=name + ", afterwards", error=str(error)[:500])

    def times(self, calls, rounds=9):
        """Milliseconds a call of each, medians of rounds in which they run in turn."""
        torch, all_times = self.torch, {name: [] for name in calls}
        repeats = {}
        for name, call in calls.items():
            call()
            torch.cuda.synchronize()
            start = time.monotonic()
            call()
            torch.cuda.synchronize()
            repeats[name] = max(1, min(50, int(0.02 / max(time.monotonic() - start, 1e-6))))
        for _ in range(rounds):
            for name, call in calls.items():
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                for _ in range(repeats[name]):
                    call()
                end.record()
                torch.cuda.synchronize()
                all_times[name].append(start.elapsed_time(end) / repeats[name])
        return {name: statistics.median(values) for name, values in all_times.items()}

    def report(self, what, case, times, moved):
        """`moved`: bytes of our call."""
        ours = times["ours"]
        for name, ms in times.items():
            self.row(what=what, case=case, who=name, ms=round(ms, 4), torch_by_ours=round(ms / ours, 3),
                     of_copy=round(moved / ours / 1e6 / self.ceiling, 3)
                     if name == "ours" and self.ceiling else None)

    def correctness(self):
        torch, seed = self.torch, time.time_ns() % 2**31
        torch.manual_seed(seed)
        self.row(what="fresh data", seed=seed)
        sizes = [1, 7, 8, 1023, 1025, 4097, 16384, 70_001, 300_000, 0]
        dtypes = {F32: torch.float32, F16: torch.float16, BF16: torch.bfloat16}
        for rule in [rule.encode() for rule in RULES]:
            some = (b"adamw", b"sgd", b"lamb")
            pairs = ((F32, F32), (F16, F16), (BF16, BF16), (F32, BF16))
            for weight_type, grad_type in pairs if rule in some else pairs[:2]:
                for check, max_norm in ((0, -1.0), (1, 0.5)):
                    weights = [torch.randn(n, device="cuda").to(dtypes[weight_type]) for n in sizes]
                    grads = [torch.randn(n, device="cuda").to(dtypes[grad_type]) for n in sizes]
                    host = [[t.cpu() for t in some] for some in (weights, grads)]
                    self.ours.optimizer(rule, weights, grads, weight_type, grad_type)
                    for _ in range(3):
                        self.ours.step(1.0, check, max_norm)
                    torch.cuda.synchronize()
                    reference(self.lib, rule, 3, *[[t.data_ptr() for t in some] for some in host], sizes,
                              (weight_type, grad_type), 1.0, check, max_norm)
                    same = all(torch.equal(a.cpu().view(torch.uint8), b.view(torch.uint8))
                               for a, b in zip(weights, host[0]))
                    self.row(what="bits as on the CPU", rule=rule.decode(), weight=weight_type,
                             grad=grad_type, clipped=max_norm > 0, same=same)
        self.against_float64()
        self.overflow()
        for source, target in ((F32, F16), (F32, BF16), (F16, F32), (BF16, F32)):
            values = torch.randn(100_003, device="cuda").mul_(1e3).to(dtypes[source])
            # Poisoned, so that unwritten elements show.
            result = torch.full_like(values, float("nan"), dtype=dtypes[target])
            self.cast(values, source, result, target)
            self.row(what="cast as PyTorch's", source=source, target=target,
                     same=torch.equal(result, values.to(dtypes[target])))

    def against_float64(self):
        """Compares five steps with PyTorch's in float64, and unscaling with a division."""
        torch = self.torch
        peers = {
            "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.01, fused=False),
            "sgd": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9, fused=False),
            "adam": lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True, fused=False),
            "adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
            "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.9, centered=True),
        }
        for rule, peer in peers.items():
            weight = torch.randn(100_000, device="cuda")
            grad = torch.randn_like(weight)
            double = torch.nn.Parameter(weight.double())
            double.grad = grad.double()
            peer = peer([double])
            self.ours.optimizer(rule.encode(), [weight], [grad], F32, F32)
            for _ in range(5):
                self.ours.step()
                peer.step()
            worst = (weight.double() - double).abs().max().item()
            self.row(what="against float64", rule=rule, worst=worst, fine=worst < 4e-6)
        grad = torch.randn(100_003, device="cuda").mul_(65536)
        wide = grad.double() / 65536
        self.ours.check(self.lib.gpu_scaler(self.ours.session, 1, words([grad.data_ptr()]),
                                            words([grad.numel()]), F32))
        self.ours.check(self.lib.gpu_unscale(self.ours.session))
        self.row(what="unscale as a division", same=torch.equal(grad.double(), wide))

    def overflow(self):
        """Checks that a step with one non-finite gradient changes nothing."""
        torch = self.torch
        for bad in (float("inf"), float("nan")):
            weight, grad = (torch.randn(300_001, device="cuda") for _ in range(2))
            self.ours.optimizer(b"adamw", [weight], [grad], F32, F32)
            before = weight.clone()
            grad[time.time_ns() % grad.numel()] = bad
            self.ours.step(1.0, 1, -1.0)
            self.row(what="an overflow moves nothing", value=str(bad), same=torch.equal(weight, before))

    def cast(self, source, source_type, target, target_type):
        self.ours.check(self.lib.gpu_cast(self.ours.session, source.data_ptr(), source_type,
                                          target.data_ptr(), target_type, source.numel()))

    def copy(self):
        source = self.torch.empty(COPIED, device="cuda")
        target = self.torch.empty_like(source)
        times = self.times({"copy": lambda: target.copy_(source)})
        self.ceiling = 8 * COPIED / times["copy"] / 1e6
        self.row(what="copy", case="4 GiB", gb_per_s=round(self.ceiling))

    def optimizers(self, case, sizes):
        torch = self.torch
        weights = [torch.randn(n, device="cuda") for n in sizes]
        grads = [torch.randn_like(w) for w in weights]
        count = sum(sizes)
        for rule, moved in ((b"adamw", 28), (b"sgd", 20), (b"lamb", 40)):
            if self.left() < 20:
                return self.row(what="out of time", part=f"{rule.decode()} {case}")
            self.ours.optimizer(rule, weights, grads, F32, F32)
            calls = {"ours": self.ours.step}
            peers = []
            for style in ("fused", "foreach"):
                params = [torch.nn.Parameter(w) for w in weights]
                for param, grad in zip(params, grads):
                    param.grad = grad
                if rule == b"adamw":
                    peer = torch.optim.AdamW(params, lr=1e-3, weight_decay=0.01, **{style: True})
                elif rule == b"sgd":
                    peer = torch.optim.SGD(params, lr=1e-3, momentum=0.9, **{style: True})
                else:
                    break
                peers.append(peer)
                calls["torch " + style] = peer.step
            self.report(rule.decode(), case, self.times(calls), moved * count)
            del peers, calls
            torch.cuda.empty_cache()

    def amp_step(self, case, sizes, clip):
        torch = self.torch
        weights = [torch.randn(n, device="cuda") for n in sizes]
        grads = [torch.randn_like(w) for w in weights]
        self.ours.optimizer(b"adamw", weights, grads, F32, F32)
        self.ours.check(self.lib.gpu_loss_scale(self.ours.session, 1.0))
        params = [torch.nn.Parameter(w) for w in weights]
        for param, grad in zip(params, grads):
            param.grad = grad
        peer = torch.optim.AdamW(params, lr=1e-3, weight_decay=0.01, fused=True)
        scaler = torch.amp.GradScaler("cuda", init_scale=1.0, growth_interval=10**9)
        scaler.scale(torch.ones((), device="cuda"))

        def torch_step():
            if clip:
                scaler.unscale_(peer)
                torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=True)
            scaler.step(peer)
            scaler.update()

        ours = lambda: self.ours.step(1.0, 1, 1.0 if clip else -1.0)
        times = self.times({"ours": ours, "torch fused": torch_step})
        self.report("AMP step" + (", clipped" if clip else ""), case, times, 32 * sum(sizes))

    def passes(self):
        torch, count = self.torch, SWEPT
        types = {F32: torch.float32, F16: torch.float16, BF16: torch.bfloat16}
        for source, target in ((F32, F16), (F32, BF16), (BF16, F32)):
            a = torch.randn(count, device="cuda").to(types[source])
            b = torch.empty(count, device="cuda", dtype=types[target])
            calls = {"ours": lambda: self.cast(a, source, b, target), "torch": lambda: b.copy_(a)}
            self.report("cast", f"{source} to {target}", self.times(calls), 6 * count)
        grads = [torch.randn(count // 64, device="cuda") for _ in range(64)]
        self.ours.check(self.lib.gpu_scaler(self.ours.session, 64, words([g.data_ptr() for g in grads]),
                                            words([g.numel() for g in grads]), F32))
        found, inverse = torch.zeros((), device="cuda"), torch.full((), 1.0 / 65536, device="cuda")
        calls = {
            "ours": lambda: self.ours.check(self.lib.gpu_unscale(self.ours.session)),
            "torch": lambda: torch._amp_foreach_non_finite_check_and_unscale_(grads, found, inverse),
        }
        self.report("unscale", "5e8 in 64", self.times(calls), 8 * count)

    def overhead(self):
        """Host time of a call and device time of a launch, on one tensor of 64."""
        torch = self.torch
        weight, grad = torch.randn(64, device="cuda"), torch.randn(64, device="cuda")
        param = torch.nn.Parameter(weight.clone())
        param.grad = grad
        self.ours.optimizer(b"adamw", [weight], [grad], F32, F32)
        peer = torch.optim.AdamW([param], lr=1e-3, weight_decay=0.01, fused=True)
        calls = {"ours": self.ours.step, "torch fused": peer.step}
        for name, ms in self.times(calls).items():
            call, count = calls[name], 200
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(count):
                call()
            host = (time.perf_counter() - start) / count
            torch.cuda.synchronize()
            self.row(what="launch overhead", who=name, ms=round(ms, 4), host_us=round(1e6 * host, 1))

    def capture(self, call, stream):
        """Captures a call in a CUDA graph without running it."""
        self.torch.cuda.synchronize()
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            call()
        return graph

    def zeros(self):
        """Gradients of zeros, for which quotients and roots take their slow paths: must not be slower."""
        torch = self.torch
        for case, make in (("random", torch.randn_like), ("zero", torch.zeros_like)):
            weight = torch.randn(STEP_COUNT, device="cuda")
            self.ours.optimizer(b"adamw", [weight], [make(weight)], F32, F32)
            self.report("adamw, gradients are", case, self.times({"ours": self.ours.step}),
                        28 * STEP_COUNT)

    def tuned(self, case, sizes):
        """Compares tuned launches with untuned ones."""
        torch = self.torch
        weights = [torch.randn(n, device="cuda") for n in sizes]
        grads = [torch.randn_like(w) for w in weights]
        other = Ours(self.lib, torch.cuda.current_stream().cuda_stream)
        for one in (self.ours, other):
            one.optimizer(b"adamw", weights, grads, F32, F32)
        times = self.times({"ours": self.ours.step, other.tune(): other.step})
        self.report("adamw, tuned", case, times, 28 * sum(sizes))

    def graph(self, case, sizes):
        """A step in a CUDA graph: compared with the CPU bit for bit, and its time."""
        torch, stream = self.torch, self.torch.cuda.Stream()
        weights = [torch.randn(n, device="cuda") for n in sizes]
        grads = [torch.randn_like(w) for w in weights]
        host = [[t.cpu() for t in some] for some in (weights, grads)]
        copies = [torch.nn.Parameter(w.clone()) for w in weights]
        for copy, grad in zip(copies, grads):
            copy.grad = grad
        peer = torch.optim.AdamW(copies, lr=1e-3, weight_decay=0.01, fused=True, capturable=self.capturable)
        torch.cuda.synchronize()
        ours = Ours(self.lib, stream.cuda_stream)
        ours.optimizer(b"adamw", weights, grads, F32, F32)
        with torch.cuda.stream(stream):
            ours.step(1.0, 1, 1.0)
            peer.step()
        calls = {"ours": lambda: ours.step(1.0, 1, 1.0), "torch fused": peer.step}
        graphs = {name: self.capture(call, stream) for name, call in calls.items()}
        for _ in range(2):
            graphs["ours"].replay()
        torch.cuda.synchronize()
        reference(self.lib, b"adamw", 3, *[[t.data_ptr() for t in some] for some in host], sizes,
                  (F32, F32), 1.0, 1, 1.0)
        same = all(torch.equal(a.cpu(), b) for a, b in zip(weights, host[0]))
        self.row(what="graph has the CPU's bits", case=case, same=same)
        self.report("graph of a clipped step", case, self.times({n: g.replay for n, g in graphs.items()}),
                    32 * sum(sizes))

    def at(self, address, count):
        """Wraps memory that torch did not allocate in a tensor."""
        class At:
            __cuda_array_interface__ = dict(shape=(count,), typestr="<f4", version=3,
                                            data=(address, False))
        return self.torch.as_tensor(At(), device="cuda")

    def nccl_version(self):
        """Version of our groups' NCCL, which may differ from PyTorch's; 0 without NCCL."""
        return self.lib.gpu_nccl_version()

    def group(self, rank=0, world=1, port=0):
        group, stream = ctypes.c_void_p(), self.torch.cuda.current_stream().cuda_stream
        self.ours.check(self.lib.gpu_group(stream, 0, rank, world, port, ctypes.byref(group)))
        return group

    def nccl(self):
        """One rank: overhead of a call, and gradients must come back from their buckets unchanged."""
        torch, group = self.torch, self.group()
        grads = [torch.randn(n, device="cuda") for n in CASES["ResNet-50"]]
        lens, places = words([g.numel() for g in grads]), words([0] * len(grads))
        self.ours.check(self.lib.gpu_reducer(group, len(grads), lens, F32))
        addresses = words([g.data_ptr() for g in grads])
        for _ in range(3):
            [g.normal_() for g in grads]
            self.ours.check(self.lib.gpu_reduce(group, addresses, places))
        same = all(torch.equal(self.at(place, g.numel()), g) for place, g in zip(places, grads))
        self.row(what="reducer, one rank", case="ResNet-50", same=same)
        self.joined(group, grads, places)
        with tempfile.TemporaryDirectory() as folder:
            torch.distributed.init_process_group(
                self.nccl_backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
            for count in REDUCED:
                a = torch.randn(count, device="cuda")
                self.row(what="all_reduce, one rank", case=f"{4 * count} bytes", **{
                    name: round(ms, 4) for name, ms in self.times({
                        "ours": lambda: self.ours.check(
                            self.lib.gpu_all_reduce(group, a.data_ptr(), count, F32)),
                        "torch": lambda: torch.distributed.all_reduce(a),
                    }).items()})
            torch.distributed.destroy_process_group()
        self.lib.gpu_group_end(group)

    def joined(self, group, grads, places):
        """Averages and a clipped step: gradients checked after their bucket, and in the step."""
        torch = self.torch
        lens, addresses = words([g.numel() for g in grads]), words([g.data_ptr() for g in grads])
        weights = [torch.randn_like(g) for g in grads]
        host = [[t.cpu() for t in some] for some in (weights, grads)]
        self.ours.check(self.lib.gpu_join(group, b"adamw", len(grads),
                                          words([w.data_ptr() for w in weights]), lens, F32, 1.0, 1.0))

        def behind():
            self.ours.check(self.lib.gpu_joined_average(group, addresses))
            self.ours.check(self.lib.gpu_joined_step(group))

        for _ in range(3):
            behind()
        torch.cuda.synchronize()
        reference(self.lib, b"adamw", 3, *[[t.data_ptr() for t in some] for some in host], list(lens),
                  (F32, F32), 1.0, 1, 1.0)
        same = all(torch.equal(a.cpu(), b) for a, b in zip(weights, host[0]))
        self.row(what="joined step has the CPU's bits", case="ResNet-50", same=same)
        others = [w.clone() for w in weights]
        self.ours.check(self.lib.gpu_optimizer(
            self.ours.session, b"adamw", len(grads), words([w.data_ptr() for w in others]), places, lens,
            F32, F32))
        self.ours.check(self.lib.gpu_loss_scale(self.ours.session, 1.0))

        def within():
            self.ours.check(self.lib.gpu_reduce(group, addresses, places))
            self.ours.step(1.0, 1, 1.0)

        times = self.times({"looks behind buckets": behind, "looks in the step": within})
        for name, ms in times.items():
            self.row(what="average and clipped step, one rank", case="ResNet-50", who=name,
                     ms=round(ms, 4))

    def pair(self):
        """Two ranks on this GPU, as two processes, if NCCL supports that."""
        version = self.nccl_version()
        if version < 23000:
            text = f"NCCL {version} cannot, 23000 can" if version else self.lib.gpu_error().decode()
            return self.row(what="two ranks on one GPU", ended=text)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        env = dict(os.environ, NCCL_MULTI_RANK_GPU_ENABLE="1", NCCL_MAX_CTAS="4")
        start = lambda rank: subprocess.Popen(
            [sys.executable, self.program, "--library", self.lib.path, "--rank", str(rank), "--port",
             port], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        ranks = [start(rank) for rank in range(2)]
        try:
            texts = [rank.communicate(timeout=45)[0] for rank in ranks]
        finally:
            [rank.kill() for rank in ranks]
        for text, rank in zip(texts, ranks):
            if rank.returncode:
                raise Failure(text[-300:])
            for row in json.loads(text.splitlines()[-1]):
                self.row(**row)

    def rank(self, rank, port):
        """One of the two ranks; prints its rows on the last line."""
        torch, rows, group = self.torch, [], self.group(rank, 2, port)
        for count in REDUCED[:2]:
            a = torch.full((count,), rank + 1.0, device="cuda")
            call = lambda: self.ours.check(self.lib.gpu_all_reduce(group, a.data_ptr(), count, F32))
            call()
            torch.cuda.synchronize()
            same = bool((a == 1.5).all())
            for _ in range(5):
                call()
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(20):
                call()
            torch.cuda.synchronize()
            ms = (time.perf_counter() - start) / 20 * 1e3
            rows.append(dict(what="all_reduce, two ranks on one GPU", who=f"rank {rank}",
                             case=f"{4 * count} bytes", same=same, ms=round(ms, 4)))
        # Gradients differ by rank and are checked after their buckets: both ranks must end with equal weights.
        sizes = CASES["1000 x 1024"]
        torch.manual_seed(5)
        weights = [torch.randn(n, device="cuda") for n in sizes]
        torch.manual_seed(6 + rank)
        grads = [torch.randn(n, device="cuda") for n in sizes]
        self.ours.check(self.lib.gpu_join(
            group, b"adamw", len(sizes), words([w.data_ptr() for w in weights]), words(sizes), F32, 1.0,
            1.0))
        for _ in range(3):
            self.ours.check(self.lib.gpu_joined_average(group, words([g.data_ptr() for g in grads])))
            self.ours.check(self.lib.gpu_joined_step(group))
        sums = torch.stack([w.double().sum() for w in weights]).float()
        other = sums.clone()
        self.ours.check(self.lib.gpu_all_reduce(group, other.data_ptr(), other.numel(), F32))
        torch.cuda.synchronize()
        rows.append(dict(what="joined, two ranks on one GPU", who=f"rank {rank}", case="1000 x 1024",
                         same=torch.equal(sums, other)))
        self.lib.gpu_group_end(group)
        print(json.dumps(rows))

    def small(self):
        """Runs a few steps of every kernel, for compute-sanitizer."""
        torch = self.torch
        for rule in [rule.encode() for rule in RULES]:
            weights = [torch.randn(n, device="cuda") for n in (1, 7, 1025, 70_001)]
            grads = [torch.randn_like(w) for w in weights]
            self.ours.optimizer(rule, weights, grads, F32, F32)
            self.ours.step(1.0, 1, 0.5)
            self.ours.step(1.0, 1, 0.5)
        half = torch.empty(70_001, device="cuda", dtype=torch.float16)
        self.cast(weights[3], F32, half, F16)
        self.ours.check(self.lib.gpu_scaler(self.ours.session, 4, words([g.data_ptr() for g in grads]),
                                            words([g.numel() for g in grads]), F32))
        self.ours.check(self.lib.gpu_unscale(self.ours.session))
        torch.cuda.synchronize()

    def one_step(self):
        """Runs three steps on STEP_COUNT parameters, for ncu."""
        weight = self.torch.randn(STEP_COUNT, device="cuda")
        self.ours.optimizer(b"adamw", [weight], [self.torch.randn_like(weight)], F32, F32)
        for _ in range(3):
            self.ours.step()
        self.torch.cuda.synchronize()

    def all(self):
        torch = self.torch
        self.row(what="versions", torch=torch.__version__, cuda=torch.version.cuda, nccl=self.nccl_version(),
                 gpu=torch.cuda.get_device_name(), python=sys.version.split()[0],
                 nvrtc=os.environ.get("NVRTC_LIBRARY"))
        self.part("correctness", 60, self.correctness)
        self.part("copy", 20, self.copy)
        # The most important parts come first.
        for case in ("10000 x 64", "1e9 in 300", "ResNet-50", "1000 x 1024"):
            sizes = CASES[case]
            self.part(f"AMP step, {case}", 30, lambda: self.amp_step(case, sizes, False))
            self.part(f"clipped AMP step, {case}", 30, lambda: self.amp_step(case, sizes, True))
            self.part(f"optimizers, {case}", 30, lambda: self.optimizers(case, sizes))
        self.part("casts and unscale", 20, self.passes)
        self.part("launch overhead", 15, self.overhead)
        self.part("graph", 20, lambda: self.graph("ResNet-50", CASES["ResNet-50"]))
        self.part("zero gradients", 15, self.zeros)
        for case in ("1e9 in 300", "10000 x 64"):
            self.part(f"tuned, {case}", 20, lambda: self.tuned(case, CASES[case]))
        # Last, so that a hang of the library loses no other part.
        self.part("NCCL", 25, self.nccl)
        self.part("two ranks", 60, self.pair)


def begin(make, args):
    """Returns `make` of the library. If PyTorch, the driver or the library is missing, writes a row with the reason."""
    rows = os.path.join(args.out, "rows.json")
    try:
        lib = library(args.library)
        lib.path = args.library
        return make(lib, rows)
    except Exception as error:
        if not (args.small or args.step or args.rank is not None):
            with open(rows, "w") as file:
                json.dump([dict(what="failed", part="begin", error=f"{type(error).__name__}: {error}"[:500])], file)
        raise


def on_the_gpu(lib, out):
    import torch

    return Bench(lib, torch, out)


def main(make=on_the_gpu):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", required=True)
    parser.add_argument("--out", default=os.path.join(HERE, "out"), help="the folder of rows")
    parser.add_argument("--command", default="benches/gpu/run.sh", help="what the record is to say")
    for name in ("--dry", "--small", "--step", "--record"):
        parser.add_argument(name, action="store_true")
    parser.add_argument("--rank", type=int, help="of two on one GPU, which meet at --port")
    parser.add_argument("--port", type=int)
    parser.add_argument("--cubins", type=int, nargs="*", metavar="ARCH", help="compiles, for example for 90")
    parser.add_argument("--traffic", metavar="CSV", help="ncu's table")
    args = parser.parse_args()
    os.makedirs(args.out, exist_ok=True)
    if args.record:
        folder = os.path.join(HERE, "..", "record")
        return print("record:", os.path.normpath(record(args.out, folder, args.command)))
    if args.traffic:
        rows = traffic(args.traffic)
        with open(os.path.join(args.out, "rows-traffic.json"), "w") as file:
            json.dump(rows, file)
        return print(rows)
    if args.cubins is not None:
        lib = library(args.library)
        for arch in args.cubins:
            if lib.gpu_cubins(arch):
                raise Failure(lib.gpu_error().decode())
        return
    if args.dry:
        return dry(library(args.library))
    bench = begin(make, args)
    if args.small:
        return bench.small()
    if args.step:
        return bench.one_step()
    if args.rank is not None:
        return bench.rank(args.rank, args.port)
    bench.all()
    wrong = [row for row in bench.rows if row.get("same") is False or row.get("fine") is False]
    failed = [row for row in bench.rows if row["what"] == "failed"]
    if wrong or failed:
        sys.exit(f"{len(wrong)} wrong results, {len(failed)} parts failed")


if __name__ == "__main__":
    main()
