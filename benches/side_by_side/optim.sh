#!/usr/bin/env bash
# Compares optimizer steps of this repository, PyTorch, DeepSpeed's CPUAdam and timm. Installs
# missing packages (from PyPI, in a virtual environment under target/; a C++ compiler from Debian
# for DeepSpeed), builds, runs the programs in turn, and prints a table for each number of threads.
#
#   benches/side_by_side/optim.sh [--places N] [--rounds N] [--threads "1 2"]
#       [--works "adamw sgd ..."] [--isa avx2]
#
# `--isa avx2` disables AVX-512 for all programs and the ceiling.
# `--places` is the number of memory placements: for each, everything is allocated anew. `--rounds`
# counts the rounds in each placement.
#
# Works: adamw, adamw-110m, adamw-small, sgd, sgd-110m, amp, adadelta, adam, adamp, bert_adam, lamb,
# rmsprop, rmsprop_tf, casts (always one thread).
set -euo pipefail
cd "$(dirname "$0")/../.."

isa=""
places=3 rounds=5 threads="1 2"
works="adamw adamw-110m adamw-small sgd sgd-110m amp adadelta adam adamp bert_adam lamb rmsprop rmsprop_tf casts"
while [ $# -gt 0 ]; do
  case $1 in
    --places) places=$2; shift ;;
    --rounds) rounds=$2; shift ;;
    --threads) threads=$2; shift ;;
    --works) works=$2; shift ;;
    --isa) isa=$2; [ "$isa" = avx2 ] || { echo "--isa is avx2, or left out" >&2; exit 2; }; shift ;;
    *) echo "unknown option $1; see the head of $0" >&2; exit 2 ;;
  esac
  shift
done

work=$PWD/target/side_by_side python=$PWD/target/side_by_side/venv/bin/python
mkdir -p "$work"
if [ -n "$isa" ]; then
  # Limits our kernels, PyTorch's and, in torch_optim.py, DeepSpeed's compiler flags.
  export GRADSTACK_SIMD=$isa ATEN_CPU_CAPABILITY=$isa
fi

install_peers() {
  if ! command -v g++ >/dev/null; then
    local sudo=""; [ "$(id -u)" = 0 ] || sudo=sudo
    $sudo apt-get update -qq
    $sudo apt-get install -y -qq --no-install-recommends g++ libc6-dev >/dev/null
  fi
  # DeepSpeed's extension needs Python's headers, a separate package in Debian; without them the
  # table says so.
  if ! "$python" -c 'import torch, timm, ninja, importlib.metadata as m; m.version("deepspeed")' 2>/dev/null; then
    [ -x "$python" ] || python3 -m venv "$work/venv" || python=python3
    "$python" -m pip install --quiet --no-cache-dir torch numpy timm deepspeed ninja setuptools wheel ||
      echo "some peers could not be installed and are left out"
  fi
  # Compiles CPUAdam, which takes minutes, once.
  export PATH="$work/venv/bin:$PATH" TORCH_EXTENSIONS_DIR="$work/torch_extensions$isa"
  "$python" benches/side_by_side/torch_optim.py --build-deepspeed >"$work/deepspeed.log" 2>&1 ||
    echo "no DeepSpeed CPUAdam: $(tail -1 "$work/deepspeed.log")"
}

install_peers
cargo build --quiet --release -p benches --bin side_by_side_optim

echo "$(date -u +%F), $(lscpu | sed -n 's/^Model name: *//p'), $(nproc) cores, Linux $(uname -r)${isa:+, $isa only}"
echo "load before: $(cut -d' ' -f1-3 /proc/loadavg)"
for count in $threads; do
  # shellcheck disable=SC2086 # one word for each work
  "target/release/side_by_side_optim" "$python" benches/side_by_side/torch_optim.py "$places" "$rounds" "$count" $works
done
echo "load after: $(cut -d' ' -f1-3 /proc/loadavg)"
