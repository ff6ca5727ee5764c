"""PyTorch's store for store.sh: prints its port and serves until standard input ends."""
import datetime
import sys

import torch.distributed as dist

store = dist.TCPStore("127.0.0.1", 0, None, True, datetime.timedelta(seconds=60),
                      wait_for_workers=False, use_libuv=True)
print(store.port, flush=True)
sys.stdin.read()
