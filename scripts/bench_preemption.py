"""Swapping against recomputing: times a load that preempts, and prints a JSON line for each length of context.

    python scripts/bench_preemption.py --lengths 64 256 1024

`--num-requests` prompts of that length fill the pool; none of what they generate fits, so that the last is preempted by
the others and comes back when they are done. The same engine serves the load with preemption forced to swap, forced to
recompute, and left to the measured costs ("auto"), in turns, so that a noisy machine is noisy for all; of each the
fastest counts:

  swap_s, recompute_s, auto_s   seconds for the whole load
  auto_over_best                auto_s ÷ the smaller of the other two
  num_preemptions, num_blocks_swapped_out, num_blocks_swapped_in   of one run of each, in this order
  ms_per_swap, ms_per_token     what the engine has measured: a block there and back, a token computed again

The prefix cache is off: it would keep some of the blocks that a preempted request gave up, by chance.
"""

import argparse
import dataclasses
import json
import platform
import sys
import time

import jax
import numpy as np
from usage import count, usage_errors

from jaxpaged import Engine, SamplingParams

MODES = ("swap", "recompute", "auto")
COUNTERS = ("num_preemptions", "num_blocks_swapped_out", "num_blocks_swapped_in")


def serve(engine: Engine, mode: str, length: int, num_requests: int, max_tokens: int) -> tuple[float, list[int]]:
    """(seconds, how far each counter went) of the load in one mode."""
    scheduler, rng = engine._scheduler, np.random.default_rng(length)
    scheduler.config = dataclasses.replace(scheduler.config, preemption_mode=mode)
    prompts = rng.integers(3, engine.model_config.vocab_size, (num_requests, length)).tolist()
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    before, start = engine.stats(), time.perf_counter()
    engine.generate(prompts, params, use_tqdm=False)
    seconds, after = time.perf_counter() - start, engine.stats()
    return seconds, [after[name] - before[name] for name in COUNTERS]


def measure(engine: Engine, length: int, num_requests: int, max_tokens: int, repeat: int) -> dict:
    """The JSON line of one length. The first run of each mode compiles what it needs, and is not counted."""
    seconds, counts = {mode: [] for mode in MODES}, {}
    for i in range(repeat + 1):
        for mode in MODES:
            took, counts[mode] = serve(engine, mode, length, num_requests, max_tokens)
            if i > 0:
                seconds[mode].append(took)
    least = {mode: min(times) for mode, times in seconds.items()}
    costs = engine._scheduler.costs
    assert costs is not None, "nothing was swapped"
    return {
        "length": length,
        "num_requests": num_requests,
        **{f"{mode}_s": round(least[mode], 3) for mode in MODES},
        "auto_over_best": round(least["auto"] / min(least["swap"], least["recompute"]), 3),
        **{name: [counts[mode][i] for mode in MODES] for i, name in enumerate(COUNTERS)},
        "ms_per_swap": round(1e3 * costs.per_block, 4),
        "ms_per_token": round(1e3 * costs.per_token, 4),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", nargs="+", type=int, default=[64, 256, 1024], metavar="TOKENS")
    parser.add_argument("--num-requests", type=int, default=2, help="prompts of that length that the pool holds")
    parser.add_argument("--max-tokens", type=int, default=24, help="tokens that each request generates")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default=None)
    parser.add_argument("--repeat", type=count, default=3)
    args = parser.parse_args()
    if wrong := [length for length in args.lengths if length % 16 or length < 16]:
        parser.error(f"--lengths {wrong}: give multiples of 16, the tokens of a block")
    if args.num_requests < 2 or not 1 < args.max_tokens <= min(args.lengths):
        parser.error("preemption takes two requests or more, and --max-tokens from 2 to the least of --lengths")
    settings = {"dtype": args.dtype, "quantization": args.quantization, "enable_prefix_caching": False}
    settings |= {"num_decode_steps": 1, "max_num_seqs": args.num_requests}
    where = {"quantization": args.quantization, "platform": jax.default_backend()}
    where |= {"jax": jax.__version__, "python": platform.python_version()}
    for length in args.lengths:
        sizes = {"max_model_len": length + args.max_tokens, "num_device_blocks": args.num_requests * length // 16}
        with usage_errors():
            engine = Engine(args.model, **settings, **sizes)
        with engine:
            line = measure(engine, length, args.num_requests, args.max_tokens, args.repeat)
            print(json.dumps(line | {"dtype": engine.config.dtype} | where), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
