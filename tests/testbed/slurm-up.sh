#!/usr/bin/env bash
# slurm-up.sh: a throw-away Slurm cluster on this machine, for tests.
#
# Starts munged, slurmctld and N slurmd from Debian's packages, without
# systemd and without touching /etc/slurm or /etc/munge: keys, sockets, logs
# and spool all lie under one folder. Needs root.
#
#   apt-get install -y --no-install-recommends slurm-wlm munge
#   ./slurm-up.sh --nodes 2 --cpus 4 --gpus 2
#   export SLURM_CONF=/run/slurm-test/slurm.conf
#   srun --nodes=2 --ntasks=4 --ntasks-per-node=2 --gres=gpu:2 --kill-on-bad-exit=1 env
#   ./slurm-down.sh
#
# Node i is called ni and is 127.0.0.(10+i); --etc-hosts makes those names
# resolve, for programs that take a master address from the node list.
set -euo pipefail

nodes=2 cpus=4 gpus=0 dir=/run/slurm-test base_port=17000 etc_hosts='' wait_s=20
while [ $# -gt 0 ]; do
    case $1 in
        --nodes) nodes=$2; shift ;;
        --cpus) cpus=$2; shift ;;           # per node, whatever the machine has
        --gpus) gpus=$2; shift ;;           # per node, by count: no GPU is needed or opened
        --dir) dir=$2; shift ;;
        --base-port) base_port=$2; shift ;; # slurmctld; slurmd i listens on base_port+i
        --etc-hosts) etc_hosts=1 ;;         # add the nodes' names to /etc/hosts
        --wait) wait_s=$2; shift ;;
        *) echo "slurm-up.sh: unknown option $1" >&2; exit 2 ;;
    esac
    shift
done
[ "$(id -u)" = 0 ] || { echo "slurm-up.sh: must be root" >&2; exit 2; }
for tool in munged mungekey slurmctld slurmd sinfo; do
    command -v "$tool" >/dev/null || { echo "slurm-up.sh: no $tool (apt-get install slurm-wlm munge)" >&2; exit 2; }
done
if [ -e "$dir/slurm.conf" ]; then
    echo "slurm-up.sh: $dir is in use; run slurm-down.sh --dir $dir first" >&2; exit 2
fi

name=n subnet=127.0.0
host=$(hostname -s)

# munged refuses a key or a socket in a folder that others can write.
install -d -m 0755 "$dir" "$dir/log" "$dir/pid" "$dir/state"
install -d -m 0700 "$dir/munge"
mungekey --create --keyfile="$dir/munge/key"
munged --key-file="$dir/munge/key" --socket="$dir/munge.socket" --pid-file="$dir/pid/munged" \
       --log-file="$dir/log/munged" --seed-file="$dir/munge/seed" --num-threads=2

# Slurm counts a GPU only where it has a File= that is a device, numbered from 0:
# copies of /dev/null will do, since without cgroups none is ever opened.
if [ "$gpus" -gt 0 ]; then
    for g in $(seq 0 $((gpus - 1))); do mknod -m 0666 "$dir/gpu$g" c 1 3; done
    echo "NodeName=${name}[1-$nodes] Name=gpu File=$dir/gpu[0-$((gpus - 1))]" >"$dir/gres.conf"
fi

{
    cat <<CONF
ClusterName=test
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$base_port
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$dir/munge.socket
CredType=cred/munge
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool-%n
SlurmctldPidFile=$dir/pid/slurmctld
SlurmdPidFile=$dir/pid/slurmd-%n
SlurmctldLogFile=$dir/log/slurmctld
SlurmdLogFile=$dir/log/slurmd-%n
MailProg=/bin/true
# No cgroups: they need systemd, or a hierarchy to write. linuxproc goes by parent pid.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,batch_sched_delay=0
# config_overrides: believe the counts below.
SlurmdParameters=config_overrides
# Nodes start DOWN and count as idle once their slurmd has registered.
ReturnToService=2
KillWait=2
SlurmctldTimeout=30
SlurmdTimeout=30
CONF
    if [ "$gpus" -gt 0 ]; then echo "GresTypes=gpu"; fi
    for i in $(seq "$nodes"); do
        echo "NodeName=$name$i NodeHostname=$host NodeAddr=$subnet.$((10 + i)) Port=$((base_port + i))" \
             "CPUs=$cpus RealMemory=1000 State=DOWN$([ "$gpus" = 0 ] || echo " Gres=gpu:$gpus")"
    done
    echo "PartitionName=main Nodes=${name}[1-$nodes] Default=YES MaxTime=30 State=UP"
} >"$dir/slurm.conf"

if [ -n "$etc_hosts" ]; then
    for i in $(seq "$nodes"); do
        echo "$subnet.$((10 + i)) $name$i # $dir" >>/etc/hosts    # slurm-down.sh removes these
    done
fi

export SLURM_CONF=$dir/slurm.conf
slurmctld -f "$dir/slurm.conf"
for i in $(seq "$nodes"); do
    mkdir -p "$dir/spool-$name$i"
    slurmd -f "$dir/slurm.conf" -N "$name$i"
done

for _ in $(seq $((wait_s * 10))); do
    if [ "$(sinfo --noheader --Node --format=%t 2>/dev/null | grep -c '^idle$')" = "$nodes" ]; then
        echo "slurm-up.sh: $nodes node(s) idle; export SLURM_CONF=$SLURM_CONF"
        exit 0
    fi
    sleep 0.1
done
echo "slurm-up.sh: the nodes did not come up in ${wait_s}s" >&2
sinfo --Node --long >&2 || true
tail -n 5 "$dir"/log/* >&2 || true
exit 1
