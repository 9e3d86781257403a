#!/usr/bin/env bash
# The figures that one GPU can give: updates and log-probs, the bubble meter's own cost, a rollout, whole steps, the forecast.
#
#   bash benchmarks/run_one_gpu.sh --out benchmarks/results/h200 [--parts "update meter"] [--only REGEX] [--list]
#   bash benchmarks/run_one_gpu.sh --out FOLDER --dry-run          the same commands on a CPU, with a tiny model
#
# Parts, and what they should take on an H200:
#   update      14 layers of the 7.6B Qwen2 shape (4.4B parameters, with the optimizer 78 GB) and 12 of the Llama-8B one: micro-batches
#               of several sizes, recomputation; 32k tokens: 4 min
#   meter       passes with and without the bubble meter, in turn: 2 min
#   rollout     all 28 layers, against plain vLLM in the same run: 4 min
#   step        whole RL steps of the 14 layers: the planner's first choice and two layouts picked by hand: 3 x 3 min
#   forecast    the planner's, calibrated on what CALIBRATION says, held against the rest that is in --out: seconds, needs no GPU
# --only takes the jobs whose names match, so that each fits a lease of a few minutes; --list prints them. PYTHON names the Python,
# CALIBRATION the file for the forecasts (default: benchmarks/results/h200x2/calibration.json, fitted to TP2 on two H200s).
set -uo pipefail
every="update meter rollout step forecast"
source "$(dirname "${BASH_SOURCE[0]}")/jobs.sh"
options "$@"
: "${CALIBRATION:=benchmarks/results/h200x2/calibration.json}"

qwen=configs/models/qwen2_7b.json llama=configs/models/llama3_8b.json
layers=14 sequences=16 length=2048 rounds=10 tokens=4096 limit=420 timed=(--steps 10 --warmup 3)
rolled=(--prompts 128 --prompt-tokens 512 --response-tokens 512) work=(--layers 14 --prompts 16 --samples 8) here=()
kv=(roles.rollout.gpu_memory_utilization=0.4)
if [[ -n $DRY_RUN ]]; then
  qwen=configs/models/tiny_wide.json llama=$qwen
  layers=2 sequences=16 length=8 rounds=2 tokens=64 limit=900 timed=(--steps 2 --warmup 1 --prompt-tokens 8 --response-tokens 8)
  rolled=(--prompts 2) here=(--gpu H200) kv=(roles.rollout.gpu_memory_utilization=0.05)
  work=(--layers 2 --prompts 4 --samples 2 --prompt-tokens 9 --response-tokens 8 --steps 3)
  export CUDA_VISIBLE_DEVICES='' OMP_NUM_THREADS=1
fi
torchrun=("$PYTHON" -m torch.distributed.run --nproc-per-node 1)

rows=()
row() { # note, options and keys: one measurement
  local note=$1
  shift
  rows+=(--row "$(printf '%q ' --note "$note" "$@")")
}

update() { # the same tokens in the same sequences in all of a model's rows
  local longest=$((tokens / 2)) one=(--model "$llama" --layers $((layers > 2 ? 12 : layers)))
  row '' --tokens "$tokens" --micro-batches 8
  row '' --tokens $((2 * tokens)) --longest $longest --micro-batches 4
  row '' --tokens $((4 * tokens)) --longest $longest --micro-batches 2
  row '' --tokens $((2 * tokens)) --longest $longest --micro-batches 4 roles.actor.recompute=selective
  row '' --tokens $((2 * tokens)) --longest $longest --micro-batches 4 roles.actor.recompute=mlp
  row '' --tokens $((2 * tokens)) --longest $longest --micro-batches 4 roles.actor.recompute=full
  row '' "${one[@]}" --tokens "$tokens" --micro-batches 8
  row '' "${one[@]}" --tokens $((2 * tokens)) --micro-batches 4
  job update "$limit" "${torchrun[@]}" benchmarks/throughput.py --model "$qwen" --layers "$layers" --parts update log_probs \
    "${timed[@]}" --out "$OUT/update.json" "${rows[@]}"
  rows=()
}

meter() { # without other stages there is no bubble: what is timed is the meter
  job meter "$limit" "${torchrun[@]}" benchmarks/bubble.py --model "$qwen" --layers "$layers" --sequences "$sequences" \
    --length "$length" --row "PP1 M16" --repeat 5 --cost "$rounds" --out "$OUT/meter.json"
}

rollout() {
  job rollout "$limit" "${torchrun[@]}" benchmarks/throughput.py --model "$qwen" --parts rollout "${rolled[@]}" "${timed[@]}" \
    --out "$OUT/rollout.json" "${kv[@]}"
}

one_step() { # name, layout
  job "$1" "$limit" "$PYTHON" benchmarks/whole_step.py --model "$qwen" --ranks 1 "${work[@]}" "${here[@]}" --layout "$2" \
    --calibration "$CALIBRATION" --out "$OUT/$1.json"
}

step() {
  local file files=()
  one_step step_planner planner
  one_step step_usual "micro-batches of 4,096 tokens: roles.actor.micro_batch_tokens=4096 ${kv[*]}"
  one_step step_recompute "recomputed: roles.actor.micro_batch_tokens=16384 roles.actor.recompute=full ${kv[*]}"
  for file in "$OUT"/step_*.json; do [[ -f $file ]] && files+=("$file"); done
  [[ ${#files[@]} -gt 1 ]] && TAIL=40 job step 120 "$PYTHON" benchmarks/whole_step.py --with "${files[@]}"
}

forecast() {
  local name found=()
  for name in update rollout; do [[ -f $OUT/$name.json ]] && found+=("$OUT/$name.json"); done
  if [[ -z $LIST && forecast =~ $ONLY && ${#found[@]} == 0 ]]; then echo "forecast: $OUT lacks the results of update and rollout" && return 0; fi
  TAIL=40 job forecast 120 "$PYTHON" benchmarks/forecast.py --calibration "$CALIBRATION" --compare "${found[@]}" \
    --out "$OUT/forecast.json"
}

for part in $parts; do "$part"; done
finish
