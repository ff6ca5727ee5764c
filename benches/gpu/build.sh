#!/usr/bin/env bash
# Makes what a machine with a GPU needs to run this folder's checks and times: benches/gpu/out, and
# all of it as one archive, benches/gpu/out.tar.xz. Needs cargo.
#
#   benches/gpu/build.sh
#
# Everything with candle needs NVIDIA's nvcc, from PATH or Python's packages:
#   pip install nvidia-cuda-nvcc==13.0.* nvidia-cuda-crt==13.0.* nvidia-nvvm==13.0.* \
#     nvidia-cuda-runtime==13.0.* nvidia-cuda-cccl==13.0.*
# nvcc must not be newer than the driver that loads its code. With an NVRTC (pip install
# nvidia-cuda-nvrtc-cu12, or NVRTC_LIBRARY) all of our kernels are compiled here, for the
# architectures ARCHS (default 90).
#
# CUDA_HOME set: that toolkit, for example the fake GPU's, whose binaries then run on the fake.
# PROFILE: cargo's, by default `release`. FEATURES: cargo's for all with candle, PACKAGES: cargo's
# choice of the rest. FASHION_MNIST: the folder of the data set.
set -euo pipefail
here=$(dirname "$(realpath "$0")")
root=$here/../..
out=$here/out
profile=${PROFILE:-release}
# Without gloo, whose library a bare machine does not have.
features=${FEATURES:-runner/cuda,candle-cuda/cuda}
# shellcheck disable=SC2206
packages=(${PACKAGES:--p gradstack-amp -p gradstack-fused-optim -p gpu-bench -p benches -p gradstack-launch
  --features gradstack-amp/cuda,gradstack-fused-optim/cuda,gpu-bench/cuda})
python=${TORCH_PYTHON:-python3}
export ARCHS=${ARCHS:-90}
data=${FASHION_MNIST:-/usr/share/datasets/fashion-mnist}

# Prints the first of these files in Python's packages of NVIDIA.
in_packages() {
  "$python" - "$@" <<'END'
import glob, site, sys
folders = site.getsitepackages() + [site.getusersitepackages()]
print(next((p for n in sys.argv[1:] for f in folders for p in glob.glob(f"{f}/nvidia/{n}")), ""))
END
}

