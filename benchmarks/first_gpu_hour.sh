#!/usr/bin/env bash
# The first 45 minutes on a rented GPU: runs what was never measured, writes figures to a folder and into docs/gpu.md.
#   benchmarks/first_gpu_hour.sh [--cpu] [--list] [FOLDER]
# --cpu: pocket sizes on the CPU, to test this script; docs/gpu.md stays as it is. --list: prints the commands only.
# A step that fails or exceeds its time limit is reported at the end (exit code 1); the others run.
set -euo pipefail
cd "$(dirname "$0")/.."

device=cuda list=false folder=
for word in "$@"; do
  case $word in
    --cpu) device=cpu ;;
    --list) list=true ;;
    -*) echo "error: $word: unknown; allowed: --cpu, --list and a folder" >&2; exit 2 ;;
    *) folder=$word ;;
  esac
done
folder=${folder:-runs/first_gpu_hour_$device}
[ ! -d .venv/bin ] || PATH=$PWD/.venv/bin:$PATH
failed=()

# step NAME SECONDS COMMAND ...: runs a command with a time limit; its output is FOLDER/NAME.txt.
step() {
  local name=$1 limit=$2 start=$SECONDS code=0
  shift 2
  printf '%s: %s\n' "$name" "$*"
  if $list; then return; fi
  printf '$ %s\n' "$*" >"$folder/$name.txt"
  timeout --kill-after=10 "$limit" "$@" </dev/null >>"$folder/$name.txt" 2>&1 || code=$?
  printf '%s %d %d\n' "$name" $code $((SECONDS - start)) >>"$folder/steps"
  if [ $code -ne 0 ]; then
    failed+=("$name (exit code $code)")
    rm -f "$folder/$name.json"
    mv "$folder/$name.txt" "$folder/$name.failed"
    tail -n 5 "$folder/$name.failed" | sed 's/^/    /'
  fi
  printf '  %d s\n' $((SECONDS - start))
}

train() { # NAME SECONDS OVERRIDES ...
  step "$1" "$2" sage-train "${@:3}"
}

passes() { # NAME CONTEXT
  step "$1" 240 python -m benchmarks.passes --shape "$shape" $layers --dtype "$dtype" --device $device --nodes "$nodes" \
    --widths 1,8 --context "$2" --repeats "$repeats" --out "$folder/$1.json"
}

parts() { # NAME TARGET ATTENTION MICRO_BATCH LENGTH OVERRIDES ...
  step "$1" 240 python -m benchmarks.training $layers --images 640x480 --length "$5" --device $device \
    --measured "$repeats" --out "$folder/$1.json" experiment=eagle3 target="$2" target.attention="$3" data.path=/no/data \
    train.global_batch_size="$4" train.micro_batch_size="$4" "${@:6}"
}

if [ $device = cuda ]; then
  shape=qwen2_5_vl_7b layers='' dtype=bf16 nodes=1,16,64 repeats=20 rows=1024
  contexts='512 2048 16384' batches='1 2 4' modes='eager captured' attentions='sdpa varlen'
else
  shape=qwen2_5_vl_3b layers='--layers 1' dtype=bf16 nodes=1,2 repeats=1 rows=32
  contexts=64 batches=1 modes=eager attentions=sdpa
fi
$list || mkdir -p "$folder"
run=$folder/run
[ -z "$folder" ] || $list || rm -rf "$run" "$folder"/zero* "$folder"/*.txt "$folder"/*.json "$folder"/*.failed "$folder/steps"

small="launch.device=$device launch.ranks=1 data=pocket data.num_examples=64 train.epochs=null train.global_batch_size=4
  train.micro_batch_size=2 decode.num_prompts=1 decode.max_new_tokens=8 decode.warmup=0 decode.baselines=[]
  decode.policies=[autoregressive,sage] target=pocket_qwen2_5_vl"

# Training: validations every five steps, then each ZeRO stage, stopped and resumed.
train run 300 $small draft=eagle target.dtype=$dtype train.precision=$dtype train.max_steps=10 train.validate_every=5 run.dir="$run"
for stage in 1 2 3; do
  zero=$folder/zero$stage
  train zero$stage 180 $small draft=eagle3 draft.draft_vocab_size=200 deepspeed=zero$stage train.max_steps=2 run.dir="$zero"
  train zero${stage}_resumed 180 --resume "$zero" train.max_steps=4
done

# Decoding: kernels and synchronizations, then every policy, eager and captured, greedy and sampled.
step check_device 180 sage-generate --check-device --draft "$run" --dtype $dtype --device $device
step prompts 60 sage-data action=convert data=pocket split=validation data.num_examples=40 \
  out="$folder/prompts.jsonl"
for mode in $modes; do
  for temperature in 0 1; do
    step texts_${mode}_$temperature 240 sage-bench --draft "$run" --prompts "$folder/prompts.jsonl" --num-prompts 1 \
      --policies chain,static,sage,cost_aware,eagle2,ddd,talon,spec_llava --baselines hf_generate --max-new-tokens 16 --repeats 1 \
      --dtype $dtype --device $device --passes $mode --temperature $temperature --out "$folder/texts_${mode}_$temperature.bench"
  done
done

# Passes of a 7B, parts of a training step, attention of unrolled steps.
for context in $contexts; do passes passes_$context "$context"; done
for attention in $attentions; do parts vision_$attention qwen2_5_vl_7b $attention 1 2048; done
for batch in $batches; do parts step_$batch qwen2_5_vl_7b auto "$batch" 2048; done
parts step_eager qwen2_5_vl_7b auto 1 2048 train.compile=none
parts step_llava llava_onevision_7b auto 1 4096 # an image takes 2,929 tokens
step chain_attention 120 python -m benchmarks.chain_attention --rows $rows --device $device --out "$folder/chain_attention.json"
if [ $device = cuda ]; then step tests 600 python -m pytest -q tests/device tests/passes tests/decoding/test_gpu.py; fi

page=docs/gpu.md
[ $device = cuda ] || page=$folder/gpu.md
step page 60 python -m benchmarks.gpu_page "$folder" --out "$page"
$list && exit 0
if [ ${#failed[@]} -gt 0 ]; then
  echo "failed, output in $folder/NAME.failed:"
  printf '  %s\n' "${failed[@]}"
  exit 1
fi
echo "all steps ran, $((SECONDS / 60)) minutes; figures: $folder"
