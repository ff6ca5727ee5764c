#!/usr/bin/env bash
# Checks and times on a machine with a GPU, in the folder that build.sh has made. That machine needs
# no Rust and no network; Python with PyTorch for all but `tests` and `sanitizer`.
#
#   ./run.sh all [FILTER]      everything below, the most telling first, in SECONDS_IN_ALL (575);
#                              ends with a table and one archive, results.tar.gz
#   ./run.sh tests [FILTER]    compares all kernels with the CPU
#   ./run.sh steps             whole training steps beside PyTorch's
#   ./run.sh times             optimizers and casts beside PyTorch's
#   ./run.sh nccl              averages over NCCL, beside torch.distributed's
#   ./run.sh ncu               the bytes that a step moves for each parameter, and the kernels of
#                              whole steps
#   ./run.sh sanitizer [FILTER]  the tests under compute-sanitizer
#   ./run.sh two               two GPUs, in SECONDS_IN_ALL (180): averages, bits, weights, times,
#                              failures
#   ./run.sh cpu               all-reduce on the CPU beside PyTorch's gloo; needs no GPU. `all` has
#                              it only with RANKS
#
# Results go to GPU_BENCH_OUT, by default the folder `results`. NVRTC and NCCL come from the
# packages of TORCH_PYTHON (default python3), or are NVRTC_LIBRARY and COLLECTIVE_NCCL_LIB.
# CUDA_TEST_DEVICE (default 0) is the GPU of the tests. STEP_SECONDS (default 4): of timed steps for
# each row. MODELS: some of resnet_fashion, resnet18, resnet50, transformer, gpt2. TWO_STEPS (30):
# of each training of `two`. TRAIN_OPTIONS: further options of our steps' configurations.
# TORCH_HOW: PyTorch's ways to run them, by default those of `ways` below. RANKS: how many the CPU's
# all-reduce has, by default those of 2, 4, 8 and 16 that have a core each. PATIENCE: factor of the
# limits, for a slow machine.
set -euo pipefail
cd "$(dirname "$(realpath "$0")")"
[ -e libgpu_bench.so ] || cd out 2>/dev/null || { echo "run build.sh first" >&2; exit 1; }
kit=$PWD
python=${TORCH_PYTHON:-python3}
limit=${SECONDS_IN_ALL:-575}
budget=${STEP_SECONDS:-4}
two_steps=${TWO_STEPS:-30}
models=${MODELS:-transformer gpt2 resnet18 resnet50 resnet_fashion}
if [ "${1:-}" = two ]; then
  limit=${SECONDS_IN_ALL:-180}
  models=${MODELS:-resnet_fashion transformer gpt2}
fi

# Prints these files or folders in Python's packages of NVIDIA.
in_packages() {
  command -v "$python" >/dev/null || return 0
  "$python" - "$@" <<'END'
import glob, site, sys
folders = site.getsitepackages() + [site.getusersitepackages()]
print("\n".join(p for n in sys.argv[1:] for f in folders for p in glob.glob(f"{f}/nvidia/{n}")))
END
}
# Sets a variable, unless it is set, to the first of these files.
default_to() {
  local found
  [ -z "${!1:-}" ] || return 0
  found=$(in_packages "${@:2}" | head -n 1)
  [ -z "$found" ] || export "$1=$found"
}

