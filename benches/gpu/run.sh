#!/usr/bin/env bash
# What is run on a machine with a GPU, and the folder that is copied there. That machine needs no Rust and no network.
#
#   benches/gpu/run.sh build   on a machine with cargo: makes benches/gpu/out, the folder to copy; with cubins if there
#                              is an NVRTC, for the architectures ARCHS (default 90)
#   run.sh tests [FILTER]      compares all kernels with the CPU, bit for bit
#   run.sh times               times beside PyTorch's
#   run.sh nccl                averages over NCCL, beside torch.distributed's
#   run.sh ncu                 bytes that a step moves for each parameter
#   run.sh sanitizer [FILTER]  the tests under compute-sanitizer
#   run.sh train               whole trainings, if train.sh --build was run before the copy
#
# Results go to GPU_BENCH_OUT, by default the folder `results` in the copied one. NVRTC and NCCL come from the packages
# of TORCH_PYTHON (default python3), or are NVRTC_LIBRARY and COLLECTIVE_NCCL_LIB. CUDA_TEST_DEVICE (default 0) is the
# GPU of the tests.
set -euo pipefail
here=$(dirname "$(realpath "$0")")
python=${TORCH_PYTHON:-python3}

# Sets a variable, unless it is set, to the first of these files in Python's packages.
in_packages() {
  local variable=$1 found
  [ -z "${!variable:-}" ] && command -v "$python" >/dev/null || return 0
  found=$("$python" - "${@:2}" <<'END'
import glob, site, sys
folders = site.getsitepackages() + [site.getusersitepackages()]
print(next((p for n in sys.argv[1:] for f in folders for p in glob.glob(f"{f}/nvidia/{n}")), ""))
END
  )
  [ -z "$found" ] || export "$variable=$found"
}

build() {
  cd "$here"
  rm -rf out/cubin out/tests-*
  mkdir -p out
  local crate tests
  for crate in amp fused-optim; do
    tests=$(cargo test -p "$crate" --features cuda --lib --no-run --message-format=json |
      grep -o '"executable":"[^"]*"' | cut -d '"' -f 4)
    strip -o "out/tests-$crate" "$tests"
  done
  cargo build --release -p gpu-bench --features cuda
  strip -o out/libgpu_bench.so ../../target/release/libgpu_bench.so
  cp run.sh train.sh times.py nccl.py out/
  # The older one, whose code every driver loads.
  in_packages NVRTC_LIBRARY cuda_nvrtc/lib/libnvrtc.so.12 cu13/lib/libnvrtc.so.13
  if [ -n "${NVRTC_LIBRARY:-}" ]; then
    for tests in out/tests-*; do CUBIN_CACHE=$here/out/cubin "$tests" --ignored fill_the_cache; done
  else
    echo "no NVRTC (pip install nvidia-cuda-nvrtc-cu12): the machine with the GPU needs one" >&2
  fi
  du -sh --exclude=results out
}

# Finds the copied folder, where results go, and libraries.
prepare() {
  results=$(realpath -m "${GPU_BENCH_OUT:-results}")
  [ -e "$here/libgpu_bench.so" ] || here=$here/out
  cd "$here" && [ -e libgpu_bench.so ] || { echo "run benches/gpu/run.sh build first" >&2; exit 1; }
  [ -n "${GPU_BENCH_OUT:-}" ] || results=$here/results
  mkdir -p "$results"
  export GPU_BENCH_OUT=$results CUBIN_CACHE=${CUBIN_CACHE-$here/cubin}
  local compilers=(cu13/lib/libnvrtc.so.13 cuda_nvrtc/lib/libnvrtc.so.12)
  # A driver rejects the code of a newer compiler.
  ! nvidia-smi 2>/dev/null | grep -q "CUDA Version: 12" || compilers=("${compilers[1]}" "${compilers[0]}")
  in_packages NVRTC_LIBRARY "${compilers[@]}"
  in_packages COLLECTIVE_NCCL_LIB nccl/lib/libnccl.so.2
}

# Runs both crates' tests, by the command that follows the filter.
tests() {
  local crate failed=0
  export CUDA_TEST_DEVICE=${CUDA_TEST_DEVICE:-0}
  for crate in amp fused-optim; do
    "${@:3}" "./tests-$crate" "${2:-cuda::}" --skip on_the_shim 2>&1 | tee "$results/$1-$crate.txt" || failed=1
  done
  return "$failed"
}

script() { "$@" --library "$here/libgpu_bench.so" --out "$results"; }

ncu() {
  script command ncu --csv --print-units base --clock-control none --kernel-name step \
    --metrics dram__bytes_read.sum,dram__bytes_write.sum "$python" times.py --step > "$results/ncu.csv"
  # A row begins with the launch's number and ends with bytes; the last launch counts.
  awk -F '","' '/^"[0-9]/ { gsub(/[",]/, "", $NF); if ($1 != id) { id = $1; bytes = 0 } bytes += $NF }
    END { printf "step of AdamW: %.2f bytes per parameter\n", bytes / 1e8 }' "$results/ncu.csv" | tee "$results/ncu.txt"
}

case ${1:-} in
  build) build ;;
  tests) prepare && tests tests "${2:-}" ;;
  times) prepare && script "$python" times.py ;;
  nccl) prepare && script "$python" nccl.py ;;
  ncu) prepare && ncu ;;
  sanitizer) prepare && tests sanitizer "${2:-}" compute-sanitizer --error-exitcode 9 --padding 256 ;;
  train) prepare && ./train.sh ;;
  *) sed -n '2,/^set/{ /^#/p }' "$0" >&2; exit 2 ;;
esac
