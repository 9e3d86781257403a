#!/usr/bin/env bash
# One node's share of a job over several: run it on every node, with the same arguments. It ends when the job does.
#
#   MASTER_ADDR=gpu1 MASTER_PORT=29500 NODE_RANK=0 bash launch/torchrun/every_node.sh --config my.yaml cluster.nodes=2 [key=value ...]
#   HOSTFILE=hosts.txt bash launch/torchrun/every_node.sh --config my.yaml cluster.nodes=2 [key=value ...]
#
# MASTER_ADDR: a name or address of node 0 that all nodes can reach; MASTER_PORT: a port that is free there (default 29500);
# NODE_RANK: this node's number from 0. HOSTFILE has a line for each node (its name or address, anything after it is ignored): the
# first is node 0, and this machine looks for itself in it. Repository, model and run.dir are at the same place on all nodes,
# run.dir in a shared folder. PYTHON names the Python to use (.venv's).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source launch/network.sh

if [ -n "${HOSTFILE:-}" ]; then
  mapfile -t hosts < <(sed 's/#.*//' "$HOSTFILE" | awk 'NF {print $1}')
  : "${MASTER_ADDR:=${hosts[0]}}"
  if [ -z "${NODE_RANK:-}" ]; then
    mine=" $(hostname) $(hostname -s) $(hostname -I) "
    for index in "${!hosts[@]}"; do
      case $mine in *" ${hosts[$index]} "*) NODE_RANK=$index ;; esac
    done
    : "${NODE_RANK:?this machine ($(hostname)) is not in $HOSTFILE: set NODE_RANK}"
  fi
fi
: "${MASTER_PORT:=29500}"
export MASTER_PORT ${MASTER_ADDR+MASTER_ADDR} ${NODE_RANK+NODE_RANK}
exec "${PYTHON:-.venv/bin/python}" -m hybridflow.cli train "$@"