results=$(realpath -m "${GPU_BENCH_OUT:-results}")
mkdir -p "$results"
export GPU_BENCH_OUT=$results CUBIN_CACHE=${CUBIN_CACHE-$kit/cubin} CUDA_TEST_DEVICE=${CUDA_TEST_DEVICE:-0}
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$results/inductor}
compilers=(cu13/lib/libnvrtc.so.13 cuda_nvrtc/lib/libnvrtc.so.12)
# A driver rejects the code of a newer compiler.
! nvidia-smi 2>/dev/null | grep -q "CUDA Version: 12" || compilers=("${compilers[1]}" "${compilers[0]}")
default_to NVRTC_LIBRARY "${compilers[@]}"
default_to COLLECTIVE_NCCL_LIB nccl/lib/libnccl.so.2 cu13/lib/libnccl.so.2
# What is linked with candle's CUDA needs cuBLAS, cuRAND and the runtime.
libraries=$(in_packages cu13/lib cublas/lib curand/lib cuda_runtime/lib cudnn/lib | paste -sd :)
export LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$libraries
# Packed by build.sh as they are: the archive is smaller.
[ ! -e fashion-mnist/train-images-idx3-ubyte ] || gzip -f1 fashion-mnist/*-ubyte

# Ends where nothing could run: without the libraries that the binaries are linked with.
check_libraries() {
  local missing
  missing=$(ldd tests-* runner 2>/dev/null | sed -nE 's/^\s*(\S+) => not found/\1/p' | sort -u | paste -sd ' ') || true
  [ -z "$missing" ] || {
    echo "not found: $missing. libcuda.so.1 comes with NVIDIA's driver, the others with PyTorch for that version of" \
      "CUDA (set TORCH_PYTHON to its Python) or CUDA (set LD_LIBRARY_PATH); cuRAND also by pip install" \
      "nvidia-curand" >&2
    exit 1
  }
}
left() { [ "$SECONDS" -lt $((limit - $1)) ]; }
say() { printf '[%4d s] %s\n' "$SECONDS" "$*" | tee -a "$results/progress.txt"; }
# NAME SECONDS COMMAND...: runs with a limit if there is time, and says how it ended.
job() {
  local name=$1 most=$(($2 * ${PATIENCE:-1})) since=$SECONDS ended=0
  shift 2
  left 8 || { say "$name: no time left"; return 0; }
  timeout -k 5 $((most < limit - SECONDS ? most : limit - SECONDS)) "$@" > "$results/$name.txt" 2>&1 || ended=$?
  say "$name: ended with $ended after $((SECONDS - since)) s"
  return "$ended"
}

# NAME FILTER SECONDS COMMAND...: the test binaries, side by side.
test_all() {
  local name=$1 filter=$2 most=$3 failed=0 tests which pids=()
  shift 3
  for tests in tests-*; do
    which=("${filter:-cuda::}")
    [ "$tests" != tests-runner ] || which=(${filter:+"$filter"})
    job "$name-${tests#tests-}" "$most" "$@" "./$tests" "${which[@]}" --skip on_the_shim \
      --skip machine_code &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid" || failed=1; done
  return "$failed"
}

# One of the scripts as a command. Without a GPU, GPU_BENCH_DRY runs it (tests/fake_gpu/dry.py).
script() {
  command=(env SCRIPT="$1" "$python" "${GPU_BENCH_DRY:-$1.py}" "${@:2}" --library "$kit/libgpu_bench.so"
    --out "$results")
}
# Options of a model's configuration.
config() {
  local data=train_dataloader.dataset.root=$kit/fashion-mnist
  ! is_large "$1" || data=
  echo "device=cuda $data ${TRAIN_OPTIONS:-}"
}
# Models on made-up data, of which a GPU's memory does not hold many at a time.
is_large() { [[ $1 = gpt2 || $1 = resnet50 ]]; }
# Our ways to run a model: eager, without kernels for attention and convolutions, a large one may
# not fit.
hows() { is_large "$1" && echo graph compiled || echo graph compiled eager; }
how() {
  case $1 in
    eager) ;;
    compiled) echo compile.mode=max-autotune-no-cudagraphs ;;
    graph) echo compile.mode=max-autotune ;;
  esac
}
# MODEL HOW SECONDS PREFIX: trains for so long.
train() {
  local ended=0
  rm -rf "$results/work-$4$1-$2"
  # shellcheck disable=SC2046
  job "$4$1-$2" $(($3 + 40)) ./runner train "models/$1.toml" --work-dir "$results/work-$4$1-$2" --time-budget "$3s" \
    --cfg-options $(config "$1") $(how "$2") || ended=$?
  # 75: the time was spent before the last epoch, and a checkpoint is saved.
  [ "$ended" = 75 ] || return "$ended"
}
ours() {
  local ended=0
  train "$1" "$2" "$budget" ours- || ended=$?
  printf '{"what": "step", "model": "%s", "who": "ours", "how": "%s", "ms": %s, "ended": %d}\n' \
    "$1" "$2" "$(median_ms "$results/ours-$1-$2.txt")" "$ended" | tee -a "$results/steps.jsonl"
  return "$ended"
}
# The median of a training's times for a step, in ms; `null` without one.
median_ms() {
  # The first line has the first step in it, which compiles.
  sed -nE 's/.*\(train\).* time: ([0-9.]+).*/\1/p' "$1" | sed '1{$!d}' | sort -g |
    awk '{ t[NR] = $1 } END { print NR ? 1000 * t[int((NR + 1) / 2)] : "null" }'
}
theirs() {
  job "torch-$1-$2" $((budget + 60)) "$python" torch_train.py "$1" "$2" --seconds "$budget" --out "$results/steps.jsonl"
}
# PyTorch's ways to run a model, channels-last where that is faster.
ways() {
  case $1 in
    transformer | gpt2) echo "${TORCH_HOW:-inductor graphs inductor-flash inductor-deterministic eager}" ;;
    resnet50) echo "${TORCH_HOW:-inductor-nhwc graphs-nhwc eager-nhwc}" ;;
    *) echo "${TORCH_HOW:-inductor-nhwc graphs-nhwc eager-nhwc eager}" ;;
  esac
}
# Compiles kernels and fills caches, so that timed runs find them.
warm() {
  local model way
  for model in $models; do
    train "$model" graph 1 warm- &
    is_large "$model" || train "$model" eager 1 warm- &
    for way in $(ways "$model"); do
      # Attention is no kernel of inductor's: with another one it finds the same code.
      [[ $way = eager* || $way = *-flash ]] ||
        job "warm-torch-$model-$way" 150 "$python" torch_train.py "$model" "$way" --seconds 1 &
    done
    ! is_large "$model" || wait
  done
  wait
}
steps() {
  local model failed=0
  for model in $models; do
    for how in $(hows "$model"); do ours "$model" "$how" || failed=1; done
    for how in $(ways "$model"); do theirs "$model" "$how" || failed=1; done
  done
  return "$failed"
}

