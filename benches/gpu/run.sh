#!/usr/bin/env bash
# Checks correctness and times on a GPU, in under nine minutes. With cargo it first builds the library into
# benches/gpu/out; without, the library must have been copied there. PyTorch must be installed; NVRTC and NCCL
# are found in its packages.
#   benches/gpu/run.sh              all parts; writes benches/record/gpu-DATE.json
#   benches/gpu/run.sh --dry        only the parts that need neither a GPU nor PyTorch
#   benches/gpu/run.sh --rehearse   all parts on a fake GPU, with PyTorch on the CPU: needs g++
#   benches/gpu/run.sh --build      only builds the files to copy: the library, and cubins (ARCHS, default 90)
# train.sh, which is built separately, runs a whole training; this script runs it if it was built. Results go to
# benches/gpu/out, or GPU_BENCH_OUT.
set -euo pipefail
cd "$(dirname "$0")"
command="benches/gpu/run.sh $*"
python=${TORCH_PYTHON:-python3}
command -v "$python" >/dev/null || { echo "$python not found: set TORCH_PYTHON to a Python with PyTorch" >&2; exit 1; }

# The given library, or the one that was built or copied.
library=${GPU_BENCH_LIBRARY:-$PWD/out/libgpu_bench.so}
if [ -z "${GPU_BENCH_LIBRARY:-}" ] && command -v cargo >/dev/null; then
  cargo build --release -p gpu-bench --features cuda ||
    { echo "GPU_BENCH_LIBRARY: no such file; set it to the path of libgpu_bench.so" >&2; exit 1; }
  mkdir -p out
  # Without debug information, which would be most of the file.
  strip -o "$library" ../../target/release/libgpu_bench.so
fi
[ -e "$library" ] || { echo "neither cargo nor benches/gpu/out/libgpu_bench.so found: run --build elsewhere and copy out/" >&2; exit 1; }
out=${GPU_BENCH_OUT:-$PWD/out}
if ! mkdir -p "$out" 2>/dev/null || [ ! -w "$out" ]; then
  echo -n "cannot write to $out: " >&2
  out=$(mktemp -d)
  # With a folder for cubins, too.
  [ ! -e out/cubin ] || cp -r out/cubin "$out"
  CUBIN_CACHE=${CUBIN_CACHE:-$out/cubin}
  echo "results go to $out" >&2
fi
export GPU_BENCH_OUT=$out CUBIN_CACHE="${CUBIN_CACHE:-$PWD/out/cubin}"

# Prints the first of these files in Python's packages.
in_packages() {
  "$python" - "$@" <<'END'
import glob, site, sys
folders = site.getsitepackages() + [site.getusersitepackages()]
print(next((p for n in sys.argv[1:] for f in folders for p in glob.glob(f"{f}/nvidia/{n}")), ""))
END
}
if [ -z "${NVRTC_LIBRARY:-}" ]; then
  compilers=(cu13/lib/libnvrtc.so.13 cuda_nvrtc/lib/libnvrtc.so.12)
  # A driver rejects the code of a newer compiler.
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
    echo "no NVRTC in Python's packages (pip install nvidia-cuda-nvrtc): it is needed on the GPU machine" >&2
    exit
  fi
  # Remove cubins of other versions, which are useless.
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

# Each part has its own time limit, and its failure does not affect the others; together they have 520 seconds.
end=$((SECONDS + 520))
limit() { local left=$((end - SECONDS)); echo $(($1 < left ? $1 : left > 1 ? left : 1)); }
rm -f "$out"/rows*.json "$out"/ncu.csv
failed=0
timeout -k 5 "$(limit 300)" "$python" bench.py --library "$library" --out "$out" "$@" || failed=1

# Writes the row of a tool: its name and exit status.
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
