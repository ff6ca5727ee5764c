#!/usr/bin/env bash
# Compares forward and backward of an LSTM and a GRU (128 inputs and hidden units, 64 steps, 32
# samples, f32, one thread): this repository's, PyTorch's and candle-nn's, turn by turn. Installs
# torch (from PyPI, in a virtual environment under target/) if it is missing.
#
#   benches/side_by_side/rnn.sh [TURNS]
set -euo pipefail
cd "$(dirname "$0")/../.."

work=$PWD/target/side_by_side python=${TORCH_PYTHON:-$PWD/target/side_by_side/venv/bin/python}
mkdir -p "$work"
if ! "$python" -c 'import torch' 2>/dev/null; then
  python3 -m venv "$work/venv"
  python=$work/venv/bin/python
  "$python" -m pip install --quiet --no-cache-dir torch numpy
fi
cargo build --quiet --release -p benches --features candle --bin side_by_side_rnn
ours=${CARGO_TARGET_DIR:-target}/release/side_by_side_rnn
export OMP_NUM_THREADS=1 RAYON_NUM_THREADS=1
# Both keep the memory that they free, as a trainer of ours does, unless NEW_PAGES is set.
[ -n "${NEW_PAGES:-}" ] || export MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=4294967296

echo "$(date -u +%F), $(lscpu | sed -n 's/^Model name: *//p'), $(nproc --all) cores, Linux $(uname -r)"
echo "| kind | ours, ms | PyTorch, ms | candle-nn, ms | ours / PyTorch |"
echo "|---|---|---|---|---|"
for _ in $(seq "${1:-5}"); do
  for kind in lstm gru; do
    mine=$("$ours" $kind ours 21) torch=$("$python" benches/side_by_side/torch_rnn.py $kind 21)
    awk -v k=$kind -v o="$mine" -v t="$torch" -v s="$("$ours" $kind stock 5)" \
      'BEGIN { printf "| %s | %.1f | %.1f | %.1f | %.2f |\n", k, o, t, s, o / t }'
  done
done
