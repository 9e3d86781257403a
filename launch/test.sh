#!/usr/bin/env bash
# Sets up .venv and runs the tests.
#
#   bash launch/test.sh [--no-install] [pytest arguments]         such as tests/config -k ladder
#   bash launch/test.sh [--no-install] --drills slurm             a real Slurm with two nodes on this machine (root, Debian)
#   bash launch/test.sh [--no-install] --drills two-nodes         two torchrun nodes on this machine (root)
#   bash launch/test.sh [--no-install] --drills faults [NAME...]  signals, kills, hangs, NaN, a full disk: tests/drills/faults.py
#   bash launch/test.sh [--no-install] --drills placements equal|kills   roles placed in many ways, workers killed
#   bash launch/test.sh [--no-install] --drills convert           15 GB of weights to a checkpoint and back: bits, memory
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/setup_env.sh

if [ "${1:-}" = --drills ]; then
  export PYTHON
  case "${2:-}" in
    slurm) exec bash launch/slurm/drill/run.sh "${@:3}" ;;
    two-nodes) exec bash launch/torchrun/drill.sh ;;
    faults) exec "$PYTHON" -m tests.drills.faults "${@:3}" ;;
    placements) exec "$PYTHON" -m tests.drills.placements "${@:3}" ;;
    convert) exec "$PYTHON" -m tests.drills.convert "${@:3}" ;;
    *) echo "--drills ${2:-}: use slurm, two-nodes, faults, placements or convert" >&2; exit 2 ;;
  esac
fi
exec "$PYTHON" -m pytest "$@"
