#!/usr/bin/env bash
# The main job from nothing: sets up .venv, makes the tiny model, trains it (warm start, then GRPO) on 4 ranks.
#
# Replaces what the last quickstart left in runs/quickstart.
#
#   bash launch/quickstart.sh [--no-install] [key=value ...]      such as run.steps=20
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/setup_env.sh

[ -e models/tiny/config.json ] || "$PYTHON" -m hybridflow.cli tiny-model --to models/tiny
exec "$PYTHON" -m hybridflow.cli train --config configs/quickstart.yaml run.overwrite=true "$@"
