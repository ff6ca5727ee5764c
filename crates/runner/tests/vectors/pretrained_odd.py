"""Writes pretrained_odd.pth: a state dict in the form of torch.save (PyTorch 1.6 or later), with a channels-last
weight, an expanded one, f64, int8 and uint8. Written without PyTorch, 2026-11-28."""

import io
import pickle
import struct
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path
from types import ModuleType


class Storage:
    def __init__(self, kind, key, count):
        self.kind, self.key, self.count = kind, key, count


class Tensor:
    def __init__(self, storage, shape, strides):
        self.args = (storage, 0, shape, strides, False, OrderedDict())

    def __reduce__(self):
        return sys.modules["torch._utils"]._rebuild_tensor_v2, self.args


class Pickler(pickle.Pickler):
    def persistent_id(self, value):
        if isinstance(value, Storage):
            return ("storage", value.kind, value.key, "cpu", value.count)
        return None


def main():
    torch, utils = ModuleType("torch"), ModuleType("torch._utils")
    sys.modules.update({"torch": torch, "torch._utils": utils})
    utils._rebuild_tensor_v2 = lambda *_: None
    utils._rebuild_tensor_v2.__module__ = "torch._utils"
    utils._rebuild_tensor_v2.__qualname__ = "_rebuild_tensor_v2"
    records, state = {}, OrderedDict()

    def add(name, kind, code, values, shape, strides):
        if not hasattr(torch, kind):
            setattr(torch, kind, type(kind, (), {"__module__": "torch"}))
        records[str(len(records))] = struct.pack(f"<{len(values)}{code}", *values)
        state[name] = Tensor(Storage(getattr(torch, kind), str(len(records) - 1), len(values)), shape, strides)

    eighths = [n / 8 for n in range(12)]
    add("plain.weight", "FloatStorage", "f", eighths[:6], (2, 3), (3, 1))
    add("conv.weight", "FloatStorage", "f", eighths, (2, 3, 1, 2), (6, 1, 6, 3))
    add("expanded.weight", "FloatStorage", "f", eighths[:2], (3, 2), (0, 1))
    add("double.weight", "DoubleStorage", "d", [0.5, 1e39], (2,), (1,))
    add("quantized.weight", "CharStorage", "b", [1, -2], (2,), (1,))
    add("bytes.weight", "ByteStorage", "B", [1, 2], (2,), (1,))
    text = io.BytesIO()
    Pickler(text, 2).dump(state)
    # A fixed date keeps the file the same.
    with zipfile.ZipFile(Path(__file__).parent / "pretrained_odd.pth", "w") as out:
        files = {"data.pkl": text.getvalue(), "byteorder": b"little", **{f"data/{k}": v for k, v in records.items()}}
        for name, data in files.items():
            out.writestr(zipfile.ZipInfo(f"pretrained_odd/{name}", (1980, 1, 1, 0, 0, 0)), data)


if __name__ == "__main__":
    main()
