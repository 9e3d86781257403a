#!/usr/bin/env bash
# Ends what up.sh started: jobs, daemons by their noted process ids, namespaces, and its folder.
set -uo pipefail
RUN=${SLURM_DRILL:-/run/slurm-drill}
[ -d "$RUN" ] || exit 0
export SLURM_CONF=$RUN/slurm.conf
timeout 5 squeue -h -o %A 2> /dev/null | sort -u | xargs -r scancel --full > /dev/null 2>&1
for _ in $(seq 60); do [ -z "$(timeout 5 squeue -h 2> /dev/null)" ] && break; sleep 0.25; done
# a dead daemon stays a zombie until process 1 reaps it
up() { case $(ps -o stat= -p "$1" 2> /dev/null) in '' | Z*) return 1 ;; esac; }
tac "$RUN/pids" | while read -r pid name; do
  { tr '\0' ' ' < "/proc/$pid/cmdline"; } 2> /dev/null | grep -qE 'munged|slurmctld|slurmd' || continue # no longer what was started
  kill -TERM "$pid"
  for _ in $(seq 100); do up "$pid" || break; sleep 0.05; done
  up "$pid" && { echo "$name: killed" >&2; kill -KILL "$pid"; }
done
for node in node1 node2; do
  for pid in $(ip netns pids $node 2> /dev/null); do kill -KILL "$pid" 2> /dev/null; done # left by a job: nothing else is in there
  ip netns del $node
done
ip link del sdrill0
rm -rf "$RUN"