ncu_of_a_step() {
  script times --step
  ncu --csv --print-units base --clock-control none --kernel-name step \
    --metrics dram__bytes_read.sum,dram__bytes_write.sum "${command[@]}" > "$results/ncu.csv"
  # A row begins with the launch's number and ends with bytes; the last launch counts.
  awk -F '","' '/^"[0-9]/ { gsub(/[",]/, "", $NF); if ($1 != id) { id = $1; bytes = 0 } bytes += $NF }
    END { printf "step of AdamW: %.2f bytes per parameter\n", bytes / 1e8 }' "$results/ncu.csv" | tee "$results/ncu.txt"
}
ncu_of_models() {
  local model
  for model in resnet18 transformer resnet50; do
    [ -e runner ] && left 60 || continue
    # shellcheck disable=SC2046
    job "kernels-$model" 60 ncu --csv --clock-control none --metrics gpu__time_duration.sum --launch-skip 9000 \
      --launch-count 1500 --kill yes ./runner train "models/$model.toml" --work-dir "$results/work-ncu-$model" \
      --time-budget 40s --cfg-options $(config "$model") $(how compiled) || true
    grep -a '^"' "$results/kernels-$model.txt" > "$results/kernels-$model.csv" || true
  done
}

# WORLD: ours and gloo, as ranks of our launcher. Lines of "NAME WORLD BYTES BEST MEDIAN", in
# microseconds.
all_reduce() {
  local size ranks=(timeout -k 5 $((60 * ${PATIENCE:-1})) ./launch --nproc-per-node "$1" --no-python)
  for size in 4:2000 1024:2000 65536:400 1048576:40 16777216:4; do
    "${ranks[@]}" ./side_by_side all_reduce ours "$1" "${size%:*}" "${size#*:}" 9 shm own || return 1
  done
  GLOO_SOCKET_IFNAME=lo "${ranks[@]}" "$python" torch_gloo.py gloo "$1" 9 4:200 1024:200 65536:40 1048576:4 16777216:1
}
cpu() {
  local world round failed=0 ended
  rm -f "$results/cpu.txt"
  # In turn: what else the machine does hits all.
  for round in 1 2 3; do
    for world in ${RANKS:-2 4 8 16}; do
      [ -n "${RANKS:-}" ] || [ "$world" -le "$(nproc)" ] || continue
      left 30 || { say "cpu: no time left"; return "$failed"; }
      ended=0
      all_reduce "$world" >> "$results/cpu.txt" 2>&1 || ended=$?
      [ "$ended" = 0 ] || failed=1
      say "all-reduce on the CPU, round $round, $world ranks: ended with $ended"
    done
  done
  return "$failed"
}

