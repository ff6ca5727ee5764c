"""Writes the Parquet files of src/stream/parquet.rs's tests. Made with pyarrow 26.0.1, 2026-11-27.

    pip install pyarrow && python rows.py
"""

import datetime
import decimal
import pathlib

import pyarrow as pa
import pyarrow.parquet as pq


def table(rows: range) -> pa.Table:
    columns = {
        "label": pa.array(list(rows), pa.int64()),
        "small": pa.array([k - 2 for k in rows], pa.int8()),
        "byte": pa.array([250 + k % 5 for k in rows], pa.uint8()),
        "wide": pa.array([2**31 + k for k in rows], pa.uint32()),
        "flag": pa.array([k % 2 == 0 for k in rows], pa.bool_()),
        "half": pa.array([k / 2 for k in rows], pa.float16()),
        "score": pa.array([k / 4 for k in rows], pa.float64()),
        "day": pa.array([datetime.date(1970, 1, 1 + k) for k in rows], pa.date32()),
        "text": pa.array([None if k == 1 else f"row {k}" for k in rows], pa.string()),
        "image": pa.array(
            [{"bytes": bytes([k] * k), "path": None if k % 2 else f"{k}.jpg"} for k in rows],
            pa.struct([("bytes", pa.binary()), ("path", pa.string())]),
        ),
        "tokens": pa.array([list(range(k % 4)) for k in rows], pa.list_(pa.int32())),
        "matrix": pa.array([[[k, 1.0], [2.0, 3.0]] for k in rows], pa.list_(pa.list_(pa.float32()))),
    }
    return pa.table(columns)


def main() -> None:
    here = pathlib.Path(__file__).parent
    for compression in ["none", "snappy", "gzip", "zstd"]:
        pq.write_table(table(range(10)), here / f"{compression}.parquet", compression=compression, row_group_size=4)
    for compression in ["brotli", "lz4"]:
        columns = table(range(1)).select(["label"])
        pq.write_table(columns, here / f"{compression}.parquet", compression=compression)
    pq.write_table(table(range(0)), here / "empty.parquet")
    odd = {
        "money": pa.array([decimal.Decimal("1.25")], pa.decimal128(9, 2)),
        "map": pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64())),
        "holes": pa.array([[1, None]], pa.list_(pa.int64())),
        "words": pa.array([["a", "bc"]], pa.list_(pa.string())),
        "plain": pa.array([7], pa.int64()),
        "huge": pa.array([1e300], pa.float64()),
        "huges": pa.array([[1.0, -1e39]], pa.list_(pa.float64())),
        "above": pa.array([2**63], pa.uint64()),
        "messages": pa.array([[{"role": "user", "content": "a"}]]),
    }
    pq.write_table(pa.table(odd), here / "odd.parquet")


main()
