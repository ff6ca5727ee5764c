#!/usr/bin/env bash
# Trains configs/resnet_fashion.toml on a GPU by `runner` with `device = "cuda"`: eager, with `compile`, and with
# steps as one launch. Writes a row for each to rows-training.json, and the output to training-*.txt.
#   benches/gpu/train.sh --build   on a machine with cargo: makes benches/gpu/out/training, 45 MB: runner and data set.
#                                  nvcc comes from PATH or Python's packages (nvidia-cuda-{nvcc,crt,runtime,cccl}
#                                  and nvidia-nvvm) and must not be newer than the driver that loads its PTX
#   run.sh train                   trains
set -euo pipefail
cd "$(dirname "$0")"
[ -e training ] || [ "${1:-}" = --build ] || cd out
out=${GPU_BENCH_OUT:-$PWD/results}
python=${TORCH_PYTHON:-python3}
budget=${TRAINING_SECONDS:-15}

# Prints the folders with these names in Python's packages.
in_packages() {
  "$python" - "$@" <<'END'
import glob, site, sys
folders = site.getsitepackages() + [site.getusersitepackages()]
print("\n".join(p for n in sys.argv[1:] for f in folders for p in glob.glob(f"{f}/nvidia/{n}")))
END
}

# Stub libraries for linking, with every function that cudarc declares.
stubs() {
  local sources name folder version
  sources=$(cargo metadata --format-version 1 --manifest-path ../../Cargo.toml |
    grep -oE '"manifest_path":"[^"]*/cudarc-[^"/]*/Cargo.toml"' | head -n 1 | cut -d '"' -f 4)
  sources=$(dirname "$sources")/src
  mkdir -p "$1"
  while read -r name folder version; do
    grep -ohE 'pub unsafe fn \w+' "$sources/$folder"/sys/*.rs | sort -u |
      sed -E 's/pub unsafe fn (\w+)/void \1(void) {}/' |
      gcc -w -shared -fPIC -x c -Wl,-soname,"lib$name.so.$version" -o "$1/lib$name.so" -
  done <<END
cuda driver 1
cublas cublas $2
cublasLt cublaslt $2
curand curand 10
nvrtc nvrtc $2
END
}

build() {
  local cuda home=$PWD/../../target/train/toolkit major
  cuda=$(dirname "$(dirname "$(command -v nvcc || in_packages cu13/bin/nvcc | head -n 1)")")
  [ -x "$cuda/bin/nvcc" ] || { echo "nvcc not found: the training is not built" >&2; exit 1; }
  major=$("$cuda/bin/nvcc" --version | grep -oE 'release [0-9]+' | cut -d ' ' -f 2)
  # The parts of a CUDA toolkit that candle's build looks for.
  rm -rf "$home" && mkdir -p "$home"
  home=$(realpath "$home")
  ln -s "$cuda"/* "$home/"
  rm -f "$home/lib64"
  stubs "$home/lib64" "$major"
  ln -s "$home"/lib/libcudart.so.* "$home/lib64/libcudart.so"
  CUDA_HOME=$home CUDA_PATH=$home NVCC=$home/bin/nvcc PATH=$home/bin:$PATH LIBRARY_PATH=$home/lib64 \
    CUDA_COMPUTE_CAP=${ARCHS:-90} cargo build --release -p runner --features candle-cuda --target-dir ../../target/train
  mkdir -p out/training/fashion-mnist
  strip -o out/training/runner ../../target/train/release/runner
  gzip -f out/training/runner
  cp ../../configs/resnet_fashion.toml out/training/
  cp "${FASHION_MNIST:-/usr/share/datasets/fashion-mnist}"/*.gz out/training/fashion-mnist/
  du -sh out/training
}

# Trains with a name and more settings; a failure gives a row.
train() {
  local name=$1 text=$out/training-$1.txt data=$PWD/training/fashion-mnist ended=0
  shift
  rm -rf "$out/training-$name"
  timeout -k 5 $((budget + 15)) "${RUNNER:-$out/runner}" train training/resnet_fashion.toml \
    --work-dir "$out/training-$name" --time-budget "${budget}s" --cfg-options device=cuda \
    "train_dataloader.dataset.root=$data" "val_dataloader.dataset.root=$data" "$@" > "$text" 2>&1 || ended=$?
  # 75: the time was spent before the last epoch, and a checkpoint is saved.
  [ "$ended" != 75 ] || ended=0
  local last='s/.*accuracy: ([0-9.]+).*/\1/p' time='s/.*\(train\).* time: ([0-9.]+).*/\1/p'
  printf '{"what": "training", "case": "%s", "ended": %d, "accuracy": %s, "seconds_a_step": %s}' "$name" "$ended" \
    "$(sed -nE "$last" "$text" | tail -n 1 | grep . || echo null)" \
    "$(sed -nE "$time" "$text" | sort -g | awk '{ t[NR] = $1 } END { print NR ? t[int((NR + 1) / 2)] : "null" }')"
  return "$ended"
}

if [ "${1:-}" = --build ]; then
  build
  exit
fi
[ -n "${RUNNER:-}" ] || { gunzip -c training/runner.gz > "$out/runner" && chmod +x "$out/runner"; }
# cuBLAS, cuRAND and the CUDA runtime come from PyTorch's packages.
folders=$(in_packages cu13/lib cublas/lib curand/lib cuda_runtime/lib | paste -sd :)
export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:-}${folders:+:$folders}"
failed=0
eager=$(train eager) || failed=1
compiled=$(train compiled compile.mode=max-autotune-no-cudagraphs) || failed=1
# If a step cannot be captured, the run continues without, and training-graph.txt says why.
graph=$(train graph compile.mode=max-autotune) || failed=1
printf '[%s,\n %s,\n %s]\n' "$eager" "$compiled" "$graph" | tee "$out/rows-training.json"
exit "$failed"
