#!/usr/bin/env bash
# The figures on two GPUs of one host: bubbles, updates and what tunes them, rollouts, the planner's forecast, whole steps.
#
#   bash benchmarks/run_two_gpus.sh --out benchmarks/results/h200x2 [--parts "bubble update"] [--only REGEX] [--list]
#   bash benchmarks/run_two_gpus.sh --out FOLDER --dry-run         the same commands on CPU ranks, with tiny models
#
# Parts, and what they should take on two H200s (3 to 4 s for an update of 64k tokens, 1 for its log-probs, 40 until a process is
# ready):
#   bubble      7.6B Qwen2 shape, 28 layers: 1F1B m = 4, 8, 16 and v = 2 (4 min); Llama-8B shape, 32 layers: v = 2, 4 (4 min);
#               the meter's own cost (2 min)
#   update      update and log-probs in TP2 (2.5 min), PP2, PP2 x VPP2, DP2 (4.5 min), all of 64k tokens
#   tune        one change at a time to them: 4 min; Transformer Engine's kernels and CUDA graphs 1 min each
#   rollout     TP2 and TP1 against plain vLLM in the same run: 2 x 4 min
#   unseen      another length, another model: what no calibration has seen: 4 min
#   forecast    calibrated on TP2 alone, held against all the rest that is in --out: seconds, needs no GPU
#   step        whole RL steps: the planner's first choice, with that calibration if it is there, TP2 to TP2, PP2 to TP2, DP2 to
#               TP1: 4 x 4 min
# --only takes the jobs whose names match, so that each fits a lease of a few minutes; --list prints them. PYTHON names the Python.
set -uo pipefail
every="bubble update tune rollout unseen forecast step"
source "$(dirname "${BASH_SOURCE[0]}")/jobs.sh"
options "$@"

shapes=configs/models
qwen=$shapes/qwen2_7b.json llama=$shapes/llama3_8b.json
sequences=32 length=2048 passes=5 rounds=10 tokens=4096 limit=420 timed=(--steps 10 --warmup 3)
rolled=(--prompts 128 --prompt-tokens 512 --response-tokens 512) work=(--prompts 8 --samples 8) here=() kv=()
if [[ -n $DRY_RUN ]]; then
  qwen=$shapes/tiny_wide.json llama=$qwen
  sequences=16 length=8 passes=1 rounds=2 tokens=64 limit=900 timed=(--steps 2 --warmup 1 --prompt-tokens 8 --response-tokens 8)
  rolled=(--prompts 2)
  work=(--layers 2 --prompts 4 --samples 2 --prompt-tokens 9 --response-tokens 8 --steps 3)
  here=(--gpu H200) kv=(roles.rollout.gpu_memory_utilization=0.05)
  export CUDA_VISIBLE_DEVICES='' OMP_NUM_THREADS=1
fi
torchrun=("$PYTHON" -m torch.distributed.run --nproc-per-node 2)

bubble() { # two layers less on the last stage: what the output layer takes
  local passes_of=(--split-loss 2 --sequences "$sequences" --length "$length" --repeat "$passes")
  job bubble_qwen "$limit" "${torchrun[@]}" benchmarks/bubble.py --model "$qwen" --layers 28 "${passes_of[@]}" --row "PP2 M4" \
    --row "PP2 M8" --row "PP2 M16" --row "PP2 VPP2 M4" --row "PP2 VPP2 M8" --row "PP2 VPP2 M16" --out "$OUT/bubble_qwen.json"
  job bubble_llama "$limit" "${torchrun[@]}" benchmarks/bubble.py --model "$llama" --layers 32 "${passes_of[@]}" --row "PP2 M8" \
    --row "PP2 M16" --row "PP2 VPP2 M8" --row "PP2 VPP4 M4" --row "PP2 VPP4 M8" --row "PP2 VPP4 M16" --out "$OUT/bubble_llama.json"
  job bubble_meter "$limit" "${torchrun[@]}" benchmarks/bubble.py --model "$qwen" --layers 28 "${passes_of[@]}" \
    --row "PP2 VPP2 M16" --cost "$rounds" --out "$OUT/bubble_meter.json"
}

rows=()
row() { # note, options and keys: one measurement
  local note=$1
  shift
  rows+=(--row "$(printf '%q ' --note "$note" "$@")")
}

training() { # name, options: the rows in processes that they share
  local name=$1
  shift
  job "$name" "$limit" "${torchrun[@]}" benchmarks/throughput.py --model "$qwen" --parts update log_probs "${timed[@]}" \
    --out "$OUT/$name.json" "$@" "${rows[@]}"
  rows=()
}

tp2=(roles.actor.tp=2 roles.actor.sequence_parallel=true) pp2=(roles.actor.pp=2 roles.actor.split.by_cost=true)
vpp2=("${pp2[@]}" roles.actor.vpp=2)
# The same tokens in the same sequences for every layout: a data-parallel rank has half of them
sixteen=(--tokens "$tokens" --micro-batches 16) eight=(--tokens $((2 * tokens)) --longest $((tokens / 2)) --micro-batches 8)
shared=(--tokens "$tokens" --micro-batches 8)

