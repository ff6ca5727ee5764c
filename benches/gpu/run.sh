#!/usr/bin/env bash
# Correctness and times on a GPU, in under nine minutes. Where there is cargo the library is built into
# benches/gpu/out first; where there is none, and no network, it was carried there. PyTorch must be
# installed; NVRTC is found among its packages.
#   benches/gpu/run.sh           all
#   benches/gpu/run.sh --dry     what goes without a GPU and without PyTorch
set -euo pipefail
cd "$(dirname "$0")"

library=out/libgpu_bench.so
if command -v cargo >/dev/null; then
  cargo build --release -p gpu-bench --features cuda
  mkdir -p out
  cp ../../target/release/libgpu_bench.so "$library"
fi
[ -e "$library" ] || { echo "no cargo, and no benches/gpu/$library: build it elsewhere" >&2; exit 1; }
export CUBIN_CACHE="${CUBIN_CACHE:-$PWD/out/cubin}"
if [ -z "${NVRTC_LIBRARY:-}" ]; then
  found=$(python3 - <<'END'
import glob, site
folders = site.getsitepackages() + [site.getusersitepackages()]
names = ("cu13/lib/libnvrtc.so.13", "cuda_nvrtc/lib/libnvrtc.so.12")
print(next((p for n in names for f in folders for p in glob.glob(f"{f}/nvidia/{n}")), ""))
END
  )
  [ -z "$found" ] || export NVRTC_LIBRARY="$found"
fi
timeout 530 python3 bench.py --library "$PWD/$library" "$@"
