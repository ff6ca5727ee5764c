"""Times steps of other optimizers, controlled by side_by_side_optim.

Reads requests from standard input and answers each with one line: `ok ...`, or `no REASON` if a peer is missing.

    versions                       the installed versions
    tensors COUNT...               creates weights and gradients with these element counts
    make PEER RULE                 starts a process with an optimizer and its own weights, takes two steps;
                                   answers the sum of squares of all weights
    time PEER RULE STEPS           takes one untimed step, then STEPS timed ones; answers the seconds of the
                                   fastest and of the median
    drop                           ends these processes

Each peer runs in its own process, as in training: whether a step's temporary tensors come from pages of the
process or from the kernel depends on the rest of the heap, which must not be the tensors of other peers.

PEER is fused or foreach (PyTorch), resumed (foreach with momenta, of zeros, loaded before its first step, as in
a resumed run), timm, deepspeed, or loop (Hugging Face's BertAdam, written here with torch operations, but clipped
by the norm over all tensors). The values are those of tensors.rs, the hyperparameters fused-optim's defaults, for
SGD a momentum of 0.9 and a decay of 1e-4. RULE `amp` is AdamW with GradScaler, clip_grad_norm_ and a scale of
65536; it changes the gradients in place, and they are restored between the steps, outside of the timing.
Usage: torch_optim.py THREADS, with OMP_NUM_THREADS the same, or torch_optim.py --build-deepspeed. With
ATEN_CPU_CAPABILITY=avx2 DeepSpeed's step is compiled for AVX2, too.
"""

import importlib.metadata
import multiprocessing
import os
import sys
import time

try:
    import torch
except ImportError as error:
    # Without peers our own times are still measured.
    for line in sys.stdin:
        verb = line.split()[0]
        print({"versions": "ok no torch", "make": f"no {error}"}.get(verb, "ok"), flush=True)
    sys.exit()

SCALE = 65536.0


class BertAdam:
    """As Ascend's: one clip over all; warmup -1, t_total -1: the learning rate is constant."""

    def __init__(self, params, lr):
        self.params, self.lr = params, lr
        self.m = [torch.zeros_like(p) for p in params]
        self.v = [torch.zeros_like(p) for p in params]

    @torch.no_grad()
    def step(self):
        torch.nn.utils.clip_grad_norm_(self.params, 1.0, foreach=False)
        for p, m, v in zip(self.params, self.m, self.v):
            m.mul_(0.9).add_(p.grad, alpha=0.1)
            v.mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
            update = m / (v.sqrt() + 1e-6)
            update += 0.01 * p
            p.add_(-(self.lr * update))


def deepspeed_builder():
    from deepspeed.ops.op_builder import CPUAdamBuilder

    if os.environ.get("ATEN_CPU_CAPABILITY") == "avx2":
        CPUAdamBuilder.cpu_arch = lambda self: "-march=haswell"
        CPUAdamBuilder.simd_width = lambda self: "-D__AVX256__"
    return CPUAdamBuilder()


def build(peer, rule, params):
    optim = torch.optim
    how = {"fused": True} if peer == "fused" else {"foreach": True}
    if peer == "deepspeed":
        deepspeed_builder()
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(params, lr=1e-3, weight_decay=0.01, adamw_mode=True)
    if peer == "timm":
        import timm.optim

        return {
            "adamp": lambda: timm.optim.AdamP(params, lr=1e-3),
            "lamb": lambda: timm.optim.Lamb(params, lr=1e-3, bias_correction=False, max_grad_norm=None),
            "rmsprop_tf": lambda: timm.optim.RMSpropTF(params, lr=1e-2, alpha=0.9, eps=1e-10),
        }[rule]()
    return {
        "adamw": lambda: optim.AdamW(params, lr=1e-3, weight_decay=1e-2, **how),
        "amp": lambda: optim.AdamW(params, lr=1e-3, weight_decay=1e-2, **how),
        "adam": lambda: optim.Adam(params, lr=1e-3, **how),
        "sgd": lambda: optim.SGD(params, lr=1e-2, momentum=0.9, weight_decay=1e-4, **how),
        "adadelta": lambda: optim.Adadelta(params, lr=1.0, rho=0.9, eps=1e-6, **how),
        "rmsprop": lambda: optim.RMSprop(params, lr=1e-2, alpha=0.99, **how),
        "bert_adam": lambda: BertAdam(params, lr=1e-3),
    }[rule]()


