"""Decodes with the whole engine at several numbers of requests, and prints a JSON line for each, with its floor.

    python scripts/bench_decode.py --model scripts/models/Llama-3.1-8B --load-format dummy --requests 1 64 256

All requests have contexts that end with `--context` tokens, of which they draw the last `--new-tokens`. Their prompts
are computed before, once, and found again in the prefix cache, so that what is timed is decodes alone:

  step_ms         from one token of all requests to the next; the median of `--repeat` runs
  floor_ms        the least that it could take: the bytes of the weights and of the K and V that it reads ÷ `copy_gb_s`,
                  which is measured before
  of_floor        floor_ms ÷ step_ms
  output_tok_s    tokens a second of all requests
  launch_ms       how long the host takes to start a call (median); one call takes `steps_per_call` decode steps
  wait_ms         and how long it then waits for its tokens


With --timeline another line has `timeline_ms`: milliseconds of a step by kind of work, from a trace (`timeline.py`),
and `gaps`, step_ms less those in which the device was busy.

A line before has the prefill: `prompt_tok_s`, and `floor_tok_s` by 2 × weights × tokens ÷ the matmul rate. It is None
where the prompts took few steps.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections import Counter

import numpy as np
from bench_attention import Rates, measure_rates
from bench_throughput import Workload, environment, joint_decode_rate, replay
from timeline import seconds_by_kind, traced
from usage import count, usage_errors

from jaxpaged import Engine
from jaxpaged.batch import MOST_DRAWS, pick_bucket
from jaxpaged.memory import blocks_for
from jaxpaged.runner import DrawShape, PrefillShape, Shape


def make_prompts(num_requests: int, context: int, new_tokens: int, block_size: int, vocab_size: int) -> list[list[int]]:
    """Random prompts, one token longer than whole blocks: what is found again of them is all but the last token."""
    num_blocks = (context - new_tokens - 1) // block_size
    rng = np.random.default_rng(0)
    return rng.integers(3, vocab_size, (num_requests, num_blocks * block_size + 1)).tolist()


def workload(prompts: list[list[int]], max_tokens: int) -> Workload:
    return Workload("decode", prompts, [max_tokens] * len(prompts), temperature=0.0, ignore_eos=True)


def fill(engine: Engine, prompts: list[list[int]], rates: Rates) -> dict:
    """Computes all prompts; the line of it. The rate is the median over steps."""
    run, _ = replay(engine, workload(prompts, 1))
    counts = sorted(Counter(arrivals[0][0] for arrivals in run["arrivals"]).items())
    rates_of_steps = [n * len(prompts[0]) / (at - before) for (before, _), (at, n) in itertools.pairwise(counts)]
    rate = statistics.median(rates_of_steps) if len(rates_of_steps) > 2 else None
    floor = rates.matmul / (2 * num_multiplied(engine))
    of_floor = None if rate is None else round(rate / floor, 3)
    line = {"prefill": f"{len(prompts)}x{len(prompts[0])}", "prompt_tok_s": None if rate is None else round(rate)}
    return line | {"floor_tok_s": round(floor), "of_floor": of_floor}


def num_multiplied(engine: Engine) -> int:
    """Weights that a prompt's token is multiplied with: without those of the head, which only the last one needs."""
    model = engine.model_config
    return model.num_parameters - (2 - model.tie_word_embeddings) * model.vocab_size * model.hidden_size


def step_bytes(engine: Engine, num_requests: int, context: int) -> float:
    """Bytes of weights, of K and V of `context` tokens of each request; of embeddings that are no head some rows."""
    report, model = engine.memory_report(), engine.model_config
    itemsize = report.bytes_per_token // (2 * model.num_kv_heads * model.head_dim * model.num_layers)
    unread = 0 if model.tie_word_embeddings else model.vocab_size * model.hidden_size * itemsize
    return report.weights - unread + num_requests * context * report.bytes_per_token


def compile_steps(engine: Engine, numbers_of_requests: list[int], prompts: list[list[int]]):
    """Compiles the decode steps, and those that compute all prompts, in parallel."""
    shapes: list[Shape] = [decode_shape(engine, num_requests) for num_requests in numbers_of_requests]
    budget, length = engine.config.max_num_batched_tokens, len(prompts[0])
    num_full, num_last = divmod(len(prompts) * length, budget)
    # In each full step but the first two prompts may be in part.
    steps = [(budget, blocks_for(budget, length) + (i > 0)) for i in range(min(num_full, 2))]
    steps += [(num_last, blocks_for(num_last, length))] if num_last else []
    for num_tokens, num_requests in steps:
        shapes += prefill_shapes(engine, num_tokens, min(num_requests, len(prompts)))
    engine._live_runner.compiler.compile_all(shapes)


def prefill_shapes(engine: Engine, num_tokens: int, num_requests: int) -> tuple[PrefillShape, DrawShape]:
    buckets = engine._buckets
    t = pick_bucket(num_tokens, buckets.tokens, "tokens")
    b = pick_bucket(num_requests, buckets.prefill_requests(t), "requests")
    return PrefillShape(t, b), DrawShape(False, b, buckets.logprobs[0])


