#!/usr/bin/env bash
# The store of this repository and PyTorch's (libuv), side by side on this machine: one load of many
# clients for both servers in turn. Installs what is missing (torch in a virtual environment under
# target/), builds, and prints a table: milliseconds, the best of all rounds, and the ratio of ours
# to PyTorch's.
#
#   benches/side_by_side/store.sh [--rounds N] [--clients "256 1024 4096"] [--prepare]
#
# --prepare          only install and build
set -euo pipefail
cd "$(dirname "$0")/../.."

rounds=3 clients="256 1024 4096" prepare=no
while [ $# -gt 0 ]; do
  case $1 in
    --rounds) rounds=$2; shift ;;
    --clients) clients=$2; shift ;;
    --prepare) prepare=yes ;;
    *) echo "unknown option $1; see the head of $0" >&2; exit 2 ;;
  esac
  shift
done

work=target/side_by_side python=${TORCH_PYTHON:-target/side_by_side/venv/bin/python}
mkdir -p "$work"
if ! "$python" -c 'import torch' 2>/dev/null; then
  python3 -m venv "$work/venv"
  python=$work/venv/bin/python
  "$python" -m pip install --quiet --no-cache-dir torch numpy
fi
cargo build --quiet --release -p benches --bin side_by_side_store
bin=${CARGO_TARGET_DIR:-target}/release/side_by_side_store
[ $prepare = no ] || exit 0
# PyTorch's server asks for the name of every client and stands still until it has the answer. To
# compare the stores and not the name servers, it finds names in files only. Needs root.
echo "hosts: files" >"$work/nsswitch.conf"
without_names=(unshare --mount sh -c 'mount --bind "$0" /etc/nsswitch.conf && exec "$@"' "$work/nsswitch.conf")
# A descriptor for each client and some more.
ulimit -n 20000

# under NAME CLIENTS COMMAND...: loads the server that COMMAND starts
under() {
  local name=$1 count=$2 port
  shift 2
  coproc SERVER { exec "$@" 2>/dev/null; }
  local pid=$SERVER_PID input=${SERVER[1]}
  read -r port <&"${SERVER[0]}"
  "$bin" load "$port" "$count" 3 | sed "s/^/$name\t$count\t/"
  awk -v name="$name" -v count="$count" \
    '/^VmHWM/ { printf "%s\t%s\tmemory, MiB\t%.2f\n", name, count, $2 / 1024 }' "/proc/$pid/status"
  exec {input}>&-
  wait "$pid" || true
}

for _ in $(seq "$rounds"); do
  for count in $clients; do
    under ours "$count" "$bin" serve
    under torch "$count" "${without_names[@]}" "$python" benches/side_by_side/torch_store.py
  done
done | awk -F'\t' '
  { key = $2 "\t" $3; if (!(key in seen)) { seen[key] = 1; order[++n] = key } }
  $1 == "ours" && (!(key in ours) || $4 < ours[key]) { ours[key] = $4 }
  $1 == "torch" && (!(key in torch) || $4 < torch[key]) { torch[key] = $4 }
  END {
    print "| clients | part | ours | torch, libuv | ratio |"
    print "|---|---|---|---|---|"
    for (i = 1; i <= n; i++) {
      split(order[i], k, "\t")
      printf "| %d | %s | %.1f | %.1f | %.2f |\n", k[1], k[2], ours[order[i]], torch[order[i]],
        ours[order[i]] / torch[order[i]]
    }
  }'