# MODEL HOW NAME RANKS BATCH: trains TWO_STEPS steps, with checkpoints of the first and the last.
two_train() {
  local work=$results/work-two-$1-$2-$3
  rm -rf "$work"
  # shellcheck disable=SC2046
  job "two-$1-$2-$3" 60 ./launch --nproc-per-node "$4" --no-python ./runner train "models/$1.toml" --work-dir "$work" \
    --cfg-options $(config "$1") compile.mode="$2" train_dataloader.batch_size="$5" \
    "train_cfg={by_epoch=false,max_iters=$two_steps}" default_hooks.logger.interval=$((two_steps / 6 + 1)) \
    "default_hooks.checkpoint={by_epoch=false,interval=1000000,save_begin=1,save_optimizer=false}"
}
# Prints how far the weights of two ranks are from those of one, divided by how far one has trained
# them.
two_distance() {
  "$python" - "$1-one/iter_1" "$1-one/iter_$two_steps" "$1-first/iter_$two_steps" <<'END'
import struct, sys, torch

def weights(checkpoint):
    with open(f"{checkpoint}/model.safetensors", "rb") as file:
        head = struct.unpack("<Q", file.read(8))[0]
        return torch.frombuffer(bytearray(file.read()[head:]), dtype=torch.float32)

start, one, two = map(weights, sys.argv[1:])
print(f"{float((two - one).norm() / (one - start).norm()):.3f}")
END
}
# One rank, and twice two ranks with the same samples in a step: bits, weights, times, and what
# averages.
two_compare() {
  local model=$1 how=$2 failed=0 batch name distance log=$results/two-$1-$2 work=$results/work-two-$1-$2
  left 30 || { say "$model, $how: no time left"; return 1; }
  batch=$(sed -nE 's/^batch_size = ([0-9]+).*/\1/p' "models/$model.toml" | head -n 1)
  two_train "$model" "$how" one 1 $((2 * batch)) || failed=1
  for name in first second; do two_train "$model" "$how" "$name" 2 "$batch" || failed=1; done
  cmp "$work"-{first,second}/iter_"$two_steps"/model.safetensors || { say "$model, $how: OTHER BITS"; failed=1; }
  grep -q "averaged by NCCL" "$log-first.txt" || { say "$model, $how: NOT AVERAGED BY NCCL"; failed=1; }
  say "$model, $how: $(median_ms "$log-one.txt") ms a step of one rank, $(median_ms "$log-first.txt") of two"
  distance=$(two_distance "$work") || failed=1
  say "$model, $how: weights of two ranks differ by ${distance:-?} of what one rank has trained"
  # Batch norms have other statistics, of half of the samples.
  grep -aq running_mean "$work-one/iter_1/model.safetensors" || awk -v d="${distance:-1}" 'BEGIN { exit d > 0.2 }' ||
    { say "$model, $how: OTHER WEIGHTS"; failed=1; }
  return "$failed"
}
# A rank is killed after its first steps: the other one must end by itself.
two_killed() {
  local log=$results/two-killed.txt killed
  rm -rf "$results/work-two-killed"
  # shellcheck disable=SC2016,SC2046
  job two-killed 60 ./launch --nproc-per-node 2 --no-python bash -c '
    [ "$RANK" = 0 ] || {
      until grep -q "(train)" "$0"; do sleep 0.1; done
      echo "killed at $(date +%s)"
      kill -9 $$
    } &
    exec "$@"' "$log" ./runner train models/resnet_fashion.toml --work-dir "$results/work-two-killed" \
    --time-budget 50s --cfg-options $(config resnet_fashion) $(how graph) \
    default_hooks.logger.interval="$two_steps" || true
  killed=$(sed -nE 's/.*killed at ([0-9]+)$/\1/p' "$log")
  # The launcher's words, after both have ended.
  grep "root cause: rank 1 .* killed by SIGKILL" "$log" || { say "killed: NOT ENDED BY ITSELF"; return 1; }
  say "killed: the other rank ended within $(($(date +%s) - killed)) s"
}
# Two ranks that see one GPU: an error that names both.
two_on_one() {
  local gpus=${CUDA_VISIBLE_DEVICES:-0}
  # shellcheck disable=SC2046
  job two-on-one 40 env -u NCCL_MULTI_RANK_GPU_ENABLE CUDA_VISIBLE_DEVICES="${gpus%%,*}" \
    ./launch --nproc-per-node 2 --no-python ./runner train models/resnet_fashion.toml \
    --work-dir "$results/work-two-on-one" --time-budget 2s --cfg-options $(config resnet_fashion) || true
  grep -m 1 "ranks 0 and 1 are both on the GPU" "$results/two-on-one.txt" || { say "one GPU: NO ERROR"; return 1; }
}
two() {
  local model how failed=0
  export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
  { date -u; nvidia-smi topo -m; nvidia-smi -L; df -h /dev/shm; ulimit -l; } > "$results/two-machine.txt" 2>&1 || true
  script nccl --two-gpus && job two-nccl 60 "${command[@]}" || failed=1
  for model in $models; do
    # Without tuned convolutions, whose choice differs from run to run.
    for how in default reduce-overhead; do two_compare "$model" "$how" || failed=1; done
  done
  two_killed || failed=1
  two_on_one || failed=1
  pack
  cat "$results/summary.md" "$results/progress.txt"
  return "$failed"
}

