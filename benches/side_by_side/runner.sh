#!/usr/bin/env bash
# Forward and backward of this repository's candle engine, of stock candle and of PyTorch eager, one
# thread each, side by side on this machine, and the training loop around an empty step. Installs torch
# (PyPI's, in a virtual environment under target/) if it is missing, builds, and lets the programs take
# turns. MMEngine's loop around an empty step stands beside, if PyPI has it.
#
#   benches/side_by_side/runner.sh [--rounds N] [--works "mlp transformer resnet16 resnet64"]
set -euo pipefail
cd "$(dirname "$0")/../.."

rounds=9 works="mlp transformer resnet16 resnet64"
while [ $# -gt 0 ]; do
  case $1 in
    --rounds) rounds=$2; shift ;;
    --works) works=$2; shift ;;
    *) echo "unknown option $1; see the head of $0" >&2; exit 2 ;;
  esac
  shift
done

work=$PWD/target/side_by_side python=$PWD/target/side_by_side/venv/bin/python
mkdir -p "$work"
if ! "$python" -c 'import torch' 2>/dev/null; then
  [ -x "$python" ] || python3 -m venv "$work/venv"
  "$python" -m pip install --quiet --no-cache-dir torch numpy
fi
cargo build --quiet --release -p benches --features runner --bin side_by_side_runner
ours=target/release/side_by_side_runner
export OMP_NUM_THREADS=1 RAYON_NUM_THREADS=1

echo "$(date -u +%F), $(lscpu | sed -n 's/^Model name: *//p'), $(nproc --all) cores, Linux $(uname -r)"
echo "| work | ours, ms | PyTorch eager, ms | ours / PyTorch | stock candle, ms | stock / ours |"
echo "|---|---|---|---|---|---|"
for name in $works; do
  mine=$($ours step "$name" ours "$rounds")
  torch=$("$python" benches/side_by_side/torch_runner.py "$name" "$rounds")
  # Stock candle's layer norm cuts the graph: there is no transformer of it to time.
  stock=-
  [ "$name" = transformer ] || stock=$($ours step "$name" stock 3)
  awk -v n="$name" -v o="$mine" -v t="$torch" -v s="$stock" 'BEGIN {
    printf "| %s | %.1f | %.1f | %.2f | %s | %s |\n", n, o, t, o / t, s, s == "-" ? s : sprintf("%.2f", s / o) }'
done
# MMEngine without what it names for windows: the headless OpenCV is enough.
"$python" -c 'import mmengine' 2>/dev/null || {
  pip() { "$python" -m pip install --quiet --no-cache-dir "$@"; }
  pip addict matplotlib opencv-python-headless pyyaml rich termcolor yapf && pip --no-deps mmengine
} || echo "MMEngine cannot be installed here" >&2
echo "| loop: iterations, a log line every | ours, ns | MMEngine, ns |"
echo "|---|---|---|"
for interval in 1000 10; do
  for count in 10000 100000 1000000; do
    mine=$($ours loop "$count" "$interval" 2>&1 >/dev/null | tail -1) theirs=-
    # A million of MMEngine's iterations take minutes.
    [ "$count" = 1000000 ] ||
      theirs=$("$python" benches/side_by_side/mmengine_loop.py "$count" "$interval" 2>/dev/null | tail -1 || echo -)
    echo "| $count, $interval | $mine | $theirs |"
  done
done
echo "ResNet-18 of width 64 in data parallel, one rank: $($ours ranks 5) ms"