# Stub libraries for linking, with every function that cudarc declares.
stubs() {
  local sources name folder version
  sources=$(cargo metadata --format-version 1 --manifest-path "$root/Cargo.toml" |
    grep -oE '"manifest_path":"[^"]*/cudarc-[^"/]*/Cargo.toml"' | head -n 1 | cut -d '"' -f 4)
  sources=$(dirname "$sources")/src
  mkdir -p "$1"
  while read -r name folder version; do
    grep -ohE 'pub unsafe fn \w+' "$sources/$folder"/sys/*.rs | sort -u |
      sed -E 's/pub unsafe fn (\w+)/void \1(void) {}/' |
      gcc -w -shared -fPIC -x c -Wl,-soname,"lib$name.so.$version" -o "$1/lib$name.so.$version" -
    ln -sf "lib$name.so.$version" "$1/lib$name.so"
  done <<END
cuda driver 1
cublas cublas $2
cublasLt cublaslt $2
curand curand 10
nvrtc nvrtc $2
END
}

# Exports the parts of a CUDA toolkit that candle's build looks for; fails without nvcc.
toolkit() {
  [ -z "${CUDA_HOME:-}" ] || return 0
  local cuda home major
  cuda=$(dirname "$(dirname "$(command -v nvcc || in_packages cu13/bin/nvcc)")")
  [ -x "$cuda/bin/nvcc" ] || return 1
  major=$("$cuda/bin/nvcc" --version | grep -oE 'release [0-9]+' | cut -d ' ' -f 2)
  mkdir -p "$root/target/train"
  home=$(realpath "$root/target/train")/toolkit
  rm -rf "$home" && mkdir -p "$home"
  ln -s "$cuda"/* "$home/"
  rm -f "$home/lib64"
  stubs "$home/lib64" "$major"
  ln -s "$home"/lib/libcudart.so.* "$home/lib64/"
  ln -sf "$(cd "$home/lib64" && ls libcudart.so.* | head -n 1)" "$home/lib64/libcudart.so"
  export CUDA_HOME=$home CUDA_PATH=$home NVCC=$home/bin/nvcc PATH=$home/bin:$PATH LIBRARY_PATH=$home/lib64
  # Of the first one, candle's code; a driver compiles it for later ones.
  export CUDA_COMPUTE_CAP=${ARCHS%% *} CARGO_TARGET_DIR=$root/target/train
}

# Copies the executables that cargo reports for these names, stripped.
take() {
  local path name
  while read -r path; do
    name=$(basename "$path" | sed -E 's/-[0-9a-f]{16}$//')
    for wanted in "$@"; do
      [ "$name" != "${wanted%%=*}" ] || strip -o "$out/${wanted##*=}" "$path"
    done
  done
}
executables() { grep -oE '"executable":"[^"]*"' | cut -d '"' -f 4; }

target=$(cargo metadata --no-deps --format-version 1 --manifest-path "$root/Cargo.toml" |
  grep -oE '"target_directory":"[^"]*"' | cut -d '"' -f 4)
rm -rf "$out" && mkdir -p "$out/models"
cd "$root"
# These need no toolkit. A change of CUDA_HOME would make cargo build cudarc, and all crates above
# it, again.
env -u CUDA_HOME cargo test --profile "$profile" "${packages[@]}" --lib --no-run --message-format=json |
  executables | take amp=tests-amp fused_optim=tests-fused-optim
env -u CUDA_HOME cargo build --profile "$profile" "${packages[@]}" \
  --lib --bin side_by_side --bin launch --message-format=json | executables | take side_by_side launch
folder=$target/$([ "$profile" = dev ] && echo debug || echo "$profile")
strip -o "$out/libgpu_bench.so" "$folder/libgpu_bench.so"

if toolkit; then
  devices=(--profile "$profile" -p gradstack-cuda-rt -p gradstack-candle-ops -p candle-cuda
    -p tests --features "$features" --no-run)
  cargo test "${devices[@]}" --lib --message-format=json | executables | take candle_ops=tests-candle-ops
  cargo test "${devices[@]}" -p gradstack-runner --test cuda --message-format=json | executables |
    take cuda=tests-runner runner=runner
  # Only training is timed.
  sed '/^\[val_/,/^$/d' configs/resnet_fashion.toml > "$out/models/resnet_fashion.toml"
  cp "$here"/{resnet18,resnet50,transformer,gpt2}.toml "$out/models/"
  # Half of the training images, which is enough for a minute.
  "$python" - "$data" "$out/fashion-mnist" <<'END'
import gzip, os, struct, sys
source, target = sys.argv[1:]
os.makedirs(target)
for name in sorted(os.listdir(source)):
    if not name.endswith(".gz"):
        continue
    data = gzip.open(os.path.join(source, name)).read()
    count = struct.unpack(">I", data[4:8])[0]
    size = (len(data) - (16 if "images" in name else 8)) // count
    if name.startswith("train"):
        head = 16 if "images" in name else 8
        count //= 2
        data = data[:4] + struct.pack(">I", count) + data[8:head + count * size]
    with open(os.path.join(target, name[:-3]), "wb") as file:
        file.write(data)
END
else
  echo "no nvcc: without the operators' and the runner's tests, and without training steps" >&2
fi

cp "$here"/{run.sh,times.py,nccl.py,torch_train.py,summary.py} "$here/../side_by_side/torch_gloo.py" "$out/"
# The older one, whose code every driver loads.
[ -n "${NVRTC_LIBRARY:-}" ] || NVRTC_LIBRARY=$(in_packages cuda_nvrtc/lib/libnvrtc.so.12 cu13/lib/libnvrtc.so.13)
if [ -n "$NVRTC_LIBRARY" ]; then
  export NVRTC_LIBRARY
  for tests in "$out"/tests-*; do
    [ "$tests" = "$out/tests-runner" ] || LD_LIBRARY_PATH=${CUDA_HOME:+$CUDA_HOME/lib64} \
      CUBIN_CACHE=$out/cubin "$tests" --ignored fill_the_cache
  done
else
  echo "no NVRTC (pip install nvidia-cuda-nvrtc-cu12): the machine with the GPU needs one" >&2
fi
# The binaries share most of their code: one stream with a dictionary larger than all of them.
tar -C "$here" -c out | ${COMPRESS:-xz -T1 -6 --lzma2=preset=6,dict=192MiB} > "$out.tar.xz"
du -sh "$out" "$out.tar.xz"
