"""Attention's kernels of `candle-ops` beside PyTorch's, on a GPU: values against f64, and times. Needs PyTorch, whose
NVRTC compiles them.

    python3 benches/record/h100-2/attention.py
"""
import ctypes, glob, pathlib, site, struct, sys

import torch

crates = pathlib.Path(__file__).parents[3] / "crates"
parts = ["cuda-rt/src/ptx.h", "cuda-rt/src/device.h"]
parts += [f"candle-ops/src/cuda/{n}.cu" for n in ("ops", "images", "channels_last", "rows", "attention")]
source = "".join((crates / part).read_text() for part in parts)
nvrtc = ctypes.CDLL(glob.glob(site.getsitepackages()[0] + "/nvidia/*/lib/libnvrtc.so.1?")[0])
torch.zeros(1, device="cuda")
cuda = ctypes.CDLL("libcuda.so.1")


def check(code, what):
    if code:
        sys.exit(f"{what}: error {code}")


def compiled(kind):
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"k.cu", 0, None, None), "program")
    major, minor = torch.cuda.get_device_capability()
    options = [f"--gpu-architecture=sm_{major}{minor}", f"-DTYPE={kind}", "--fmad=false", "--std=c++17"]
    check(nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * 4)(*map(str.encode, options))), "NVRTC")
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    code = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetCUBIN(program, code)
    return code


kernels = {}
for kind, dtype in (("F16", torch.float16), ("Bf16", torch.bfloat16)):
    module = ctypes.c_void_p()
    check(cuda.cuModuleLoadData(ctypes.byref(module), compiled(kind)), "load")
    for name in ("attention", "attention_backward", "attention_backward_keys"):
        kernels[dtype, name] = ctypes.c_void_p()
        check(cuda.cuModuleGetFunction(ctypes.byref(kernels[dtype, name]), module, name.encode()), name)


class Fused:
    """Queries, keys and values side by side, `[samples, positions, 3 * width]`."""

    def __init__(self, qkv, heads, causal):
        n, t, c = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
        self.dtype, self.blocks = qkv.dtype, n * heads * ((t + 127) // 128)
        self.y, self.dqkv = torch.full((n, t, c), torch.nan).to(qkv), torch.full_like(qkv, torch.nan)
        self.dy, self.lines = torch.randn_like(self.y), torch.empty(2, n * heads, t, device="cuda")

        def place(x, part, parts):
            at = x.data_ptr() + part * c * x.element_size()
            return struct.pack("<QIIII", at, c // heads, t * parts * c, parts * c, c // heads)

        places = [place(qkv, i, 3) for i in range(3)] + [place(self.y, 0, 1), place(self.dy, 0, 1)]
        places += [place(self.dqkv, i, 3) for i in range(3)]
        rest = (self.lines[0].data_ptr(), self.lines[1].data_ptr(), heads, n, t, t, t if causal else 0,
                (c // heads) ** -0.5)
        self.job = b"".join(places) + struct.pack("<QQIIIIIf", *rest)

    def launch(self, name):
        job = ctypes.create_string_buffer(self.job, len(self.job))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        words = (ctypes.c_void_p * 1)(ctypes.addressof(job))
        check(cuda.cuLaunchKernel(kernels[self.dtype, name], self.blocks, 1, 1, 256, 1, 1, 0, stream, words, None),
              name)

    def both(self):
        for name in ("attention", "attention_backward", "attention_backward_keys"):
            self.launch(name)
        torch.cuda.synchronize()


def heads_of(x, heads):
    return [x.view(*x.shape[:2], 3, heads, -1)[:, :, i].transpose(1, 2) for i in range(3)]


def by_torch(qkv, dy, heads, causal, dtype):
    x = qkv.detach().to(dtype).requires_grad_()
    q, k, v = heads_of(x, heads)
    if dtype == torch.float64:
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
        y = scores.softmax(-1) @ v
    else:
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    y = y.transpose(1, 2).reshape(dy.shape)
    y.backward(dy.to(dtype))
    return [y.detach(), *x.grad.chunk(3, -1)]


def milliseconds(call, times=20):
    for _ in range(3):
        call()
    all = []
    for _ in range(5):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(times):
            call()
        end.record()
        torch.cuda.synchronize()
        all.append(begin.elapsed_time(end) / times)
    return sorted(all)[2]


torch.manual_seed(7)
shapes = [(2, 196, 8, 64, False), (2, 1024, 3, 64, True), (3, 130, 2, 40, True), (2, 77, 2, 64, False),
          (1, 500, 5, 16, True)]
for dtype in (torch.float16, torch.bfloat16):
    for n, t, heads, depth, causal in shapes:
        qkv = torch.randn(n, t, 3 * heads * depth, device="cuda").to(dtype)
        fused = Fused(qkv, heads, causal)
        fused.both()
        ours = [fused.y, *fused.dqkv.chunk(3, -1)]
        exact = by_torch(qkv, fused.dy, heads, causal, torch.float64)
        errors = [
            " ".join(f"{((a.double() - b).norm() / b.norm()).item():.1e}" for a, b in zip(found, exact))
            for found in (ours, by_torch(qkv, fused.dy, heads, causal, dtype))
        ]
        before = fused.dqkv.clone()
        fused.both()
        same = "same bits" if torch.equal(before, fused.dqkv) else "OTHER BITS"
        print(dtype, n, t, heads, depth, causal, "ours", errors[0], "torch", errors[1], same)
for dtype, n, t, heads, causal in ((torch.bfloat16, 16, 1024, 12, True), (torch.float16, 128, 196, 8, False)):
    qkv = torch.randn(n, t, 3 * heads * 64, device="cuda").to(dtype)
    fused = Fused(qkv, heads, causal)
    own = [milliseconds(lambda: fused.launch(name))
           for name in ("attention", "attention_backward", "attention_backward_keys")]
    q, k, v = heads_of(qkv.clone().requires_grad_(), heads)
    forward = lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    y = forward()
    dy = torch.randn_like(y)
    theirs = [milliseconds(forward), milliseconds(lambda: torch.autograd.grad(y, (q, k, v), dy, retain_graph=True))]
    print("ms", dtype, n, t, heads, causal, "ours", " ".join(f"{x:.3f}" for x in own),
          "torch", " ".join(f"{x:.3f}" for x in theirs))
