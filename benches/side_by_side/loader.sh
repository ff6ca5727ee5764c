#!/usr/bin/env bash
# Compares this repository's data loader with PyTorch's of as many workers: a training whose batch
# takes as long as its step, waiting (`wait`) or computing (`spin`), and the memory of an epoch of
# 64 batches of 16 MiB. Installs torch (from PyPI, in a virtual environment under target/) if it is
# missing, builds, and runs the programs turn by turn.
#
#   benches/side_by_side/loader.sh [--turns N] [--iterations N]
set -euo pipefail
cd "$(dirname "$0")/../.."

turns=5 iterations=20
while [ $# -gt 0 ]; do
  case $1 in
    --turns) turns=$2; shift ;;
    --iterations) iterations=$2; shift ;;
    *) echo "unknown option $1; see the head of $0" >&2; exit 2 ;;
  esac
  shift
done

work=$PWD/target/side_by_side python=${TORCH_PYTHON:-$PWD/target/side_by_side/venv/bin/python}
mkdir -p "$work"
if ! "$python" -c 'import torch' 2>/dev/null; then
  python3 -m venv "$work/venv"
  python=$work/venv/bin/python
  "$python" -m pip install --quiet --no-cache-dir torch numpy
fi
if [ -z "${LOADER:-}" ]; then
  cargo build --quiet --release -p benches --bin side_by_side_loader
  LOADER=${CARGO_TARGET_DIR:-target}/release/side_by_side_loader
fi

# Runs one program: `ours` or `torch`.
ask() {
  local program=$1; shift
  case $program in
    ours) "$LOADER" "$@" ;;
    torch) "$python" benches/side_by_side/torch_loader.py "$@" ;;
  esac
}

echo "$(date -u +%F), $(lscpu | sed -n 's/^Model name: *//p'), $(nproc --all) cores, Linux $(uname -r)"
figures=$(mktemp)
trap 'rm -f "$figures"' EXIT
for turn in $(seq "$turns"); do
  for workers in 0 1 2; do
    for program in ours torch; do
      for kind in wait spin; do
        echo "$program $kind $workers $(ask $program hide $kind $workers "$iterations")"
      done
      echo "$program memory $workers $(ask $program memory $workers)"
    done
  done
  echo "turn $turn of $turns" >&2
done > "$figures"
awk '
  function median(list, count,   i, j, swap) {
    for (i = 2; i <= count; i++) for (j = i; j > 1 && list[j - 1] > list[j]; j--) {
      swap = list[j]; list[j] = list[j - 1]; list[j - 1] = swap
    }
    return count % 2 ? list[(count + 1) / 2] : (list[count / 2] + list[count / 2 + 1]) / 2
  }
  # Median over the turns.
  function of(program, kind, workers,   t, list, key) {
    key = program " " kind " " workers
    for (t = 1; t <= turns[key]; t++) list[t] = figure[key, t]
    return median(list, turns[key])
  }
  {
    key = $1 " " $2 " " $3
    slower = $4 > $5 ? $4 : $5
    figure[key, ++turns[key]] = $2 == "memory" ? $4 : $6 / slower
    if ($7) figure["apart " $2 " " $3, ++turns["apart " $2 " " $3]] = $7 / slower
  }
  END {
    print "An iteration by the slower of a batch and a step alone; MiB that an epoch adds"
    print "| workers | ours, waits | PyTorch, waits | ours, computes | two threads, compute | PyTorch, computes |" \
      " ours, MiB | PyTorch, MiB |\n|---|---|---|---|---|---|---|---|"
    for (n = 0; n <= 2; n++)
      printf "| %d | %.3f | %.3f | %.3f | %.3f | %.3f | %.0f | %.0f |\n", n, of("ours", "wait", n),
        of("torch", "wait", n), of("ours", "spin", n), of("apart", "spin", n), of("torch", "spin", n),
        of("ours", "memory", n), of("torch", "memory", n)
  }' "$figures"
