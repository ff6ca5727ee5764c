#!/usr/bin/env bash
# Compares the time from the command to the ranks' first collective for our launcher, mpirun and
# torchrun. Installs missing packages (Debian's Open MPI; torch in a virtual environment under
# target/), builds, runs the launchers in turn, and prints a table: the median of all rounds in
# milliseconds, the interquartile range, and the ratio of our launcher's median to this one.
#
#   benches/side_by_side/launch.sh [--rounds N] [--worlds "2 4"] [--prepare]
#
# --prepare          only install and build
#
# All launchers start the same program (the example `first_collective`, which creates a group and
# all-reduces one number), torchrun without Python; `mpirun, MPI` calls MPI_Init and MPI_Allreduce.
set -euo pipefail
cd "$(dirname "$0")/../.."

rounds=20 worlds="2 4" prepare=no
while [ $# -gt 0 ]; do
  case $1 in
    --rounds) rounds=$2; shift ;;
    --worlds) worlds=$2; shift ;;
    --prepare) prepare=yes ;;
    *) echo "unknown option $1; see the head of $0" >&2; exit 2 ;;
  esac
  shift
done

work=target/side_by_side python=${TORCH_PYTHON:-target/side_by_side/venv/bin/python}
mkdir -p "$work"
if ! echo "#include <mpi.h>" | mpicc -E - >/dev/null 2>&1; then
  sudo=""; [ "$(id -u)" = 0 ] || sudo=sudo
  $sudo apt-get update -qq
  $sudo apt-get install -y -qq --no-install-recommends openmpi-bin libopenmpi-dev gcc >/dev/null
fi
if ! "$python" -c 'import torch' 2>/dev/null; then
  python3 -m venv "$work/venv"
  python=$work/venv/bin/python
  "$python" -m pip install --quiet --no-cache-dir torch numpy
fi
cargo build --quiet --release -p gradstack-launch --bin launch --example first_collective
release=${CARGO_TARGET_DIR:-target}/release
bin=$release/examples/first_collective
mpicc -O3 -o "$work/mpi_first" benches/side_by_side/mpi_first.c
[ $prepare = no ] || exit 0

mpi=(mpirun --allow-run-as-root --oversubscribe)

# asks NAME WORLD COMMAND...: prints one line with rank 0's milliseconds
asks() {
  local name=$1 world=$2 said
  shift 2
  said=$(START_NS=$(date +%s%N) "$@" 2>/dev/null) || { echo "failed: $*" >&2; return 1; }
  # Our launcher prefixes output with the rank.
  sed -n "s/^\(\[rank 0\] \)\?ms /$name\t$world\t/p" <<<"$said"
}

for _ in $(seq "$rounds"); do
  for world in $worlds; do
    asks ours "$world" "$release/launch" --nproc-per-node "$world" "$bin"
    asks "mpirun, our ranks" "$world" "${mpi[@]}" -n "$world" "$bin"
    asks "mpirun, MPI" "$world" "${mpi[@]}" -n "$world" "$work/mpi_first"
    asks torchrun "$world" "$python" -m torch.distributed.run --standalone \
      --nproc-per-node "$world" --no-python "$bin"
  done
done | sort -t "$(printf '\t')" -k2,2n -k1,1 -k3,3n | awk -F'\t' '
  { key = $2 "\t" $1; if (!(key in n)) order[++keys] = key; all[key, ++n[key]] = $3 }
  function at(key, part) { return all[key, int((n[key] - 1) * part + 1.5)] }
  END {
    print "| ranks | launcher | ms | half of the rounds | ours / it |"
    print "|---|---|---|---|---|"
    for (i = 1; i <= keys; i++) {
      key = order[i]; split(key, k, "\t")
      printf "| %d | %s | %.1f | %.1f to %.1f | %.3f |\n", k[1], k[2], at(key, 0.5), at(key, 0.25),
        at(key, 0.75), at(k[1] "\tours", 0.5) / at(key, 0.5)
    }
  }'