class Amp:
    def __init__(self, optimizer, params, grads):
        self.optimizer, self.params, self.grads = optimizer, params, grads
        self.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
        self.scaler.scale(torch.zeros(()))
        for p, grad in zip(params, grads):
            p.grad = torch.empty_like(grad)

    def restore(self):
        for p, grad in zip(self.params, self.grads):
            torch.mul(grad, SCALE, out=p.grad)

    def step(self):
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.params, 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()


def values(count):
    i = torch.arange(count, dtype=torch.int64)
    # Divided in f32, as in the original.
    return (i * 7919 % 1000).float() / 1000.0 - 0.4995


def parameters(counts):
    """Weights and gradients placed in memory as in training: those of a model after a backward pass."""
    params = resnet50() or []
    if [p.numel() for p in params] != counts:
        params = [torch.nn.Parameter(torch.empty(count)) for count in counts]
        for p in params:
            p.grad = torch.empty_like(p)
    longest = values(max(counts))
    for p, count in zip(params, counts):
        # The same shapes as in the Rust program, for AdamP.
        shape, grad = (count // 512 if count % 512 == 0 else 1, -1), p.grad
        p.grad, p.data = None, p.data.view(shape).copy_(longest[:count].view(shape))
        p.grad = grad.view(shape).copy_(p.data)
    return params


def resnet50():
    try:
        import timm
    except ImportError:
        return None
    model = timm.create_model("resnet50")
    model(torch.zeros(2, 3, 64, 64)).square().sum().backward()
    return list(model.parameters())


def timed(optimizer):
    if isinstance(optimizer, Amp):
        optimizer.restore()
    start = time.perf_counter()
    optimizer.step()
    return time.perf_counter() - start


def make(peer, rule, counts):
    params = parameters(counts)
    optimizer = build(peer, rule, params)
    if peer == "resumed":
        zeros = {i: {"momentum_buffer": torch.zeros_like(p)} for i, p in enumerate(params)}
        optimizer.load_state_dict({**optimizer.state_dict(), "state": zeros})
    if rule == "amp":
        optimizer = Amp(optimizer, params, [p.grad for p in params])
    for _ in range(2):
        timed(optimizer)
    with torch.no_grad():
        return optimizer, f"ok {sum(float(p.double().square().sum()) for p in params)!r}"


def serve(line, threads, peer, rule, counts):
    """A peer's process: reports its sum of squares, then times the requested steps."""
    torch.set_num_threads(threads)
    try:
        optimizer, answer = make(peer, rule, counts)
    except Exception as error:
        line.send(f"no {type(error).__name__}: {error}".replace("\n", " "))
        return
    line.send(answer)
    while True:
        steps = line.recv()
        timed(optimizer)
        times = sorted(timed(optimizer) for _ in range(steps))
        line.send(f"ok {times[0]!r} {times[len(times) // 2]!r}")


class Peers:
    def __init__(self, threads):
        self.threads, self.counts, self.made = threads, [], {}
        self.fork = multiprocessing.get_context("fork")

    def versions(self):
        found = [f"torch {torch.__version__}"]
        for name in ("deepspeed", "timm"):
            try:
                found.append(f"{name} {importlib.metadata.version(name)}")
            except Exception:
                found.append(f"no {name}")
        return "ok " + ", ".join(found)

    def tensors(self, *counts):
        self.counts = list(map(int, counts))
        return "ok"

    def make(self, peer, rule):
        line, theirs = self.fork.Pipe()
        arguments = (theirs, self.threads, peer, rule, self.counts)
        process = self.fork.Process(target=serve, args=arguments, daemon=True)
        process.start()
        theirs.close()
        self.made[peer, rule] = process, line
        return self.answer(peer, rule)

    def time(self, peer, rule, steps):
        self.made[peer, rule][1].send(int(steps))
        return self.answer(peer, rule)

    def answer(self, peer, rule):
        process, line = self.made[peer, rule]
        try:
            return line.recv()
        except EOFError:
            process.join()
            return f"no answer: its process ended with {process.exitcode}"

    def drop(self):
        for process, _ in self.made.values():
            process.kill()
            process.join()
        self.made = {}
        return "ok"


if __name__ == "__main__":
    if sys.argv[1] == "--build-deepspeed":
        deepspeed_builder().load()
        sys.exit()
    # Answers go to standard output; output of libraries is redirected to standard error.
    answers, sys.stdout = sys.stdout, sys.stderr
    peers = Peers(int(sys.argv[1]))
    for line in sys.stdin:
        verb, *arguments = line.split()
        print(getattr(peers, verb)(*arguments), file=answers, flush=True)
