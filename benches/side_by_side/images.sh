#!/usr/bin/env bash
# Compares images a second from a folder of JPEGs (500 x 375, made here) through resize, crop, flip
# and normalize: this repository's loader, PyTorch's with torchvision on Pillow's images, and the
# same on tensors of bytes, with 0, 1 and 2 workers. Installs torch and torchvision (from PyPI, in a
# virtual environment under target/) if they are missing, builds, and runs the programs turn by
# turn.
#
#   benches/side_by_side/images.sh [--turns N] [--images N]
set -euo pipefail
cd "$(dirname "$0")/../.."

turns=5 images=512
while [ $# -gt 0 ]; do
  case $1 in
    --turns) turns=$2; shift ;;
    --images) images=$2; shift ;;
    *) echo "unknown option $1; see the head of $0" >&2; exit 2 ;;
  esac
  shift
done

work=$PWD/target/side_by_side python=${TORCH_PYTHON:-$PWD/target/side_by_side/venv/bin/python}
mkdir -p "$work"
if ! "$python" -c 'import torch, torchvision' 2>/dev/null; then
  [ -e "$work/venv" ] || python3 -m venv "$work/venv"
  python=$work/venv/bin/python
  "$python" -m pip install --quiet --no-cache-dir torch torchvision numpy
fi
if [ -z "${IMAGES:-}" ]; then
  cargo build --quiet --release -p benches --features images --bin side_by_side_images
  IMAGES=${CARGO_TARGET_DIR:-target}/release/side_by_side_images
fi
folder=$work/images-$images
[ -e "$folder" ] || "$python" benches/side_by_side/torch_images.py make "$folder" "$images"

# Runs one program: `ours`, `pil` or `tensors`.
ask() {
  case $1 in
    ours) "$IMAGES" "$folder" "$2" ;;
    *) "$python" benches/side_by_side/torch_images.py load "$folder" "$2" "$1" ;;
  esac
}

echo "$(date -u +%F), $(lscpu | sed -n 's/^Model name: *//p'), $(nproc --all) cores, Linux $(uname -r)"
figures=$(mktemp)
trap 'rm -f "$figures"' EXIT
for turn in $(seq "$turns"); do
  for workers in 0 1 2; do
    for program in ours pil tensors; do
      echo "$program $workers $(ask $program $workers)"
    done
  done
  echo "turn $turn of $turns" >&2
done > "$figures"
awk '
  # Median over the turns.
  function of(key,   i, j, swap, n) {
    n = turns[key]
    for (i = 2; i <= n; i++) for (j = i; j > 1 && figure[key, j - 1] > figure[key, j]; j--) {
      swap = figure[key, j]; figure[key, j] = figure[key, j - 1]; figure[key, j - 1] = swap
    }
    return n % 2 ? figure[key, (n + 1) / 2] : (figure[key, n / 2] + figure[key, n / 2 + 1]) / 2
  }
  { figure[$1 " " $2, ++turns[$1 " " $2]] = $3 }
  END {
    print "Images a second\n| workers | ours | PyTorch, Pillow | PyTorch, tensors |\n|---|---|---|---|"
    for (n = 0; n <= 2; n++)
      printf "| %d | %.0f | %.0f | %.0f |\n", n, of("ours " n), of("pil " n), of("tensors " n)
  }' "$figures"
