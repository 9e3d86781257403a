#!/usr/bin/env bash
# The figures on four and eight GPUs of one host.
#
#   bash benchmarks/run_many_gpus.sh --ranks 4 --out benchmarks/results/h200x4 [--parts "reshard bubble"] [--only REGEX] [--list]
#   bash benchmarks/run_many_gpus.sh --ranks 8 --out FOLDER --dry-run           the same commands on CPU ranks, with tiny models
#
# Parts, with what they take on H200s as far as two of them let one guess (nothing was run on more than two yet):
#   reshard   plain tensors as the destination: 7.6B, 32B and 30B-A3B shapes                       3 x 2 min
#   engine    7.6B into vLLM engines, 20 cycles of sleep and wake: the baseline `reload_weights`   3 min
#   bubble    the 32-layer Llama shape, PP = ranks, 1F1B and interleaved v = 2, 4, m = p, 2p, 4p   6 min
#   step      whole RL steps: the planner's first choice and two layouts picked by hand            7.6B 3 x 4 min, 32B 3 x 5 min
#   learning  GRPO on SmolLM2 with DP = ranks, held against the curves of one GPU                  4 min; models/smollm2 must be there
# --only takes the jobs whose names match, so that each fits a lease of a few minutes; --list prints them. PYTHON names the Python.
set -uo pipefail
every="reshard engine bubble step learning" ranks=''
source "$(dirname "${BASH_SOURCE[0]}")/jobs.sh"
options "$@"
[[ $ranks == 4 || $ranks == 8 ]] || { echo "error: --ranks=$ranks must be 4 or 8" >&2 && exit 2; }

# What a dry run has instead of the models and sizes; every option stays.
shapes=configs/models
seven_b=$shapes/qwen2_7b.json thirty_two_b=$shapes/qwen2_32b.json moe=$shapes/qwen3_30b_a3b.json llama=$shapes/llama3_8b.json
bucket=1024 repeat=10 cycles=20 sequences=$((8 * ranks > 32 ? 8 * ranks : 32)) length=2048 passes=5 rounds=10 limit=600
work=(--prompts 16 --samples 8 --prompt-tokens 255 --response-tokens 512) here=() kv=() learn=()
if [[ -n $DRY_RUN ]]; then
  seven_b=$shapes/tiny_wide.json thirty_two_b=$seven_b moe=$shapes/tiny_moe.json llama=$seven_b
  bucket=1 repeat=1 cycles=2 sequences=$((4 * ranks)) length=8 passes=1 rounds=1 limit=1500
  work=(--layers "$ranks" --prompts "$ranks" --samples 2 --prompt-tokens 9 --response-tokens 8 --steps 3)
  here=(--gpu H200) kv=(roles.rollout.gpu_memory_utilization=0.05)
  export CUDA_VISIBLE_DEVICES='' OMP_NUM_THREADS=1
fi
torchrun=("$PYTHON" -m torch.distributed.run --nproc-per-node "$ranks")

reshard() {
  local layouts=benchmarks/layouts/${ranks}_gpu wide='' how=(--bucket-mb "$bucket" --repeat "$repeat")
  [[ $ranks == 8 ]] && wide=_wide # TP8 needs eight KV heads: the 7.6B shape has four, the 32B one eight
  job "reshard_7b" "$limit" "${torchrun[@]}" benchmarks/reshard.py --model "$seven_b" "${how[@]}" \
    --sweep "$layouts.txt" --out "$OUT/reshard_7b.json"
  job "reshard_32b" "$limit" "${torchrun[@]}" benchmarks/reshard.py --model "$thirty_two_b" "${how[@]}" \
    --sweep "$layouts$wide.txt" --out "$OUT/reshard_32b.json"
  job "reshard_30b_a3b" "$limit" "${torchrun[@]}" benchmarks/reshard.py --model "$moe" "${how[@]}" \
    --sweep "${layouts}_moe.txt" --out "$OUT/reshard_30b_a3b.json"
}

engine() { # an engine lasts as long as its process: one rollout TP
  job "engine_7b" "$limit" "${torchrun[@]}" benchmarks/reshard.py --model "$seven_b" --bucket-mb "$bucket" --repeat "$repeat" \
    --sweep "benchmarks/layouts/${ranks}_gpu.txt" --only TP2 --engine --cycles "$cycles" --out "$OUT/engine_7b.json"
}

