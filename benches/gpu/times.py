"""Times of our kernels beside PyTorch's, in one process, on the same tensors and stream, in turn.

Rows go to `times.json` in the folder `--out` and to standard output. A part that fails, or for which time is short,
gives a row with the reason, and the other parts continue. Correctness is the tests': `run.sh tests`.
"""

import ctypes

from common import BF16, CASES, F16, F32, SIZES, Bench, Ours, addresses, arguments, finish, lengths


class Times(Bench):
    def copy(self):
        source = self.torch.empty(SIZES["copy"], device=self.gpu.device)
        target = self.torch.empty_like(source)
        self.bandwidth = 8 * SIZES["copy"] / self.times({"copy": lambda: target.copy_(source)})["copy"]
        self.row(what="copy", case="4 GiB", gb_per_s=round(self.bandwidth / 1e6))

    def amp_step(self, case, clip):
        weights, grads = self.random(CASES[case]), self.random(CASES[case])
        self.ours.optimizer(b"adamw", weights, grads)
        self.ours.scaled()
        peer = self.adamw(weights, grads)
        scaler = self.torch.amp.GradScaler(self.gpu.device, init_scale=1.0, growth_interval=10**9)
        scaler.scale(self.torch.ones((), device=self.gpu.device))

        def theirs():
            if clip:
                scaler.unscale_(peer)
                self.torch.nn.utils.clip_grad_norm_(peer.param_groups[0]["params"], 1.0, foreach=True)
            scaler.step(peer)
            scaler.update()

        calls = {"ours": lambda: self.ours.step(True, 1.0 if clip else -1.0), "torch fused": theirs}
        self.report("AMP step" + ", clipped" * clip, case, calls, 32 * sum(CASES[case]))

    def optimizers(self, case):
        weights, grads = self.random(CASES[case]), self.random(CASES[case])
        for rule, moved in ((b"adamw", 28), (b"sgd", 20)):
            self.ours.optimizer(rule, weights, grads)
            calls = {"ours": self.ours.step}
            for style in ("fused", "foreach"):
                sgd = lambda: self.torch.optim.SGD(self.params(weights, grads), lr=1e-3, momentum=0.9, **{style: True})
                peer = sgd() if rule == b"sgd" else self.adamw(weights, grads, **{style: True})
                calls["torch " + style] = peer.step
            self.report(rule.decode(), case, calls, moved * sum(CASES[case]))

    def casts(self):
        types = {F32: self.torch.float32, F16: self.torch.float16, BF16: self.torch.bfloat16}
        for source, target in ((F32, F16), (F32, BF16), (BF16, F32)):
            a = self.torch.randn(SIZES["cast"], device=self.gpu.device).to(types[source])
            b = self.torch.empty_like(a, dtype=types[target])
            ours = lambda: self.lib.cast(self.ours.session, a.data_ptr(), ctypes.c_int(source), b.data_ptr(),
                                         ctypes.c_int(target), a.numel())
            self.report("cast", f"{source} to {target}", {"ours": ours, "torch": lambda: b.copy_(a)}, 6 * a.numel())

    def unscale(self):
        grads = self.random([SIZES["cast"] // 64] * 64)
        self.lib.scaler(self.ours.session, 64, addresses(grads), lengths(grads), ctypes.c_int(F32))
        found, inverse = (self.torch.full((), x, device=self.gpu.device) for x in (0.0, 1 / 65536))
        calls = {"ours": lambda: self.lib.unscale(self.ours.session),
                 "torch": lambda: self.torch._amp_foreach_non_finite_check_and_unscale_(grads, found, inverse)}
        self.report("unscale", "5e8 in 64", calls, 8 * SIZES["cast"])

    def graph(self, case):
        """A step in a CUDA graph."""
        stream, weights, grads = self.gpu.other_stream(), self.random(CASES[case]), self.random(CASES[case])
        peer = self.adamw(weights, grads, fused=True, capturable=self.gpu.device == "cuda")
        self.gpu.wait()
        ours = Ours(self.lib, stream.cuda_stream)
        ours.optimizer(b"adamw", weights, grads)
        calls = {"ours": lambda: ours.step(True, 1.0), "torch fused": peer.step}
        with self.gpu.on(stream):
            [call() for call in calls.values()]
        graphs = {name: self.gpu.captured(call, stream) for name, call in calls.items()}
        self.report("graph of a clipped step", case, graphs, 32 * sum(CASES[case]))

    def step(self):
        """Three steps, for ncu."""
        weights, grads = self.random([SIZES["step"]]), self.random([SIZES["step"]])
        self.ours.optimizer(b"adamw", weights, grads)
        for _ in range(3):
            self.ours.step()
        self.gpu.wait()

    def all(self):
        self.part(self.copy)
        # The most important parts come first.
        for case in CASES:
            self.part(self.amp_step, case, False)
            self.part(self.amp_step, case, True)
            self.part(self.optimizers, case)
        self.part(self.graph, "ResNet-50")
        self.part(self.casts)
        self.part(self.unscale)


def main():
    parser = arguments(__doc__)
    parser.add_argument("--step", action="store_true", help="only what ncu is to see")
    args = parser.parse_args()
    bench = Times(args, "times")
    if args.step:
        return bench.step()
    bench.all()
    finish(bench)


if __name__ == "__main__":
    main()
