#!/usr/bin/env bash
# Sets up .venv and runs the tests.
#
#   bash launch/test.sh [--no-install] [pytest arguments]         such as tests/config -k ladder
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/setup_env.sh

exec "$PYTHON" -m pytest "$@"
