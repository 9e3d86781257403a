# Runs the commands of a benchmark one after the other, each under a time limit, and says at the end what ran. Sourced by a
# script with the parts it has in `every`, and `ranks` where the user is to say how many.
#
#   options ARGUMENTS...            the script's own: --out, --parts, --only, --list, --dry-run, --help (its head), and --ranks
#   job NAME SECONDS COMMAND...     output goes to $OUT/logs/NAME.log; skipped where ONLY is set and does not match NAME
#   finish                          the table, also in $OUT/jobs.txt; status 1 if a job failed
#
# OUT: the folder of the results. LIST=1: print the commands instead. DRY_RUN=1: tiny models on CPU ranks.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
: "${PYTHON:=$PWD/.venv/bin/python}"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
OUT='' DRY_RUN='' LIST='' ONLY='' parts=''
jobs_script=$PWD/benchmarks/$(basename "$0")
jobs_table=()
jobs_failed=0
jobs_running=''
trap 'jobs_stop 130' INT
trap 'jobs_stop 143' TERM
trap 'jobs_stop 129' HUP

options() {
  local part
  while [[ $# -gt 0 ]]; do
    case $1 in
      --out) OUT=${2-} && shift ;;
      --parts) parts=${2-} && shift ;;
      --only) ONLY=${2-} && shift ;;
      --list) LIST=1 ;;
      --dry-run) DRY_RUN=1 ;;
      --help) jobs_usage 0 ;;
      *) if [[ $1 == --ranks && -v ranks ]]; then ranks=${2-} && shift; else jobs_usage 2; fi ;;
    esac
    shift
  done
  : "${parts:=$every}"
  [[ -z $LIST || -n $OUT ]] || OUT=OUT
  [[ -n $OUT ]] || { echo "error: --out is missing: the folder of the results" >&2 && exit 2; }
  for part in $parts; do
    [[ " $every " == *" $part "* ]] || { echo "error: --parts: there is no $part" >&2 && exit 2; }
  done
}

jobs_usage() { # the comment at the script's head
  sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$jobs_script"
  exit "$1"
}

jobs_stop() { # what runs ends with this script: it has a process group of its own, which signals for this one do not reach
  trap '' INT TERM HUP
  [[ -z $jobs_running ]] || { kill -TERM "$jobs_running" && wait "$jobs_running"; }
  echo "stopped by a signal" >&2
  exit "$1"
}

job() {
  local name=$1 limit=$2 status seconds started=$SECONDS log=$OUT/logs/$1.log
  shift 2
  if [[ -n ${ONLY:-} && ! $name =~ $ONLY ]]; then return 0; fi
  if [[ -n ${LIST:-} ]]; then
    printf '%s (at most %s s)\n   ' "$name" "$limit"
    printf ' %q' "$@"
    printf '\n'
    return 0
  fi
  mkdir -p "$OUT/logs"
  printf '=== %s, at most %s s: %s\n' "$name" "$limit" "$*"
  # torchrun ends its ranks when it is asked to; what is left after that is killed
  timeout --kill-after=30 "$limit" "$@" > "$log" 2>&1 < /dev/null &
  jobs_running=$!
  wait "$jobs_running"
  status=$?
  jobs_running=''
  seconds=$((SECONDS - started))
  case $status in
    0) jobs_table+=("$(printf '%-34s %6d s  ok' "$name" "$seconds")") ;;
    124 | 137) jobs_table+=("$(printf '%-34s %6d s  OUT OF TIME' "$name" "$seconds")") ;;
    *) jobs_table+=("$(printf '%-34s %6d s  FAILED, status %d' "$name" "$seconds" "$status")") ;;
  esac
  if [[ $status != 0 ]]; then
    jobs_failed=1
    echo "--- end of $log"
    tail -n 15 "$log"
  else
    grep -vi -e warn -e '^\*\*\*' -e OMP_NUM_THREADS -e Triton -e is_fx_tracing "$log" | tail -n "${TAIL:-12}"
  fi
  printf '%s\n' "${jobs_table[@]}" > "$OUT/jobs.txt" # after every job, so that nothing is lost when the machine goes
}

finish() {
  [[ -n ${LIST:-} ]] && return 0
  echo "=== what ran"
  printf '%s\n' "${jobs_table[@]}"
  return $jobs_failed
}
