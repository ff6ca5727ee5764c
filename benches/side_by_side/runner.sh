#!/usr/bin/env bash
# Compares forward and backward of this repository's candle engine, stock candle and PyTorch eager,
# one thread each; the training loop with an empty step and MMEngine's, if installed; one rank and
# two; and, with --fashion, a training on Fashion-MNIST with DDP over gloo. Installs torch (from
# PyPI, in a virtual environment under target/) if it is missing, builds, and runs the programs in
# turn.
#
#   benches/side_by_side/runner.sh [--rounds N] [--works "mlp transformer resnet16 resnet64"]
#                                  [--loops "10000 100000 1000000"] [--ranks STEPS]
#                                  [--fashion SECONDS]
set -euo pipefail
cd "$(dirname "$0")/../.."

rounds=9 works="mlp transformer resnet16 resnet64" loops="10000 100000 1000000" ranks=5 fashion=0
while [ $# -gt 0 ]; do
  case $1 in
    --rounds) rounds=$2; shift ;;
    --works) works=$2; shift ;;
    --loops) loops=$2; shift ;;
    --ranks) ranks=$2; shift ;;
    --fashion) fashion=$2; shift ;;
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
[ "$fashion" = 0 ] || cargo build --quiet --release -p gradstack-runner --bin runner
ours=target/release/side_by_side_runner
export OMP_NUM_THREADS=1 RAYON_NUM_THREADS=1

echo "$(date -u +%F), $(lscpu | sed -n 's/^Model name: *//p'), $(nproc --all) cores, Linux $(uname -r)"
echo "| work | ours, ms | with compile, ms | PyTorch eager, ms | ours / PyTorch | with compile |" \
  "stock candle, ms | stock / ours |"
echo "|---|---|---|---|---|---|---|---|"
for name in $works; do
  mine=$($ours step "$name" ours "$rounds")
  torch=$("$python" benches/side_by_side/torch_runner.py "$name" "$rounds")
  compiled=$($ours step "$name" compiled "$rounds")
  # Stock candle's layer norm has no gradient, so its transformer cannot be timed.
  stock=-
  [ "$name" = transformer ] || stock=$($ours step "$name" stock 3)
  awk -v n="$name" -v o="$mine" -v c="$compiled" -v t="$torch" -v s="$stock" 'BEGIN {
    printf "| %s | %.1f | %.1f | %.1f | %.2f | %.2f | %s | %s |\n", n, o, c, t, o / t, c / t, s,
      s == "-" ? s : sprintf("%.2f", s / o) }'
done
# MMEngine with the headless OpenCV, instead of the one with windows.
[ -z "$loops" ] || "$python" -c 'import mmengine' 2>/dev/null || {
  pip() { "$python" -m pip install --quiet --no-cache-dir "$@"; }
  pip addict matplotlib opencv-python-headless pyyaml rich termcolor yapf && pip --no-deps mmengine
} || echo "MMEngine cannot be installed here" >&2
[ -z "$loops" ] || printf '%s\n%s\n' "| loop: iterations, a log line every | ours, ns | MMEngine, ns |" "|---|---|---|"
for interval in 1000 10; do
  for count in $loops; do
    mine=$($ours loop "$count" "$interval" 2>&1 >/dev/null | tail -1) theirs=-
    # A million iterations of MMEngine take minutes.
    [ "$count" = 1000000 ] ||
      theirs=$("$python" benches/side_by_side/mmengine_loop.py "$count" "$interval" 2>/dev/null | tail -1 || echo -)
    echo "| $count, $interval | $mine | $theirs |"
  done
done
if [ "$ranks" != 0 ]; then
  one=$($ours ranks "$ranks")
  export MASTER_ADDR=127.0.0.1 MASTER_PORT=$((20000 + RANDOM % 10000)) WORLD_SIZE=2 LOCAL_WORLD_SIZE=2
  RANK=1 LOCAL_RANK=1 $ours ranks "$ranks" &
  two=$(RANK=0 LOCAL_RANK=0 $ours ranks "$ranks")
  wait
  unset MASTER_ADDR MASTER_PORT WORLD_SIZE LOCAL_WORLD_SIZE
  awk -v one="$one" -v two="$two" -v n="$ranks" 'BEGIN { printf "ResNet-18 of width 64 in data parallel, " \
    "%d steps: one rank %.0f ms a step, two ranks %.0f: %.2f times the images\n", n, one, two, 2 * one / two }'
fi
if [ "$fashion" != 0 ]; then
  rm -rf "$work/fashion"
  for dtype in float32 float16; do
    target/release/runner launch --nproc-per-node 2 -- train configs/resnet_fashion.toml \
      --work-dir "$work/fashion/$dtype" --time-budget "${fashion}s" \
      --cfg-options "optim_wrapper.dtype=$dtype" > "$work/fashion-$dtype.log" 2>&1 \
      || [ $? = 75 ] || tail -3 "$work/fashion-$dtype.log"
    echo "Fashion-MNIST, ours, $dtype, $fashion s: $(grep -i accuracy "$work/fashion-$dtype.log" | tail -1)"
  done
  echo "Fashion-MNIST, PyTorch DDP over gloo, $fashion s: $("$python" -m torch.distributed.run \
    --nproc-per-node 2 benches/side_by_side/torch_fashion.py "$fashion" 2>/dev/null)"
fi
