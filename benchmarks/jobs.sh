# Runs the commands of a benchmark one after the other, each under a time limit, and says at the end what ran. Sourced.
#
#   job NAME SECONDS COMMAND...     output goes to $OUT/logs/NAME.log; skipped where ONLY is set and does not match NAME
#   finish                          the table, also in $OUT/jobs.txt; status 1 if a job failed
#
# OUT: the folder of the results. LIST=1: print the commands instead. DRY_RUN=1: lines of the log are shown.
jobs_table=()
jobs_failed=0

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
  timeout --kill-after=30 "$limit" "$@" > "$log" 2>&1
  status=$?
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
