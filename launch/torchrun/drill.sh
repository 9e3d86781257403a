#!/usr/bin/env bash
# The drill of launch/torchrun: two "nodes" on this machine (two_nodes_here.sh) run the quickstart's config on CPU, two ranks each.
#
#   bash launch/test.sh --drills two-nodes          needs root, iproute2 and util-linux; about 4 minutes
#
# First a few steps to the end; then a job in which a rank of the second node is killed, which every node must notice and node 0 tell.
# PYTHON names the Python to use. Prints what happens, without paths.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
: "${PYTHON:=$PWD/.venv/bin/python}"
work=$(mktemp -d)
export PYTHON PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
trap 'rm -rf "$work"' EXIT
show() { sed -e "s|$work|WORK|g; s|$PWD|REPOSITORY|g; s/^/        /"; }
fail() { echo "FAILED: $*"; exit 1; }
job() { # run folder, overrides
  bash launch/torchrun/two_nodes_here.sh bash launch/torchrun/every_node.sh --config configs/quickstart.yaml "model.path=$work/tiny" \
    "run.dir=$work/$1" cluster.nodes=2 cluster.ranks_per_node=2 warm_start.steps=2 evaluation.problems=4 batch.prompts=8 "${@:2}" 2>&1
}

"$PYTHON" -m hybridflow.cli tiny-model --to "$work/tiny" > /dev/null 2>&1 || fail "no model"
echo "two nodes of two ranks run 3 steps"
job whole run.steps=3 | show
[ "${PIPESTATUS[0]}" = 0 ] && [ -s "$work/whole/hf/model.safetensors" ] || fail "the job did not come to its end"

echo "rank 3, on the second node, is killed in the middle"
(
  for _ in $(seq 6000); do [ -s "$work/killed/metrics.jsonl" ] && break; sleep 0.1; done
  for pid in $(pgrep -f "hybridflow.train .*run.dir=$work/killed"); do
    tr '\0' '\n' < "/proc/$pid/environ" 2> /dev/null | grep -qx RANK=3 && kill -KILL "$pid"
  done
) &
job killed run.steps=1000 > "$work/killed.txt"
status=$?
wait
tail -n 5 "$work/killed.txt" | show
[ $status = 1 ] || fail "status $status, not 1"
grep -q "hybridflow: error: rank 3 on node1 was ended by SIGKILL" "$work/killed.txt" || fail "the rank is not named"
echo passed