update() { # what the forecast is calibrated on is in a file of its own; eight micro-batches at PP2 are the usual measure
  row '' "${sixteen[@]}" "${tp2[@]}"
  row '' "${eight[@]}" "${tp2[@]}"
  training update_tp2
  row '' "${eight[@]}" "${pp2[@]}"
  row '' "${sixteen[@]}" "${pp2[@]}"
  row '' "${eight[@]}" "${vpp2[@]}"
  row '' "${shared[@]}"
  training update_others
}

tune() { # what pays stays in the recipes and in update's layouts
  local quick=(--parts update --steps 5 --warmup 2)
  row "gradients added behind the products" "${eight[@]}" "${tp2[@]}" roles.actor.megatron.gradient_accumulation_fusion=false
  row "micro-batches of four times as many tokens" --tokens $((4 * tokens)) --longest $((tokens / 2)) --micro-batches 4 "${tp2[@]}"
  row "stages with as many layers" "${eight[@]}" roles.actor.pp=2
  row "no synchronisation after a transfer" "${eight[@]}" "${pp2[@]}" roles.actor.megatron.batch_p2p_sync=false
  row "transfers of warm-up and flush overlapped" "${eight[@]}" "${vpp2[@]}" \
    roles.actor.megatron.overlap_p2p_comm_warmup_flush=true
  row "gradients reduced behind the last backward" "${shared[@]}" roles.actor.overlap_grad_reduce=true
  training tune "${quick[@]}"
  [[ -z $DRY_RUN ]] || return 0 # the others are Transformer Engine's alone
  local activation=roles.actor.megatron.use_te_activation_func=false
  row "Megatron's compiled SwiGLU" "${eight[@]}" "${tp2[@]}" $activation
  row "Megatron's compiled SwiGLU" "${shared[@]}" $activation
  training tune_activation "${quick[@]}"
  row "one kernel rotates query and key" "${eight[@]}" "${tp2[@]}" roles.actor.megatron.fused_single_qkv_rope=true
  training tune_rope "${quick[@]}"
  row "CUDA graphs of layers" "${eight[@]}" "${pp2[@]}" roles.actor.megatron.cuda_graph_impl=local
  training tune_graphs "${quick[@]}"
}

rollout() { # 0.6 of a GPU for the engine, beside the actor's weights and gradients
  local rolls=("${torchrun[@]}" benchmarks/throughput.py --model "$qwen" --parts rollout "${rolled[@]}" "${timed[@]}")
  job rollout_tp2 "$limit" "${rolls[@]}" --out "$OUT/rollout_tp2.json" "${tp2[@]}" roles.rollout.tp=2 "${kv[@]}"
  job rollout_tp1 "$limit" "${rolls[@]}" --out "$OUT/rollout_tp1.json" "${tp2[@]}" roles.rollout.tp=1 "${kv[@]}"
}

unseen() {
  row '' --tokens $((2 * tokens)) --micro-batches 8 "${pp2[@]}"
  row '' --model "$llama" "${sixteen[@]}" "${pp2[@]}"
  row '' --model "$llama" "${sixteen[@]}" "${tp2[@]}"
  training unseen
}

forecast() { # calibrated on TP2 and a rollout of one model; `tune` has runs that a forecast cannot tell apart
  local name seen=() others=()
  for name in update_tp2 rollout_tp2 rollout_one_gpu; do [[ -f $OUT/$name.json ]] && seen+=("$OUT/$name.json"); done
  for name in update_others unseen rollout_tp1 bubble_qwen bubble_llama; do [[ -f $OUT/$name.json ]] && others+=("$OUT/$name.json"); done
  if [[ -z $LIST && forecast =~ $ONLY && (${#seen[@]} == 0 || ${#others[@]} == 0) ]]; then
    echo "forecast: $OUT lacks the results of update, rollout or unseen" && return 0
  fi
  TAIL=40 job forecast 120 "$PYTHON" benchmarks/forecast.py --calibrate "${seen[@]}" --compare "${others[@]}" \
    --save "$OUT/calibration.json" --out "$OUT/forecast.json"
}

one_step() { # name, layout
  job "$1" "$limit" "$PYTHON" benchmarks/whole_step.py --model "$qwen" --ranks 2 "${work[@]}" "${here[@]}" --layout "$2" \
    --out "$OUT/$1.json" "${kv[@]}"
}

step() {
  local room="roles.rollout.gpu_memory_utilization=0.4 roles.actor.micro_batch_tokens=4096" file files=()
  [[ -f $OUT/calibration.json ]] && here+=(--calibration "$OUT/calibration.json")
  one_step step_planner planner
  one_step step_tp2 "TP2 to TP2: roles.actor.tp=2 roles.actor.sequence_parallel=true roles.rollout.tp=2 $room"
  one_step step_pp2 "PP2 to TP2: roles.actor.pp=2 roles.actor.split.by_cost=true roles.rollout.tp=2 $room"
  one_step step_dp2 "DP2 to TP1: roles.rollout.tp=1 $room"
  for file in "$OUT"/step_*.json; do [[ -f $file ]] && files+=("$file"); done
  [[ ${#files[@]} -gt 1 ]] && TAIL=40 job step 120 "$PYTHON" benchmarks/whole_step.py --with "${files[@]}"
}

for part in $parts; do "$part"; done
finish
