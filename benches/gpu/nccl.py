"""Averages over NCCL in a group of one rank, and of two ranks on one GPU, beside `torch.distributed`'s. With
`--two-gpus`, two ranks on two GPUs instead.

Rows go to `nccl.json` in the folder `--out`, with `--two-gpus` to `nccl-two.json`. Averages, and the weights after a
step that was joined to them, are compared bit for bit with the CPU's.
"""

import ctypes
import json
import os
import socket
import subprocess
import sys
import tempfile
import time

import torch

from times import CASES, DEVICE, F32, Library, Times, addresses, arguments, lengths, random, times, words

BACKEND = "nccl"
COUNTS = (1 << 18, 25 << 18, 1 << 28)
NCCL_OF_TWO_RANKS = 23000  # on one GPU


def tensor_at(address, count):
    """Memory that PyTorch did not allocate, as a tensor."""
    class At:
        __cuda_array_interface__ = dict(shape=(count,), typestr="<f4", version=3, data=(address, False))
    return torch.as_tensor(At(), device=DEVICE)


class Nccl(Times):
    def group(self, rank=0, world=1, port=0):
        group = ctypes.c_void_p()
        numbers = [ctypes.c_int(n) for n in (0, rank, world, port)]
        self.lib.group(ctypes.c_void_p(torch.cuda.current_stream().cuda_stream), *numbers, ctypes.byref(group))
        return group

    def all_reduce(self, group, tensor):
        self.lib.all_reduce(group, tensor.data_ptr(), tensor.numel(), F32)

    def join(self, group, weights):
        self.lib.join(group, b"adamw", len(weights), addresses(weights), lengths(weights), F32, ctypes.c_double(1.0),
                      ctypes.c_float(1.0))

    def joined(self, group, grads):
        self.lib.joined_average(group, addresses(grads))
        self.lib.joined_step(group)

    def one_rank(self):
        group, grads = self.group(), random(CASES["ResNet-50"])
        places = words([0] * len(grads))
        self.lib.reducer(group, len(grads), lengths(grads), F32)
        for _ in range(3):
            [g.normal_() for g in grads]
            self.lib.reduce(group, addresses(grads), places)
        same = all(torch.equal(tensor_at(place, g.numel()), g) for place, g in zip(places, grads))
        self.row(what="gradients through a reducer", case="ResNet-50", same=same)
        self.steps(group, grads, places)
        with tempfile.TemporaryDirectory() as folder:
            store = f"file://{folder}/store"
            torch.distributed.init_process_group(BACKEND, init_method=store, rank=0, world_size=1)
            average = torch.distributed.ReduceOp.AVG if BACKEND == "nccl" else torch.distributed.ReduceOp.SUM
            for count in COUNTS:
                a = random([count])[0]
                calls = {"ours": lambda: self.all_reduce(group, a),
                         "torch": lambda: torch.distributed.all_reduce(a, average)}
                ms = {who: round(ms, 4) for who, ms in times(calls).items()}
                self.row(what="all_reduce, one rank", case=f"{4 * count} bytes", **ms)
            torch.distributed.destroy_process_group()
        self.lib.lib.gpu_group_end(group)

    def steps(self, group, grads, places):
        """Averages and a clipped step: gradients checked after their bucket, and in the step."""
        weights = [torch.randn_like(g) for g in grads]
        host = [[t.cpu() if t.is_cuda else t.clone() for t in some] for some in (weights, grads)]
        self.join(group, weights)
        for _ in range(3):
            self.joined(group, grads)
        torch.cuda.synchronize()
        numbers = F32, F32, ctypes.c_float(1.0), True, ctypes.c_double(1.0)
        self.lib.reference(b"adamw", 3, len(grads), addresses(host[0]), addresses(host[1]), lengths(grads), *numbers)
        same = all(torch.equal(a.cpu(), b) for a, b in zip(weights, host[0]))
        self.row(what="joined step has the CPU's bits", case="ResNet-50", same=same)
        self.ours.optimizer(b"adamw", weights, grads, places)
        self.ours.scaled()

        def within():
            self.lib.reduce(group, addresses(grads), places)
            self.ours.step(True, 1.0)

        calls = {"checks after each bucket": lambda: self.joined(group, grads), "checks in the step": within}
        for who, ms in times(calls).items():
            self.row(what="average and clipped step, one rank", case="ResNet-50", who=who, ms=round(ms, 4))

    def two_ranks(self):
        """Two ranks on this GPU, as two processes, if NCCL supports that."""
        version = self.lib.lib.gpu_nccl_version()
        if version < NCCL_OF_TWO_RANKS:
            return self.row(what="two ranks on one GPU", ended=f"needs NCCL {NCCL_OF_TWO_RANKS}, is {version}")
        self.start_ranks("two ranks on one GPU", [dict(NCCL_MULTI_RANK_GPU_ENABLE="1", NCCL_MAX_CTAS="4")] * 2)

    def two_gpus(self):
        """Two ranks, each of which sees one GPU."""
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
        self.start_ranks("two GPUs", [dict(CUDA_VISIBLE_DEVICES=gpu) for gpu in gpus[:2]])

    def start_ranks(self, where, variables):
        """A rank, as a process, for each set of environment variables; there are two."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        own = [sys.executable, *sys.argv, "--port", port, "--rank"]
        ranks = [subprocess.Popen([*own, str(rank)], env=dict(os.environ, **own_variables), stdout=subprocess.PIPE,
                                  stderr=subprocess.STDOUT, text=True) for rank, own_variables in enumerate(variables)]
        try:
            texts = [rank.communicate(timeout=45)[0] for rank in ranks]
        finally:
            [rank.kill() for rank in ranks]
        for text, rank in zip(texts, ranks):
            if rank.returncode:
                raise RuntimeError(text[-300:])
            for row in json.loads(text.splitlines()[-1]):
                self.row(**dict(row, what=f"{row['what']}, {where}"))

    def rank(self, rank, port):
        """One of the two ranks; prints its rows on the last line."""
        rows, group = [], self.group(rank, 2, port)
        for count in COUNTS[:2]:
            a = torch.full((count,), rank + 1.0, device=DEVICE)
            self.all_reduce(group, a)
            torch.cuda.synchronize()
            same = bool((a == 1.5).all())
            start = time.perf_counter()
            for _ in range(20):
                self.all_reduce(group, a)
            torch.cuda.synchronize()
            ms = (time.perf_counter() - start) / 20 * 1e3
            rows.append(dict(what="all_reduce", who=f"rank {rank}", case=f"{4 * count} bytes",
                             same=same, ms=round(ms, 4)))
        # Gradients differ by rank and are checked after their buckets: both ranks must end with
        # equal weights.
        torch.manual_seed(5)
        weights = random(CASES["1000 x 1024"])
        torch.manual_seed(6 + rank)
        grads = random(CASES["1000 x 1024"])
        self.join(group, weights)
        for _ in range(3):
            self.joined(group, grads)
        sums = torch.stack([w.double().sum() for w in weights]).float()
        other = sums.clone()
        self.all_reduce(group, other)
        torch.cuda.synchronize()
        rows.append(dict(what="joined", who=f"rank {rank}", case="1000 x 1024",
                         same=torch.equal(sums, other)))
        self.lib.lib.gpu_group_end(group)
        print(json.dumps(rows))


def main():
    parser = arguments(__doc__)
    parser.add_argument("--two-gpus", action="store_true", help="two ranks on two GPUs")
    parser.add_argument("--rank", type=int, help="of two, which meet at --port")
    parser.add_argument("--port", type=int)
    args = parser.parse_args()
    file = "nccl-two.json" if args.two_gpus else "nccl.json"
    record = Nccl(Library(args.library), os.path.join(args.out, file))
    if args.rank is not None:
        return record.rank(args.rank, args.port)
    if args.two_gpus:
        record.part(record.two_gpus)
        return record.finish()
    record.part(record.one_rank)
    record.part(record.two_ranks)
    record.finish()


if __name__ == "__main__":
    main()
