#!/usr/bin/env bash
# Compares a training step of ResNet-18 (28 x 28, 32 images a rank, f32, SGD, one thread a rank) by
# a candle program with `candle_train::Trainer` and by PyTorch with DDP over gloo: two ranks, and
# one rank alone. Installs torch (from PyPI, in a virtual environment under target/) if it is
# missing and builds. The four programs run turn by turn, in reverse order every other turn; each
# prints its median step.
#
#   benches/side_by_side/trainer.sh [--turns N] [--steps N] [--width N]
set -euo pipefail
cd "$(dirname "$0")/../.."

turns=5 steps=9 width=64
while [ $# -gt 0 ]; do
  case $1 in
    --turns) turns=$2; shift ;;
    --steps) steps=$2; shift ;;
    --width) width=$2; shift ;;
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
cargo build --quiet --release -p gradstack-launch -p benches --features benches/runner --bin launch \
  --bin side_by_side_runner
release=${CARGO_TARGET_DIR:-target}/release
ours=("$release/side_by_side_runner" trainer "$width" "$steps")
torch=(benches/side_by_side/torch_ddp.py "$width" "$steps")
export OMP_NUM_THREADS=1 RAYON_NUM_THREADS=1

# Prints one program's milliseconds a step.
ask() {
  case $1 in
    ours1) "${ours[@]}" ;;
    # The launcher prefixes output with the rank.
    ours2) "$release/launch" --nproc-per-node 2 -- "${ours[@]}" | sed 's/^\[rank 0\] //' ;;
    torch1) "$python" "${torch[@]}" ;;
    torch2) "$python" -m torch.distributed.run --standalone --nproc-per-node 2 "${torch[@]}" ;;
  esac
}

echo "$(date -u +%F), $(lscpu | sed -n 's/^Model name: *//p'), $(nproc --all) cores, Linux $(uname -r)"
order="ours1 torch1 ours2 torch2" times=$(mktemp)
trap 'rm -f "$times"' EXIT
for turn in $(seq "$turns"); do
  for name in $order; do
    ms=$(ask "$name")
    echo "$turn $name $ms" | tee -a "$times" >&2
  done
  order=$(tr ' ' '\n' <<<"$order" | tac | xargs)
done
awk -v width="$width" '
  function median(list, count,   i, j, swap) {
    for (i = 2; i <= count; i++) for (j = i; j > 1 && list[j - 1] > list[j]; j--) {
      swap = list[j]; list[j] = list[j - 1]; list[j - 1] = swap
    }
    return count % 2 ? list[(count + 1) / 2] : (list[count / 2] + list[count / 2 + 1]) / 2
  }
  # Median over the turns of one program by another, or of its milliseconds.
  function of(name, by,   t, list) {
    for (t = 1; t <= turns; t++) list[t] = ms[t, name] / (by == "" ? 1 : ms[t, by])
    return median(list, turns)
  }
  { ms[$1, $2] = $3; turns = $1 }
  END {
    printf "ResNet-18 of width %d, 32 images a rank, ms a step, medians of %d turns\n", width, turns
    print "| ranks | ours | PyTorch, DDP over gloo | ours / PyTorch |\n|---|---|---|---|"
    for (n = 1; n <= 2; n++)
      printf "| %d | %.0f | %.0f | %.2f |\n", n, of("ours" n), of("torch" n), of("ours" n, "torch" n)
    printf "| 2 / 1 | %.2f | %.2f | |\n", of("ours2", "ours1"), of("torch2", "torch1")
  }' "$times"
