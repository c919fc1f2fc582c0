"""Replays a workload of token ids through the engine and prints one JSON line of what it did.

    python scripts/bench_throughput.py scripts/workloads/W2.json --repeat 3

A workload has `prompt_token_ids`, `max_tokens` for each prompt, `temperature` and `ignore_eos`. All requests arrive at
once. Its twin, WORKLOAD_warm.json, runs first and untimed, so that every step it needs is compiled; the time that took
is in the line on its own. Figures are medians over the repeats, each with a cold prefix cache:

  output_tok_s, prompt_tok_s   tokens generated, and tokens of prompts, ÷ seconds from arrival to the last token
  first_token_s, inter_token_s  p50 and p99 over requests and over tokens
  host_ms_per_step             schedule + build + update, without the compiled step
  padding_waste                1 − scheduled ÷ padded tokens, over all timed runs
"""

import argparse
import json
import platform
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from jaxpaged import Engine, RequestOutputKind, SamplingParams


@dataclass(frozen=True)
class Workload:
    name: str
    prompts: list[list[int]]
    params: list[SamplingParams]


def read_workload(path: Path) -> Workload:
    """The workload, its requests' tokens told step by step and not made text of."""
    record = json.loads(path.read_text())
    params = [
        SamplingParams(
            temperature=record["temperature"],
            max_tokens=max_tokens,
            ignore_eos=record["ignore_eos"],
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        for max_tokens in record["max_tokens"]
    ]
    return Workload(record["name"], record["prompt_token_ids"], params)


def replay(engine: Engine, workload: Workload) -> dict[str, float]:
    """Serves the workload once; seconds and rates of this run."""
    engine.reset_prefix_cache()
    start = time.perf_counter()
    times: dict[str, list[float]] = {}
    for prompt, params in zip(workload.prompts, workload.params, strict=True):
        times[engine.add_request(prompt, params)] = []
    steps = []
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = time.perf_counter() - start
        steps.append(engine.last_step_stats())
        for output in outputs:
            times[output.request_id].append(now)
    seconds = time.perf_counter() - start
    first = [at[0] for at in times.values()]
    gaps = np.concatenate([np.diff(at) for at in times.values()])
    return {
        "seconds": seconds,
        "output_tok_s": sum(map(len, times.values())) / seconds,
        "prompt_tok_s": sum(map(len, workload.prompts)) / seconds,
        "first_token_s_p50": float(np.percentile(first, 50)),
        "first_token_s_p99": float(np.percentile(first, 99)),
        "inter_token_s_p50": float(np.percentile(gaps, 50)) if len(gaps) else 0.0,
        "inter_token_s_p99": float(np.percentile(gaps, 99)) if len(gaps) else 0.0,
        "num_steps": len(steps),
        "host_ms_per_step": 1e3 * statistics.mean(s["duration_s"] - s["execute_s"] for s in steps),
    }


def measure(engine: Engine, path: Path, repeat: int) -> dict:
    """The JSON line's figures: medians over `repeat` runs after the warm-up."""
    workload = read_workload(path)
    start = time.perf_counter()
    replay(engine, read_workload(path.with_name(f"{path.stem}_warm.json")))
    replay(engine, workload)
    warm_up = time.perf_counter() - start
    before = engine.stats()
    runs = [replay(engine, workload) for _ in range(repeat)]
    after = engine.stats()
    scheduled, padded = (after[n] - before[n] for n in ("num_scheduled_tokens", "num_padded_tokens"))
    return {
        "workload": workload.name,
        **{name: round(statistics.median(run[name] for run in runs), 5) for name in runs[0]},
        "padding_waste": round(1 - scheduled / padded, 4),
        "num_preemptions": after["num_preemptions"] - before["num_preemptions"],
        "repeat": repeat,
        "warm_up_s": round(warm_up, 2),
        "compile_s": round(sum(step["seconds"] for step in after["compiled_steps"]), 2),
        "num_compiled": len(after["compiled_steps"]),
        "num_compiled_while_timed": len(after["compiled_steps"]) - len(before["compiled_steps"]),
    }


def environment(engine: Engine) -> dict:
    device = jax.devices()[0]
    return {
        "device": device.device_kind if device.platform != "cpu" else platform.processor() or platform.machine(),
        "platform": device.platform,
        "dtype": engine.config.dtype,
        "jax": jax.__version__,
        "python": platform.python_version(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="+", type=Path, metavar="WORKLOAD.json")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    with Engine(args.model, dtype=args.dtype) as engine:
        for path in args.workloads:
            print(json.dumps(measure(engine, path, args.repeat) | environment(engine)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
