#!/usr/bin/env bash
# Correctness and times on a GPU, in under nine minutes. Where there is cargo the library is built into
# benches/gpu/out first; where there is none, and no network, it was carried there. PyTorch must be
# installed; NVRTC and NCCL are found among its packages.
#   benches/gpu/run.sh              all; what was found is in benches/record/gpu-DATE.json
#   benches/gpu/run.sh --dry        what goes without a GPU and without PyTorch
#   benches/gpu/run.sh --rehearse   every line on a fake GPU, beside PyTorch on the CPU: needs g++
#   benches/gpu/run.sh --build      only builds, what is carried: the library, and cubins (ARCHS, 90)
# A whole training is train.sh's, which is built apart, and is run here if it was. What is found is put into
# benches/gpu/out, or GPU_BENCH_OUT.
set -euo pipefail
cd "$(dirname "$0")"
command="benches/gpu/run.sh $*"
python=${TORCH_PYTHON:-python3}
command -v "$python" >/dev/null || { echo "no $python: TORCH_PYTHON is a Python that has PyTorch" >&2; exit 1; }

# Another build, or the one that is made or carried.
library=${GPU_BENCH_LIBRARY:-$PWD/out/libgpu_bench.so}
if [ -z "${GPU_BENCH_LIBRARY:-}" ] && command -v cargo >/dev/null; then
  cargo build --release -p gpu-bench --features cuda ||
    { echo "GPU_BENCH_LIBRARY is the path of a library that was built elsewhere" >&2; exit 1; }
  mkdir -p out
  # What is carried may be limited, and debuggers are not.
  strip -o "$library" ../../target/release/libgpu_bench.so
fi
[ -e "$library" ] || { echo "no cargo, and no benches/gpu/out/libgpu_bench.so: build it elsewhere" >&2; exit 1; }
out=${GPU_BENCH_OUT:-$PWD/out}
if ! mkdir -p "$out" 2>/dev/null || [ ! -w "$out" ]; then
  echo -n "nothing can be written to $out: " >&2
  out=$(mktemp -d)
  # Where what is compiled here can be kept, too.
  [ ! -e out/cubin ] || cp -r out/cubin "$out"
  CUBIN_CACHE=${CUBIN_CACHE:-$out/cubin}
  echo "all goes to $out" >&2
fi
export GPU_BENCH_OUT=$out CUBIN_CACHE="${CUBIN_CACHE:-$PWD/out/cubin}"

# The first of some files among Python's packages.
in_packages() {
  "$python" - "$@" <<'END'
import glob, site, sys
folders = site.getsitepackages() + [site.getusersitepackages()]
print(next((p for n in sys.argv[1:] for f in folders for p in glob.glob(f"{f}/nvidia/{n}")), ""))
END
}
if [ -z "${NVRTC_LIBRARY:-}" ]; then
  compilers=(cu13/lib/libnvrtc.so.13 cuda_nvrtc/lib/libnvrtc.so.12)
  # A driver refuses code of a compiler that is newer.
  ! nvidia-smi 2>/dev/null | grep -q "CUDA Version: 12" || compilers=("${compilers[1]}" "${compilers[0]}")
  found=$(in_packages "${compilers[@]}")
  [ -z "$found" ] || export NVRTC_LIBRARY="$found"
fi
if [ -z "${COLLECTIVE_NCCL_LIB:-}" ]; then
  found=$(in_packages nccl/lib/libnccl.so.2)
  [ -z "$found" ] || export COLLECTIVE_NCCL_LIB="$found"
fi

bench() { "$python" bench.py --library "$library" --out "$out" "$@"; }
if [ "${1:-}" = --build ]; then
  if [ -z "${NVRTC_LIBRARY:-}" ]; then
    echo "no NVRTC among Python's packages (pip install nvidia-cuda-nvrtc): it will be needed there" >&2
    exit
  fi
  # Another version's cubins are no use, and are carried.
  rm -rf "$CUBIN_CACHE"
  # shellcheck disable=SC2086
  bench --cubins ${ARCHS:-90}
  du -sh "$library" "$CUBIN_CACHE"
  exit
fi
if [ "${1:-}" = --dry ]; then
  bench --dry
  exit
fi

if [ "${1:-}" = --rehearse ]; then
  fake=$PWD/out/fake
  mkdir -p "$fake"
  g++ -std=c++17 -O1 -shared -fPIC -pthread -DKERNELS="\"$PWD/../../crates/cuda-rt/src\"" \
    -DFOLDER="\"$fake\"" -o "$fake/libcuda.so.1" tests/fake_gpu/fake.cc
  ln -sf libcuda.so.1 "$fake/libcuda.so"
  export NVRTC_LIBRARY="$fake/libcuda.so.1" COLLECTIVE_NCCL_LIB="$fake/libcuda.so.1"
  export COLLECTIVE_CUDA_LIB="$fake/libcuda.so.1" LD_LIBRARY_PATH="$fake:${LD_LIBRARY_PATH:-}"
  export CUBIN_CACHE="" FAKE_GPU_TRUSTS=1
  "$python" rehearse.py --library "$library" --out "$fake" "${@:2}"
  "$python" rehearse.py --library "$library" --out "$fake" --small
  exec "$python" rehearse.py --library "$library" --out "$fake" --step
fi

# Each part has a limit of its own, and its failure takes no other with it; all together have 520 seconds.
end=$((SECONDS + 520))
limit() { local left=$((end - SECONDS)); echo $(($1 < left ? $1 : left > 1 ? left : 1)); }
rm -f "$out"/rows*.json "$out"/ncu.csv
failed=0
timeout -k 5 "$(limit 300)" "$python" bench.py --library "$library" --out "$out" "$@" || failed=1

# Row of a tool: what, and how it ended.
row() { printf '[{"what": "%s", "ended": "%s"}]\n' "$1" "$2" | tee "$out/rows-$1.json"; }
if command -v compute-sanitizer >/dev/null; then
  if timeout -k 5 "$(limit 60)" compute-sanitizer --error-exitcode 9 "$python" bench.py --library "$library" \
      --out "$out" --small > "$out/sanitizer.txt" 2>&1; then row sanitizer clean; else row sanitizer "status $?"; failed=1; fi
else
  row sanitizer "no compute-sanitizer here"
fi
if command -v ncu >/dev/null; then
  timeout -k 5 "$(limit 60)" ncu --csv --clock-control none --kernel-name step \
    --metrics dram__bytes_read.sum,dram__bytes_write.sum \
    "$python" bench.py --library "$library" --out "$out" --step > "$out/ncu.csv" 2>&1 || true
  bench --traffic "$out/ncu.csv" || row traffic "ncu does not answer"
else
  row traffic "no ncu here"
fi
if [ -e out/runner.gz ]; then
  TRAINING_END=$(($(date +%s) + end - SECONDS)) ./train.sh || failed=1
else
  row training "no out/runner.gz: benches/gpu/train.sh --build makes it"
fi
bench --record --command "$command"
exit "$failed"
