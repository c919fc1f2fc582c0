"""A prefix that was evicted: times its return from the host, and prints a JSON line for each length.

    python scripts/bench_offloading.py --lengths 64 256 1024

Two prompts of that length are served in turns, with one new token each; the pool holds one of them, so that each evicts
the other. Of the seconds from a request to its token the least of `--repeat` counts:

  computed_s   nothing is known of the prompt
  host_s       it was evicted, and is on the host (kv_offloading_size), but for its first block, which is left on the
               device, and its last, whose last token is to be computed
  device_s     it was served just before, and is on the device
"""

import argparse
import json
import platform
import sys
import time

import jax
import numpy as np
from usage import count, usage_errors

from jaxpaged import Engine, SamplingParams

BLOCK_SIZE = 16


def seconds_to_token(engine: Engine, prompt: list[int], num_host_hits: int) -> float:
    """Seconds of a request of one token, `num_host_hits` tokens of which must come from the host."""
    before, start = engine.stats()["num_host_hit_tokens"], time.perf_counter()
    [output] = engine.generate([prompt], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    seconds = time.perf_counter() - start
    assert output.error is None and engine.stats()["num_host_hit_tokens"] - before == num_host_hits
    return seconds


def measure(engine: Engine, length: int, repeat: int) -> dict[str, float]:
    """The least seconds of each kind. What the first round compiles is not counted."""
    rng = np.random.default_rng(length)
    prompts = rng.integers(3, engine.model_config.vocab_size, (2, length)).tolist()
    seconds = {"computed_s": [], "host_s": [], "device_s": []}
    for _ in range(repeat + 1):
        engine.reset_prefix_cache()
        seconds["computed_s"].append(seconds_to_token(engine, prompts[0], 0))
        seconds_to_token(engine, prompts[1], 0)
        seconds["host_s"].append(seconds_to_token(engine, prompts[0], length - 2 * BLOCK_SIZE))
        seconds["device_s"].append(seconds_to_token(engine, prompts[0], 0))
    return {name: round(min(times[1:]), 4) for name, times in seconds.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", nargs="+", type=int, default=[64, 256, 1024], metavar="TOKENS")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default=None)
    parser.add_argument("--repeat", type=count, default=3)
    args = parser.parse_args()
    if wrong := [length for length in args.lengths if length % BLOCK_SIZE or length < 3 * BLOCK_SIZE]:
        parser.error(f"--lengths {wrong}: give multiples of {BLOCK_SIZE}, the tokens of a block, three blocks or more")
    settings = {"dtype": args.dtype, "quantization": args.quantization, "block_size": BLOCK_SIZE, "max_num_seqs": 1}
    where = {"quantization": args.quantization, "platform": jax.default_backend()}
    where |= {"jax": jax.__version__, "python": platform.python_version()}
    for length in args.lengths:
        sizes = {"max_model_len": length + 1, "num_device_blocks": length // BLOCK_SIZE + 1, "swap_space": 0}
        with usage_errors():
            engine = Engine(args.model, **settings, **sizes, kv_offloading_size=1)
        with engine:
            line = {"length": length, **measure(engine, length, args.repeat), "dtype": engine.config.dtype}
            print(json.dumps(line | where), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
