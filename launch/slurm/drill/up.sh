#!/usr/bin/env bash
# Starts a real Slurm on this machine: munged, slurmctld and two slurmd, each in a network and UTS namespace of its own, so that
# they have host names, addresses and ports like two nodes. Needs root and Debian's packages, which it installs where they are
# missing. Afterwards: source $SLURM_DRILL/env (default /run/slurm-drill). down.sh ends it.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
RUN=${SLURM_DRILL:-/run/slurm-drill} NODES=2 CPUS=${CPUS:-8} MEMORY=${MEMORY:-8000} GPUS=${GPUS:-2}
HOST=$(hostname -s) CONTROL=10.77.0.254
if ! command -v slurmctld slurmd munged sbatch ip > /dev/null; then
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends slurmctld slurmd slurm-client munge iproute2 > /dev/null
fi
[ -e "$RUN/env" ] && { echo "already up in $RUN: run down.sh first" >&2; exit 1; }
mkdir -p "$RUN/ctld"
: > "$RUN/pids"
start() { # name, command: in the foreground mode of the daemon, its process id noted
  setsid "${@:2}" < /dev/null > "$RUN/$1.out" 2>&1 &
  echo "$! $1" >> "$RUN/pids"
}

# GPUs that are empty files: enough for Slurm to hand them out
for gpu in $(seq 0 $((GPUS - 1))); do : > "$RUN/gpu$gpu"; done
echo "Name=gpu File=$RUN/gpu[0-$((GPUS - 1))]" > "$RUN/gres.conf"

ip link add sdrill0 type bridge
ip addr add $CONTROL/24 dev sdrill0
ip link set sdrill0 up
nodes='' hosts=''
for index in $(seq 1 $NODES); do
  node=node$index address=10.77.0.$index
  mkdir -p "$RUN/spool-$node"
  ip netns add "$node"
  ip link add "sd$index" type veth peer name eth0 netns "$node"
  ip link set "sd$index" master sdrill0 up
  ip -n "$node" addr add "$address/24" dev eth0
  ip -n "$node" link set eth0 up
  ip -n "$node" link set lo up
  ip -n "$node" route add default via $CONTROL
  nodes+="NodeName=$node NodeAddr=$address Port=17001 CPUs=$CPUS RealMemory=$MEMORY Gres=gpu:$GPUS State=UNKNOWN"$'\n'
  hosts+="$address $node"$'\n'
done
# each slurmd sees hosts and look-ups of its own: a name server that a namespace cannot reach costs 5 to 10 s for each look-up
printf '127.0.0.1 localhost\n%s%s %s\n' "$hosts" "$CONTROL" "$HOST" > "$RUN/hosts"
printf 'passwd: files\ngroup: files\nhosts: files\n' > "$RUN/nsswitch.conf"
sed -e "s|@RUN@|$RUN|; s|@HOST@|$HOST|; s|@CTLADDR@|$CONTROL|" -e "/@NODES@/{r /dev/stdin
d}" "$here/slurm.conf.in" > "$RUN/slurm.conf" <<< "${nodes%$'\n'}"
echo "CgroupPlugin=cgroup/v1" > "$RUN/cgroup.conf" # named, so that slurmd does not look for a mount that nothing uses
export SLURM_CONF=$RUN/slurm.conf

(umask 077; head -c 1024 /dev/urandom > "$RUN/munge.key") # every folder above $RUN must be executable for all
start munged munged --foreground --key-file="$RUN/munge.key" --socket="$RUN/munge.sock" --pid-file="$RUN/munged.pid" \
  --log-file="$RUN/munged.log" --seed-file="$RUN/munge.seed"
for _ in $(seq 100); do munge -n -S "$RUN/munge.sock" > /dev/null 2>&1 && break; sleep 0.1; done
start slurmctld slurmctld -D -c
for index in $(seq 1 $NODES); do
  # not `ip netns exec`: it hides /sys/fs/cgroup, without which slurmd ends
  start "slurmd-node$index" nsenter --net="/run/netns/node$index" unshare --uts --mount -- sh -ec '
    hostname "$1"; mount --bind "$2/hosts" /etc/hosts; mount --bind "$2/nsswitch.conf" /etc/nsswitch.conf
    exec slurmd -D -N "$1"' sh "node$index" "$RUN"
done
echo "export SLURM_CONF=$RUN/slurm.conf" > "$RUN/env"
for _ in $(seq 150); do
  [ "$(sinfo -h -N -t idle -p low -o %N 2> /dev/null | wc -l)" = $NODES ] && exit 0
  sleep 0.2
done
echo "the nodes are not idle after 30 s:" >&2
tail -n 5 "$RUN"/*.log >&2
exit 1
