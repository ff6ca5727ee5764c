"""Averages over NCCL in a group of one rank, and of two ranks on one GPU, beside `torch.distributed`'s.

Rows go to `nccl.json` in the folder `--out`. Averages, and the weights after a step that was joined to them, are
compared bit for bit with the CPU's.
"""

import ctypes
import json
import os
import socket
import subprocess
import sys
import tempfile
import time

from common import CASES, F32, Bench, Failure, addresses, arguments, finish, lengths, words


class Nccl(Bench):
    counts = (1 << 18, 25 << 18, 1 << 28)

    def group(self, rank=0, world=1, port=0):
        group = ctypes.c_void_p()
        numbers = [ctypes.c_int(n) for n in (0, rank, world, port)]
        self.lib.group(ctypes.c_void_p(self.gpu.stream()), *numbers, ctypes.byref(group))
        return group

    def all_reduce(self, group, tensor):
        self.lib.all_reduce(group, tensor.data_ptr(), tensor.numel(), ctypes.c_int(F32))

    def join(self, group, weights):
        self.lib.join(group, b"adamw", len(weights), addresses(weights), lengths(weights), ctypes.c_int(F32),
                      ctypes.c_double(1.0), ctypes.c_float(1.0))

    def joined(self, group, grads):
        self.lib.joined_average(group, addresses(grads))
        self.lib.joined_step(group)

    def one_rank(self):
        group, grads = self.group(), self.random(CASES["ResNet-50"])
        places = words([0] * len(grads))
        self.lib.reducer(group, len(grads), lengths(grads), ctypes.c_int(F32))
        for _ in range(3):
            [g.normal_() for g in grads]
            self.lib.reduce(group, addresses(grads), places)
        same = all(self.torch.equal(self.gpu.tensor(place, g.numel()), g) for place, g in zip(places, grads))
        self.row(what="gradients through a reducer", case="ResNet-50", same=same)
        self.steps(group, grads, places)
        with tempfile.TemporaryDirectory() as folder:
            store = f"file://{folder}/store"
            self.torch.distributed.init_process_group(self.gpu.backend, init_method=store, rank=0, world_size=1)
            for count in self.counts:
                a = self.random([count])[0]
                calls = {"ours": lambda: self.all_reduce(group, a),
                         "torch": lambda: self.torch.distributed.all_reduce(a)}
                times = {who: round(ms, 4) for who, ms in self.times(calls).items()}
                self.row(what="all_reduce, one rank", case=f"{4 * count} bytes", **times)
            self.torch.distributed.destroy_process_group()
        self.lib.lib.gpu_group_end(group)

    def steps(self, group, grads, places):
        """Averages and a clipped step: gradients checked after their bucket, and in the step."""
        weights = [self.torch.randn_like(g) for g in grads]
        host = [[t.cpu() if t.is_cuda else t.clone() for t in some] for some in (weights, grads)]
        self.join(group, weights)
        for _ in range(3):
            self.joined(group, grads)
        self.gpu.wait()
        numbers = ctypes.c_int(F32), ctypes.c_int(F32), ctypes.c_float(1.0), True, ctypes.c_double(1.0)
        self.lib.reference(b"adamw", 3, len(grads), addresses(host[0]), addresses(host[1]), lengths(grads), *numbers)
        same = all(self.torch.equal(a.cpu(), b) for a, b in zip(weights, host[0]))
        self.row(what="joined step has the CPU's bits", case="ResNet-50", same=same)
        self.ours.optimizer(b"adamw", weights, grads, places)
        self.ours.scaled()

        def within():
            self.lib.reduce(group, addresses(grads), places)
            self.ours.step(True, 1.0)

        calls = {"checks after each bucket": lambda: self.joined(group, grads), "checks in the step": within}
        for who, ms in self.times(calls).items():
            self.row(what="average and clipped step, one rank", case="ResNet-50", who=who, ms=round(ms, 4))

    def two_ranks(self, args):
        """Two ranks on this GPU, as two processes, if NCCL supports that."""
        version = self.lib.lib.gpu_nccl_version()
        if version < 23000 and not args.dry:
            return self.row(what="two ranks on one GPU", ended=f"needs NCCL 23000, is {version}")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        env = dict(os.environ, NCCL_MULTI_RANK_GPU_ENABLE="1", NCCL_MAX_CTAS="4")
        own = [sys.executable, *sys.argv, "--port", port, "--rank"]
        ranks = [subprocess.Popen([*own, str(rank)], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                  text=True) for rank in range(2)]
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
        rows, group = [], self.group(rank, 2, port)
        for count in self.counts[:2]:
            a = self.torch.full((count,), rank + 1.0, device=self.gpu.device)
            self.all_reduce(group, a)
            self.gpu.wait()
            same = bool((a == 1.5).all())
            start = time.perf_counter()
            for _ in range(20):
                self.all_reduce(group, a)
            self.gpu.wait()
            ms = (time.perf_counter() - start) / 20 * 1e3
            rows.append(dict(what="all_reduce, two ranks on one GPU", who=f"rank {rank}", case=f"{4 * count} bytes",
                             same=same, ms=round(ms, 4)))
        # Gradients differ by rank and are checked after their buckets: both ranks must end with equal weights.
        self.torch.manual_seed(5)
        weights = self.random(CASES["1000 x 1024"])
        self.torch.manual_seed(6 + rank)
        grads = self.random(CASES["1000 x 1024"])
        self.join(group, weights)
        for _ in range(3):
            self.joined(group, grads)
        sums = self.torch.stack([w.double().sum() for w in weights]).float()
        other = sums.clone()
        self.all_reduce(group, other)
        self.gpu.wait()
        rows.append(dict(what="joined, two ranks on one GPU", who=f"rank {rank}", case="1000 x 1024",
                         same=self.torch.equal(sums, other)))
        self.lib.lib.gpu_group_end(group)
        print(json.dumps(rows))


def main():
    parser = arguments(__doc__)
    parser.add_argument("--rank", type=int, help="of two on one GPU, which meet at --port")
    parser.add_argument("--port", type=int)
    args = parser.parse_args()
    bench = Nccl(args, "nccl")
    if args.dry:
        bench.counts = (1000, 3, 70_000)
    if args.rank is not None:
        return bench.rank(args.rank, args.port)
    bench.part(bench.one_rank)
    bench.part(bench.two_ranks, args)
    finish(bench)


if __name__ == "__main__":
    main()
