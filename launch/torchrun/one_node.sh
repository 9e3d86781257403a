#!/usr/bin/env bash
# A job on this machine: checks the config, starts torchrun and watches over it.
#
#   bash launch/torchrun/one_node.sh --config configs/quickstart.yaml [key=value ...]
#
# PYTHON names the Python to use (.venv's). Each rank's output is in RUN/logs/START/rank-N.log.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source launch/network.sh
exec "${PYTHON:-.venv/bin/python}" -m hybridflow.cli train "$@"