bubble() {
  local rows=() v m
  for v in 1 2 4; do
    for m in "$ranks" $((2 * ranks)) $((4 * ranks)); do rows+=(--row "PP$ranks VPP$v M$m"); done
  done
  job "bubble_pp$ranks" "$limit" "${torchrun[@]}" benchmarks/bubble.py --model "$llama" --layers 32 --split-loss 2 "${rows[@]}" \
    --sequences "$sequences" --length "$length" --repeat "$passes" --out "$OUT/bubble_pp$ranks.json"
  job "bubble_meter" "$limit" "${torchrun[@]}" benchmarks/bubble.py --model "$llama" --layers 32 --split-loss 2 \
    --row "PP$ranks VPP2 M$((2 * ranks))" --sequences "$sequences" --length "$length" --repeat "$passes" --cost "$rounds" \
    --out "$OUT/bubble_meter.json"
}

one_step() { # name, model, layout and options: a job of its own for each layout, as each takes minutes
  local name=$1 model=$2 layout=$3
  shift 3
  job "$name" $((2 * limit)) "$PYTHON" benchmarks/whole_step.py --ranks "$ranks" --model "$model" "$@" "${work[@]}" "${here[@]}" \
    --layout "$layout" --out "$OUT/$name.json" "${kv[@]}"
}

step() { # 32B with its optimizer takes 18 bytes a parameter: 40 of its 64 layers are what four H200s hold
  local half=$((ranks / 2)) dp=$((ranks / 4)) sp=roles.actor.sequence_parallel=true layers=64 big=() size file files
  [[ $ranks == 4 ]] && layers=40
  big=(--layers "$layers" --steps 7)
  local room="roles.rollout.gpu_memory_utilization=0.4 roles.actor.micro_batch_tokens=4096"
  one_step step_7b_planner "$seven_b" planner
  one_step step_7b_tp2 "$seven_b" "TP2 x DP$half to TP1: roles.actor.tp=2 $sp roles.rollout.tp=1 $room"
  one_step step_7b_pp2 "$seven_b" "PP2 x DP$half to TP2: roles.actor.pp=2 roles.actor.split.by_cost=true roles.rollout.tp=2 $room"
  one_step step_32b_planner "$thirty_two_b" planner "${big[@]}"
  one_step step_32b_tp4 "$thirty_two_b" "TP4 x DP$dp to TP2: roles.actor.tp=4 $sp roles.rollout.tp=2 $room" "${big[@]}"
  one_step step_32b_tp2pp2 "$thirty_two_b" \
    "TP2 x PP2 x DP$dp to TP2: roles.actor.tp=2 roles.actor.pp=2 $sp roles.rollout.tp=2 $room" "${big[@]}"
  for size in 7b 32b; do # no GPU is needed for the comparison
    files=()
    for file in "$OUT/step_${size}_"*.json; do [[ -f $file ]] && files+=("$file"); done
    [[ ${#files[@]} -gt 1 ]] && TAIL=40 job "step_$size" 120 "$PYTHON" benchmarks/whole_step.py --with "${files[@]}"
  done
}

learning() {
  if [[ -n $DRY_RUN && -z $LIST ]]; then
    [[ -e $OUT/tiny/config.json ]] || "$PYTHON" -m hybridflow.cli tiny-model --to "$OUT/tiny" > /dev/null 2>&1
    learn=(model.path="$OUT/tiny" model.dtype=float32 data.system_prompt='""' 'data.prompt_template="{expression}="' run.steps=2)
    learn+=(batch.prompts="$ranks" batch.samples_per_prompt=2 evaluation.problems=2 sampling.max_prompt_tokens=32)
    learn+=(sampling.max_response_tokens=6)
    learn+=(roles.actor.micro_batch_tokens=512 roles.actor.forward_micro_batch_tokens=512 roles.rollout.engine_args.async_scheduling=false "${kv[@]}")
  fi
  job "learning_dp$ranks" "$limit" "$PYTHON" benchmarks/learning.py --config configs/smollm2_chain_sum.yaml --seeds 1 2 \
    --against benchmarks/results/smollm2_h200.json --out "$OUT/learning_dp$ranks.json" cluster.ranks_per_node="$ranks" "${learn[@]}"
}

for part in $parts; do "$part"; done
finish