def decode_shape(engine: Engine, num_requests: int) -> DrawShape:
    buckets = engine._buckets
    return DrawShape(True, pick_bucket(num_requests, buckets.requests, "requests"), buckets.logprobs[0])


def timeline_ms(engine: Engine, work: Workload, step_ms: float) -> dict[str, float]:
    """Milliseconds of a step by kind, and gaps."""
    program = engine._live_runner.compiler.get(decode_shape(engine, len(work.prompts))).as_text()
    seconds = seconds_by_kind(traced(lambda: replay(engine, work)), [program])
    ms = {name: round(1e3 * value / work.max_tokens[0], 3) for name, value in seconds.items()}
    return ms | {"gaps": round(step_ms - ms["busy"], 3)}


def decode(engine: Engine, work: Workload, repeat: int, rates: Rates) -> dict:
    """The line of one number of requests. RuntimeError where steps computed more than a token of each."""
    prompts, new_tokens, rates_of_runs, records = work.prompts, work.max_tokens[0], [], []
    replay(engine, work)
    for _ in range(repeat):
        run, steps = replay(engine, work)
        if any(step["num_prefill_tokens"] > step["num_prefill_requests"] for step in steps):
            raise RuntimeError("prompts were not found in the prefix cache: the KV pool is too small for all of them")
        rates_of_runs.append(joint_decode_rate(run))
        records += steps
    rate = statistics.median(rates_of_runs)
    seconds = len(prompts) / rate
    context = len(prompts[0]) + new_tokens / 2
    floor = step_bytes(engine, len(prompts), context) / rates.copy
    ms = {name: round(1e3 * statistics.median(r[f"{name}_s"] for r in records), 3) for name in ("launch", "wait")}
    return {
        "requests": len(prompts),
        "context": len(prompts[0]) + new_tokens,
        "step_ms": round(1e3 * seconds, 3),
        "floor_ms": round(1e3 * floor, 3),
        "of_floor": round(floor / seconds, 3),
        "output_tok_s": round(rate, 1),
        "launch_ms": ms["launch"],
        "wait_ms": ms["wait"],
        "steps_per_call": round(statistics.mean(r["num_decode_steps"] for r in records), 2),
        "repeat": repeat,
    }


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--load-format", default="auto", help="dummy: random weights")
    parser.add_argument("--backend", default="auto", help="of attention")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--requests", type=count, nargs="+", default=[1, 64, 256])
    parser.add_argument("--context", type=int, default=640)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--batched-tokens", type=count, default=8192, help="the token budget of a step")
    parser.add_argument("--repeat", type=count, default=3)
    parser.add_argument("--timeline", action="store_true", help="trace steps as well, on a GPU or a CPU")
    parser.add_argument("--rate-size", type=count, metavar="MB", default=1024, help="see bench_attention.py")
    args = parser.parse_args()
    if args.new_tokens < MOST_DRAWS + 2:
        parser.error(f"--new-tokens {args.new_tokens} must be {MOST_DRAWS + 2} or more")
    if args.context < args.new_tokens + 33:
        parser.error(f"--context {args.context} must be 33 or more beyond --new-tokens {args.new_tokens}")
    return args


def main() -> int:
    args = parse_args()
    most, block_size = max(args.requests), 16
    settings = {"load_format": args.load_format, "dtype": args.dtype, "attention_backend": args.backend}
    settings |= {"warmup": "lazy", "max_num_seqs": most, "max_model_len": args.context + 1, "swap_space": 0}
    settings |= {"block_size": block_size, "max_num_batched_tokens": max(args.batched_tokens, most)}
    settings["num_device_blocks"] = most * (blocks_for(args.context + 1, block_size) + 1)
    start = time.perf_counter()
    with usage_errors():
        engine = Engine(args.model, **settings)
    with engine:
        rates = measure_rates(engine.config.dtype, args.rate_size)
        where = {"model": str(args.model), "backend": engine.config.attention_backend, **environment(engine)}
        where |= {"copy_gb_s": round(rates.copy / 1e9, 2), "matmul_tflop_s": round(rates.matmul / 1e12, 3)}
        where |= {"xla_flags": os.environ["XLA_FLAGS"]} if os.environ.get("XLA_FLAGS") else {}
        prompts = make_prompts(most, args.context, args.new_tokens, block_size, engine.model_config.vocab_size)

        def report(line: dict):
            print(json.dumps(line | where | {"at_s": round(time.perf_counter() - start, 1)}), flush=True)

        compile_steps(engine, args.requests, prompts)
        report(fill(engine, prompts, rates))
        step_ms = {}
        for num_requests in args.requests:
            line = decode(engine, workload(prompts[:num_requests], args.new_tokens), args.repeat, rates)
            step_ms[num_requests] = line["step_ms"]
            report(line)
        for num_requests in args.requests if args.timeline else ():  # after all that a trace is not needed for
            work = workload(prompts[:num_requests], args.new_tokens)
            ms = timeline_ms(engine, work, step_ms[num_requests])
            report({"requests": num_requests, "timeline_ms": ms})
    return 0


if __name__ == "__main__":
    sys.exit(main())
