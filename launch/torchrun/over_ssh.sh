#!/usr/bin/env bash
# A job over several nodes, started from one machine that can log in to all of them without a password.
#
#   bash launch/torchrun/over_ssh.sh hosts.txt --config my.yaml [key=value ...]
#
# hosts.txt has a line for each node; its number becomes cluster.nodes. MASTER_PORT (default 29500) must be free on the first. When a
# node's share fails, or this script is stopped, the others are ended as well. SSH names another command that runs
# "COMMAND host 'shell line'"; PYTHON the Python on the nodes.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
hostfile=${1:?usage: over_ssh.sh HOSTFILE --config FILE [key=value ...]}
shift
mapfile -t hosts < <(sed 's/#.*//' "$hostfile" | awk 'NF {print $1}')
[ "${#hosts[@]}" -gt 0 ] || { echo "$hostfile names no host" >&2; exit 2; }
read -ra ssh <<< "${SSH:-ssh -tt -o BatchMode=yes}" # -tt: the nodes' processes get a hang-up when this end goes
job=$(date +%Y%m%d-%H%M%S)-$$

pids=()
end() { kill -TERM "${pids[@]}" 2> /dev/null || :; }
trap end INT TERM HUP
for index in "${!hosts[@]}"; do
  settings=(MASTER_ADDR="${hosts[0]}" MASTER_PORT="${MASTER_PORT:-29500}" NODE_RANK="$index" HYBRIDFLOW_JOB="$job")
  [ -n "${PYTHON:-}" ] && settings+=(PYTHON="$PYTHON")
  line=$(printf '%q ' env "${settings[@]}" bash "$root/launch/torchrun/every_node.sh" "$@" "cluster.nodes=${#hosts[@]}")
  "${ssh[@]}" "${hosts[$index]}" "$line" < /dev/null &
  pids+=($!)
done

status=0
for _ in "${hosts[@]}"; do
  one=0
  wait -n "${pids[@]}" || one=$?
  if [ "$one" -ne 0 ] && [ "$status" -eq 0 ]; then
    status=$one
    sleep "${GRACE:-15}" # a failed rank ends its peers, and node 0 says why: they need no help as a rule
    end
  fi
done
exit "$status"
