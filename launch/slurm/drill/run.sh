#!/usr/bin/env bash
# The drill of launch/slurm: a real Slurm with two "nodes" on this machine runs the templates on CPU.
#
#   bash launch/test.sh --drills slurm [torchrun|ray]      installs Debian's Slurm where it is missing; needs root; 10 to 25 minutes
#
# A torchrun job goes back to the queue three times: by `scontrol requeue`, by a SIGUSR1, as when its time is up, and because a job
# of a higher partition wants its nodes. A Ray job goes back twice: by a SIGUSR1, and for the higher partition. Every start resumes
# where the last one ended; in the end both jobs must have the metrics, samples and weights of a run that was left alone, without
# Slurm. PYTHON names the Python to use. Prints what happens, without paths.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
drill=launch/slurm/drill
: "${PYTHON:=$PWD/.venv/bin/python}"
work=$(mktemp -d)
# one thread for a rank, however many ranks share a node: sums come out in the same order
export PYTHON PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=1
trap '$drill/down.sh; rm -rf "$work"' EXIT
begun=$SECONDS
note() { printf '%4d s  %s\n' $((SECONDS - begun)) "$*"; }
# What Ray says of itself at a start is left out.
show() {
  sed -e "/\(INFO\|SUCC\|WARN\) [a-z_]*\.py:[0-9]* --/d; s|$work|WORK|g; s|$PWD|REPOSITORY|g; s|${PYTHON%/bin/*}|VENV|g" \
    -e "s|$(hostname -s)|HOST|g; s/^/        /" "$@"
}
state() { scontrol show job "$1" | sed -n 's/.*JobState=\([A-Z_]*\).*/\1/p'; }
fail() { note "FAILED: $*"; show "$work"/*.out; exit 1; }
await() { # what, seconds, condition
  local end=$((SECONDS + $2))
  until eval "$3"; do
    [ $SECONDS -lt $end ] || fail "no $1 within $2 s"
    sleep 0.3
  done
  note "$1"
}
steps() { cat "$run/metrics.jsonl" 2> /dev/null | wc -l; }
begin() { # the template's name, its arguments
  run=$work/$1 name=$1 reached=0 restarts=0
  note "sbatch launch/slurm/$name.sbatch --config configs/quickstart.yaml cluster.ranks_per_node=1 ..."
  job=$(sbatch --parsable --gpus-per-node=2 --cpus-per-task=2 --time=60 --output="$work/$name.out" \
    "launch/slurm/$name.sbatch" "${@:2}" "run.dir=$run") || exit 1
}
progress() { # it runs, and has done a step since it was started last
  await "a step is done" 1200 '[ "$(steps)" -gt $reached ] || over'
  over && fail "it has ended: $(state "$job")"
}
over() { case $(state "$job") in COMPLETED | FAILED | CANCELLED | TIMEOUT | NODE_FAIL) true ;; *) false ;; esac; }
again() { # a job that went back waits two minutes; a start in the very second of the requeue fails
  restarts=$((restarts + 1))
  await "the job is back in the queue" 240 '[ "$(state "$job")" = PENDING ]'
  reached=$(steps)
  local saved="$run/checkpoints/step-$reached/complete.json"
  [ -s "$saved" ] || fail "step $reached, its last one, is not saved"
  note "steps done: $reached, the last one is saved; restarts: $restarts"
  sleep 2
  scontrol update JobId="$job" StartTime=now
}
preempt() { # a job that needs both nodes, from a partition of a higher tier
  note "a job of a higher partition wants both nodes"
  sbatch -p high -N 2 --exclusive --output=/dev/null --wrap "sleep 1" > /dev/null
}
finish() { # the job's end, and whether it is the right one
  await "it has ended" 1200 over
  note "$(scontrol show job "$job" | grep -oE '(JobState|Restarts|ExitCode)=[^ ]*' | paste -sd' '), $(steps) steps, hf: $(ls "$run/hf" | paste -sd' ')"
  [ "$(state "$job")" = COMPLETED ] || fail "it did not complete"
  [ "$(grep -c "resumes after step" "$work/$name.out")" = $restarts ] || fail "it did not resume $restarts times"
  "$PYTHON" -c 'import sys; from pathlib import Path; from tests.checkpoints.test_killed_job import assert_same_run
assert_same_run(*map(Path, sys.argv[1:]))' "$run" "$work/whole" || fail "it differs from the run that was left alone"
  note "every step is there once; metrics, samples and weights are those of the run that was left alone"
  note "its output:"
  show "$work/$name.out"
  rm "$work/$name.out"
}

$drill/up.sh || exit 1
source "${SLURM_DRILL:-/run/slurm-drill}/env"
note "Slurm $(sinfo --version | cut -d' ' -f2) is up: $(sinfo -h -N -p low -o '%N (%c CPUs, %G)' | paste -sd' ')"
"$PYTHON" -m hybridflow.cli tiny-model --to "$work/tiny" > /dev/null 2>&1 || exit 1

# one rank a node, a pipeline over both: starting a rank is what takes the time. Checkpoints are due after other steps than those
# at which it leaves
small=(--config configs/quickstart.yaml "model.path=$work/tiny" cluster.device=cpu roles.actor.tp=1 roles.actor.pp=2
  roles.rollout.tp=1 warm_start.steps=2 evaluation.problems=4 batch.prompts=8 run.steps=20 run.save_every=7)
"$PYTHON" -m hybridflow.cli train "${small[@]}" cluster.ranks_per_node=2 "run.dir=$work/whole" > "$work/whole.out" 2>&1 || fail "no run to compare with"
rm "$work/whole.out"
note "a run without Slurm, to compare with, has ended"
small+=(cluster.ranks_per_node=1)

case ${1:-torchrun} in torchrun)
  begin torchrun "${small[@]}"
  progress
  scontrol requeue "$job"
  note "scontrol requeue"
  again
  progress
  scancel --signal=USR1 "$job"
  note "SIGUSR1 to its steps"
  again
  progress
  preempt
  again
  finish
esac
case ${1:-ray} in ray)
  # Ray's own processes would end at a preemption's SIGTERM
  sed -i 's/^SchedulerParameters=.*/&,preempt_send_user_signal/' "$SLURM_CONF"
  scontrol reconfigure || exit 1
  export CPUS_PER_NODE=1
  begin ray "${small[@]}"
  progress
  scancel --batch --signal=USR1 "$job"
  note "SIGUSR1 to its script"
  again
  progress
  preempt
  again
  finish
esac
note "passed"