# The table and the archive of all that there is.
pack() {
  "$python" summary.py "$results" > "$results/summary.md" || true
  tar -C "$results" --exclude 'work-*' --exclude inductor -czf "$kit/results.tar.gz" .
}
all() {
  local failed=0
  {
    date -u; nvidia-smi; lscpu | head -n 20
    "$python" -c 'import torch; print(torch.__version__, torch.version.cuda)'
  } > "$results/machine.txt" 2>&1 || true
  # Side by side: both mostly compile.
  [ ! -e runner ] || warm &
  test_all tests "$1" 170 || failed=1
  wait
  pack
  [ ! -e runner ] || steps || failed=1
  pack
  for name in times nccl; do
    script "$name" && job "$name" 90 "${command[@]}" || failed=1
    pack
  done
  if command -v ncu >/dev/null; then ncu_of_a_step || failed=1; ncu_of_models; fi
  if command -v compute-sanitizer >/dev/null; then
    test_all sanitizer "$1" 120 compute-sanitizer --error-exitcode 9 --padding 256 || failed=1
  fi
  [ -z "${RANKS:-}" ] || cpu || failed=1
  pack
  cat "$results/summary.md"
  say "all in $kit/results.tar.gz"
  return "$failed"
}

case ${1:-} in all | tests | steps | ncu | sanitizer | two) check_libraries ;; esac
case ${1:-} in
  all) rm -f "$results"/{progress.txt,steps.jsonl}; all "${2:-}" ;;
  tests) test_all tests "${2:-}" 600 ;;
  steps) rm -f "$results/steps.jsonl"; warm; steps; "$python" summary.py "$results" ;;
  times | nccl) script "$1" && "${command[@]}" ;;
  ncu) ncu_of_a_step; ncu_of_models ;;
  two) rm -f "$results/progress.txt"; two ;;
  cpu) cpu || failed=1; "$python" summary.py "$results"; exit "${failed:-0}" ;;
  sanitizer) test_all sanitizer "${2:-}" 600 compute-sanitizer --error-exitcode 9 --padding 256 ;;
  *) sed -n '2,/^set/{ /^#/p }' "$0" >&2; exit 2 ;;
esac
