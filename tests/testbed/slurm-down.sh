#!/usr/bin/env bash
# slurm-down.sh: stops what slurm-up.sh started (its own processes only) and removes its folder.
set -uo pipefail
dir=/run/slurm-test
[ "${1:-}" != --dir ] || dir=$2
[ -d "$dir/pid" ] || exit 0
export SLURM_CONF=$dir/slurm.conf

# running PID NAME: not by /proc/PID/comm, which a zombie keeps until init gets round to it
running() {
    local argv0=
    read -r -d '' argv0 <"/proc/$1/cmdline"
    [ "${argv0##*/}" = "$2" ]
} 2>/dev/null
stop() {  # stop PIDFILE NAME: TERM, after 5 s KILL, only while that pid still is NAME
    local pid
    pid=$(cat "$1" 2>/dev/null) || return 0
    running "$pid" "$2" || return 0
    kill -TERM "$pid" 2>/dev/null
    for _ in $(seq 100); do
        running "$pid" "$2" || return 0
        sleep 0.05
    done
    kill -KILL "$pid" 2>/dev/null
}
drained() {  # drained TENTHS: no job left within that time
    for _ in $(seq "$1"); do
        [ -n "$(timeout 5 squeue --noheader 2>/dev/null)" ] || return 0
        sleep 0.1
    done
    return 1
}

# Through Slurm first, so that every srun hears of it and ends; a task that ignores
# TERM would take Slurm another 7 s, so it is killed here, known by its environment.
if timeout 5 scancel --user="$(id -un)" 2>/dev/null && ! drained 5; then
    for file in /proc/[0-9]*/environ; do
        if grep -qzxF "SLURM_CONF=$SLURM_CONF" "$file" 2>/dev/null &&
           grep -qz '^SLURM_TASK_PID=' "$file" 2>/dev/null; then
            kill -KILL "${file//[!0-9]/}" 2>/dev/null
        fi
    done
    drained 30
fi
stop "$dir/pid/slurmctld" slurmctld
for file in "$dir"/pid/slurmd-*; do
    if [ -e "$file" ]; then stop "$file" slurmd; fi
done
stop "$dir/pid/munged" munged
if grep -qF "# $dir" /etc/hosts; then
    kept=$(grep -vF "# $dir" /etc/hosts)
    printf '%s\n' "$kept" >/etc/hosts    # in place: it may be a mount
fi
rm -rf "$dir"
