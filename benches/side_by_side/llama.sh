#!/usr/bin/env bash
# Compares training steps of a small Llama (width 256, 4 layers, 128 tokens, 16 samples, AdamW, one
# thread) in f32 and bf16 by autocast: this repository's and PyTorch's, turn by turn. Installs torch
# (from PyPI, in a virtual environment under target/) if it is missing.
#
#   benches/side_by_side/llama.sh [TURNS]
set -euo pipefail
cd "$(dirname "$0")/../.."

work=$PWD/target/side_by_side python=${TORCH_PYTHON:-$PWD/target/side_by_side/venv/bin/python}
mkdir -p "$work"
if ! "$python" -c 'import torch' 2>/dev/null; then
  python3 -m venv "$work/venv"
  python=$work/venv/bin/python
  "$python" -m pip install --quiet --no-cache-dir torch numpy
fi
cargo build --quiet --release -p benches --features candle --bin side_by_side_llama
ours=${CARGO_TARGET_DIR:-target}/release/side_by_side_llama
export OMP_NUM_THREADS=1 RAYON_NUM_THREADS=1

echo "$(date -u +%F), $(lscpu | sed -n 's/^Model name: *//p'), $(nproc --all) cores, Linux $(uname -r)"
echo "| type | ours, tokens/s | PyTorch, tokens/s | ours / PyTorch |"
echo "|---|---|---|---|"
for _ in $(seq "${1:-5}"); do
  for dtype in f32 bf16; do
    awk -v d=$dtype -v o="$("$ours" $dtype 11)" -v t="$("$python" benches/side_by_side/torch_llama.py $dtype 11)" \
      'BEGIN { printf "| %s | %d | %d | %.2f |\n", d, o, t, o / t }'
  done
done
