#!/usr/bin/env bash
# Correctness and times on a GPU, in under nine minutes. Where there is cargo the library is built into
# benches/gpu/out first; where there is none, and no network, it was carried there. PyTorch must be
# installed; NVRTC and NCCL are found among its packages.
#   benches/gpu/run.sh           all; what was found is in benches/record/gpu-DATE.json
#   benches/gpu/run.sh --dry     what goes without a GPU and without PyTorch
set -euo pipefail
cd "$(dirname "$0")"
command="benches/gpu/run.sh $*"

library=$PWD/out/libgpu_bench.so
if command -v cargo >/dev/null; then
  cargo build --release -p gpu-bench --features cuda
  mkdir -p out
  cp ../../target/release/libgpu_bench.so "$library"
fi
[ -e "$library" ] || { echo "no cargo, and no benches/gpu/out/libgpu_bench.so: build it elsewhere" >&2; exit 1; }
export CUBIN_CACHE="${CUBIN_CACHE:-$PWD/out/cubin}"

# The first of some files among Python's packages.
in_packages() {
  python3 - "$@" <<'END'
import glob, site, sys
folders = site.getsitepackages() + [site.getusersitepackages()]
print(next((p for n in sys.argv[1:] for f in folders for p in glob.glob(f"{f}/nvidia/{n}")), ""))
END
}
if [ -z "${NVRTC_LIBRARY:-}" ]; then
  found=$(in_packages cu13/lib/libnvrtc.so.13 cuda_nvrtc/lib/libnvrtc.so.12)
  [ -z "$found" ] || export NVRTC_LIBRARY="$found"
fi
if [ -z "${COLLECTIVE_NCCL_LIB:-}" ]; then
  found=$(in_packages nccl/lib/libnccl.so.2)
  [ -z "$found" ] || export COLLECTIVE_NCCL_LIB="$found"
fi

bench() { python3 bench.py --library "$library" "$@"; }
if [ "${1:-}" = --dry ]; then
  bench --dry
  exit
fi

# Each part has a limit of its own, and its failure takes no other with it: 400 + 60 + 60 seconds.
rm -f out/rows*.json out/ncu.csv
failed=0
timeout -k 5 400 python3 bench.py --library "$library" "$@" || failed=1

# Row of a tool: what, and how it ended.
row() { printf '[{"what": "%s", "ended": "%s"}]\n' "$1" "$2" > "out/rows-$1.json"; }
if command -v compute-sanitizer >/dev/null; then
  if timeout -k 5 60 compute-sanitizer --error-exitcode 9 python3 bench.py --library "$library" --small \
      > out/sanitizer.txt 2>&1; then row sanitizer clean; else row sanitizer "status $?"; failed=1; fi
else
  row sanitizer "no compute-sanitizer here"
fi
if command -v ncu >/dev/null; then
  timeout -k 5 60 ncu --csv --clock-control none --kernel-name step \
    --metrics dram__bytes_read.sum,dram__bytes_write.sum \
    python3 bench.py --library "$library" --step > out/ncu.csv 2>&1 || true
  bench --traffic out/ncu.csv || row traffic "ncu does not answer"
else
  row traffic "no ncu here"
fi
bench --record --command "$command"
exit "$failed"
