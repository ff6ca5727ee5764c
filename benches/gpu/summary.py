"""Prints the results of `run.sh all` as one table, ours beside PyTorch's.

    summary.py FOLDER
"""

import json
import os
import re
import sys


def lines(path):
    try:
        with open(path) as file:
            return file.read().splitlines()
    except OSError:
        return []


def rows(path):
    try:
        with open(path) as file:
            return json.load(file)["rows"]
    except (OSError, ValueError):
        return []


def correctness(folder):
    print("\n| tests | result |\n|---|---|")
    for name in sorted(os.listdir(folder)):
        if re.fullmatch(r"(tests|sanitizer)-.*\.txt", name):
            text = lines(os.path.join(folder, name))
            result = [line for line in text if line.startswith("test result") or "ERROR SUMMARY" in line]
            failed = [line.split()[1] for line in text if re.fullmatch(r"test .* FAILED", line)]
            print(f"| {name[:-4]} | {'; '.join(result) or 'did not end'} {' '.join(failed)} |")


def steps(folder):
    all_rows = [json.loads(line) for line in lines(os.path.join(folder, "steps.jsonl"))]
    print("\n| model | ours | PyTorch | ours / PyTorch's best |\n|---|---|---|---|")
    for model in dict.fromkeys(row["model"] for row in all_rows):
        sides = {}
        for who in ("ours", "torch"):
            mine = [row for row in all_rows if row["model"] == model and row["who"] == who]
            sides[who] = ([row["ms"] for row in mine if row["ms"]],
                          ", ".join(f"{row['how']} {row['ms'] or 'failed'}" for row in mine))
        (ours, mine), (torch, theirs) = sides["ours"], sides["torch"]
        ratio = f"{min(ours) / min(torch):.2f}" if ours and torch else "-"
        print(f"| {model}, ms a step | {mine} | {theirs} | {ratio} |")


def parts(folder):
    print("\n| what | case | ms | torch / ours | of a copy |\n|---|---|---|---|---|")
    for row in [row for name in ("times", "nccl", "nccl-two") for row in rows(os.path.join(folder, f"{name}.json"))]:
        ms = row.get("ms") or ", ".join(f"{who} {row[who]}" for who in ("ours", "torch") if who in row)
        other = {key: value for key, value in row.items()
                 if key in ("gb_per_s", "same", "ended", "error") and value is not None}
        ms = ms or " ".join(f"{key} {value}" for key, value in other.items())
        who = f", {row['who']}" if "who" in row else ""
        print(f"| {row['what']}{who} | {row.get('case', '')} | {ms} | {row.get('torch_by_ours', '')} "
              f"| {row.get('of_copy') or ''} |")


def cpu(folder):
    """All-reduce on the CPU, the best of all rounds."""
    best = {}
    for line in lines(os.path.join(folder, "cpu.txt")):
        row = re.fullmatch(r"(?:\[rank 0\] )?(ours|gloo) (\d+) (\d+) ([\d.]+) [\d.]+", line)
        if row:
            case = int(row[2]), int(row[3])
            by = best.setdefault(case, {})
            by[row[1]] = min(float(row[4]), by.get(row[1], float("inf")))
    if best:
        print("\n| all-reduce on the CPU | ours, us | gloo, us | ours / gloo |\n|---|---|---|---|")
    for (world, size), by in sorted(best.items()):
        ratio = f"{by['ours'] / by['gloo']:.3f}" if len(by) == 2 else "-"
        print(f"| {world} ranks, {size} bytes | {by.get('ours', '-')} | {by.get('gloo', '-')} | {ratio} |")


def kernels(folder):
    """Time by kernel of the steps that ncu saw."""
    for name in sorted(os.listdir(folder)):
        if not re.fullmatch(r"kernels-.*\.csv", name):
            continue
        by = {}
        for line in lines(os.path.join(folder, name)):
            fields = line.strip('"').split('","')
            if len(fields) > 10 and fields[0].isdigit():
                ms = float(fields[-1].replace(",", "")) * {"ns": 1e-6, "us": 1e-3, "ms": 1}.get(fields[-2], 1e-6)
                count, total = by.get(fields[4], (0, 0.0))
                by[fields[4]] = (count + 1, total + ms)
        print(f"\n{name[:-4]}: {sum(c for c, _ in by.values())} kernels, {sum(t for _, t in by.values()):.3f} ms")
        for kernel, (count, total) in sorted(by.items(), key=lambda item: -item[1][1])[:20]:
            print(f"  {total:8.3f} ms {count:5}  {kernel[:90]}")


if __name__ == "__main__":
    folder = sys.argv[1]
    for part in (correctness, steps, parts, cpu, kernels):
        part(folder)
