"""Writes nearest.json: indices of PyTorch's `nearest`, for tests/it/torch_vectors.rs.

    python record_nearest.py > nearest.json

For each size of the input from 1 to 300 a hash of the indices for all sizes of the output from 1 to 300.
"""

import json

import torch
import torch.nn.functional as F

SIZES = range(1, 301)
hashes = []
for size in SIZES:
    x = torch.arange(size, dtype=torch.float32).reshape(1, 1, 1, size)
    total = 0
    for out in SIZES:
        for index in F.interpolate(x, size=(1, out), mode="nearest").flatten().to(torch.int64).tolist():
            total = (total * 257 + index) % (2**31 - 1)
    hashes.append(total)
print(json.dumps({"torch": torch.__version__, "hashes": hashes}))
