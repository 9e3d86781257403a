#!/usr/bin/env bash
# The drill of launch/slurm: a real Slurm with two "nodes" on this machine runs the templates on CPU.
#
#   bash launch/test.sh --drills slurm [torchrun|ray]      installs Debian's Slurm where it is missing; needs root; about 8 minutes
#
# One torchrun job is started three times: `scontrol requeue` sends it back to the queue after the step that it is in, then a SIGUSR1,
# as when its time is up; then it goes to its end. A Ray job runs to its end. PYTHON names the Python to use. Prints what happens, without paths.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
drill=launch/slurm/drill
: "${PYTHON:=$PWD/.venv/bin/python}"
work=$(mktemp -d)
export PYTHON PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
trap '$drill/down.sh; rm -rf "$work"' EXIT
begun=$SECONDS
note() { printf '%4d s  %s\n' $((SECONDS - begun)) "$*"; }
show() { sed -e "s|$work|WORK|g; s|$PWD|REPOSITORY|g; s|${PYTHON%/bin/*}|VENV|g; s|$(hostname -s)|HOST|g; s/^/        /" "$@"; }
state() { scontrol show job "$1" | sed -n 's/.*JobState=\([A-Z_]*\).*/\1/p'; }
await() { # what, seconds, condition
  local end=$((SECONDS + $2))
  until eval "$3"; do
    [ $SECONDS -lt $end ] || { note "FAILED: no $1 within $2 s"; show "$work"/*.out; exit 1; }
    sleep 0.3
  done
  note "$1"
}
steps() { cat "$run/metrics.jsonl" 2> /dev/null | wc -l; }
again() { # a job that went back waits two minutes; a start in the very second of the requeue fails
  await "the job is back in the queue, with restarts: $1" 180 '[ "$(state "$job")" = PENDING ]'
  sleep 2
  scontrol update JobId="$job" StartTime=now
}

$drill/up.sh || exit 1
source "${SLURM_DRILL:-/run/slurm-drill}/env"
note "Slurm $(sinfo --version | cut -d' ' -f2) is up: $(sinfo -h -N -p low -o '%N (%c CPUs, %G)' | paste -sd' ')"
"$PYTHON" -m hybridflow.cli tiny-model --to "$work/tiny" > /dev/null 2>&1 || exit 1

# one rank a node, a pipeline over both: starting a rank is what takes the time
run=$work/run
options=(--gpus-per-node=2 --cpus-per-task=2 --time=60 --output="$work/%x.out")
small=(--config configs/quickstart.yaml "model.path=$work/tiny" "run.dir=$run" cluster.ranks_per_node=1 cluster.device=cpu
  roles.actor.tp=1 roles.actor.pp=2 roles.rollout.tp=1 warm_start.steps=2 evaluation.problems=4 batch.prompts=8
  run.overwrite=true)
ended='case $(state "$job") in COMPLETED | FAILED | CANCELLED | TIMEOUT | NODE_FAIL) true ;; *) false ;; esac'
finish() { # steps: the job's end, and whether it is the right one
  await "it has ended" 900 "$ended"
  note "$(scontrol show job "$job" | grep -oE '(JobState|Restarts|ExitCode)=[^ ]*' | paste -sd' '), $(steps) steps, hf: $(ls "$run/hf" | paste -sd' ')"
  note "its output:"
  show "$work/$(scontrol show job "$job" | sed -n 's/.*JobName=//p').out"
  [ "$(state "$job")" = COMPLETED ] && [ "$(steps)" = "$1" ] && [ -s "$run/hf/model.safetensors" ] || { note FAILED; exit 1; }
  rm -rf "$run"
}

case ${1:-torchrun} in torchrun)
  note "sbatch launch/slurm/torchrun.sbatch --config configs/quickstart.yaml cluster.ranks_per_node=1 ..."
  job=$(sbatch --parsable "${options[@]}" launch/slurm/torchrun.sbatch "${small[@]}" run.steps=20)
  await "it has done a step" 900 '[ "$(steps)" -ge 1 ]'
  scontrol requeue "$job"
  note "scontrol requeue"
  again 1
  rm -rf "$run"
  await "started again, it has done a step" 900 '[ "$(steps)" -ge 1 ]'
  scancel --signal=USR1 "$job"
  note "SIGUSR1 to its steps"
  again 2
  rm -rf "$run"
  finish 20
esac
case ${1:-ray} in ray)
  note "sbatch launch/slurm/ray.sbatch --config configs/quickstart.yaml cluster.ranks_per_node=1 ..."
  job=$(CPUS_PER_NODE=1 sbatch --parsable "${options[@]}" launch/slurm/ray.sbatch "${small[@]}" run.steps=3)
  finish 3
esac
note "passed"
