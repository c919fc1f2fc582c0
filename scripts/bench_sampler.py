"""What each sampling parameter costs: milliseconds of one draw, by vocabulary and number of requests.

One JSON line for each vocabulary and case: `ms` of the compiled draw after a prefill (`steps.draw_step`), on a model so
narrow that its head costs next to nothing, and `over_greedy_ms`. The least of `--repeat` times counts.
"adjusted" is greedy in a step with counts and masks, whose requests change nothing: what the steps of a batch cost
once one of its requests wants a penalty. "start of a row" is what it takes to tell the device of such a request.

    python scripts/bench_sampler.py --vocab 32000 128256 256000 --requests 64
"""

import argparse
import functools
import json
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from usage import count

from jaxpaged.adjustments import make_adjustments, row_values, start_row
from jaxpaged.models.weights import Weights
from jaxpaged.runner import compiler_options
from jaxpaged.step_data import MAX_BAD_WORDS, AdjustedRow, mask_words
from jaxpaged.steps import DrawOptions, RowState, draw_step, make_row_state

SAMPLED = {
    "greedy": {"temperature_r": 0.0},
    "temperature": {"temperature_r": 1.0},
    "top_k": {"temperature_r": 1.0, "top_k_r": 50},
    "top_p": {"temperature_r": 1.0, "top_p_r": 0.9},
    "min_p": {"temperature_r": 1.0, "min_p_r": 0.05},
    "top_k of 1000, top_p": {"temperature_r": 1.0, "top_k_r": 1000, "top_p_r": 0.9},
}

PLAIN = AdjustedRow(
    row=0,
    prompt_token_ids=tuple(range(500)),
    output_token_ids=tuple(range(400, 600)),
    stop_ids=(2,),
    min_tokens=0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    repetition_penalty=1.0,
    logit_bias={},
    allowed_token_ids=None,
    bad_words=(),
)

FEWEST_TOKENS = 1000
"""Of a vocabulary: cases name tokens up to it."""

ADJUSTED = {
    "adjusted": {},
    "presence_penalty": {"presence_penalty": 1.0},
    "frequency_penalty": {"frequency_penalty": 1.0},
    "repetition_penalty": {"repetition_penalty": 1.2},
    "min_tokens": {"min_tokens": 1000},
    "logit_bias": {"logit_bias": {5: 1.0}},
    "allowed_token_ids": {"allowed_token_ids": tuple(range(FEWEST_TOKENS))},
    "bad_words of one token": {"bad_words": ((7,),)},
    "bad_words of three tokens": {"bad_words": tuple((i, 598, 599) for i in range(MAX_BAD_WORDS))},
}


class Case:
    """A compiled draw and the state that it takes and gives back."""

    def __init__(self, weights: Weights, state: RowState, num_requests: int, num_logprobs: int | None, is_masked: bool):
        self.weights, self.state = weights, state
        options = DrawOptions(20 if num_logprobs is None else num_logprobs, False, (), False)
        step = jax.jit(
            functools.partial(draw_step, options=options), donate_argnums=1, compiler_options=compiler_options()
        )
        row_b = np.arange(num_requests, dtype=np.int32)
        hidden_bd = jax.random.normal(jax.random.key(1), (num_requests, weights.embed_vd.shape[1]))
        positions = np.full(num_requests, 700, np.int32)
        has_logprobs = np.bool_(num_logprobs is not None)
        self.step = functools.partial(step, weights)
        self.arguments = (hidden_bd, row_b, row_b, positions, np.ones_like(row_b), has_logprobs)
        if is_masked:
            self.arguments += (np.full((num_requests, mask_words(len(weights.embed_vd))), 0x55555555, np.int32),)

    def seconds(self) -> float:
        """Draws once and waits."""
        start = time.perf_counter()
        drawn, self.state = self.step(self.state, *self.arguments)
        drawn.token_ib.block_until_ready()
        return time.perf_counter() - start


def row_state(num_requests: int, **columns) -> RowState:
    state = make_row_state(num_requests + 1, 1, 0)
    return state.replace(**{name: jnp.full_like(getattr(state, name), value) for name, value in columns.items()})


def adjusted_state(num_requests: int, vocab: int, changes: dict) -> RowState:
    adjustments = make_adjustments(num_requests + 1, vocab)
    start = jax.jit(start_row, donate_argnums=0)
    values = row_values(AdjustedRow(**{name: getattr(PLAIN, name) for name in PLAIN.__slots__} | changes), vocab)
    for row in range(num_requests):
        adjustments = start(adjustments, np.int32(row), values)
    return row_state(num_requests, is_adjusted_r=True).replace(adjustments=adjustments)


def start_seconds(num_requests: int, vocab: int) -> float:
    """Telling the device of one row, from the lists of tokens on."""
    adjustments, start, times = make_adjustments(num_requests + 1, vocab), jax.jit(start_row, donate_argnums=0), []
    for _ in range(5):
        begin = time.perf_counter()
        adjustments = start(adjustments, np.int32(0), row_values(PLAIN, vocab))
        jax.block_until_ready(adjustments)
        times.append(time.perf_counter() - begin)
    return min(times)


def measure(vocab: int, num_requests: int, repeat: int, has_all_logprobs: bool) -> dict[str, float]:
    """Least seconds of each case."""
    embed_vd = jax.random.normal(jax.random.key(0), (vocab, 8))
    weights = Weights(embed_vd=embed_vd, layers=(), final_norm_d=jnp.ones(8))
    states = {name: functools.partial(row_state, num_requests, **columns) for name, columns in SAMPLED.items()}
    states |= {
        name: functools.partial(adjusted_state, num_requests, vocab, changes) for name, changes in ADJUSTED.items()
    }
    cases = {name: (state, None) for name, state in states.items()}
    cases |= {"logprobs of 20": (states["greedy"], 20), "structured_outputs": (states["greedy"], None)}
    if has_all_logprobs:
        cases["logprobs of all"] = (states["greedy"], vocab)
    seconds = {}
    for name, (state, num_logprobs) in cases.items():
        case = Case(weights, state(), num_requests, num_logprobs, is_masked=name == "structured_outputs")
        case.seconds()
        seconds[name] = min(case.seconds() for _ in range(repeat))
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", nargs="+", type=count, default=[32_000, 128_256, 256_000])
    parser.add_argument("--requests", type=count, default=64)
    parser.add_argument("--repeat", type=count, default=10)
    parser.add_argument("--all-logprobs", action="store_true", help="also those of the whole vocabulary")
    args = parser.parse_args()
    if min(args.vocab) < FEWEST_TOKENS:
        parser.error(f"--vocab {min(args.vocab)} must be {FEWEST_TOKENS} or more, for the tokens that cases name")
    for vocab in args.vocab:
        seconds = measure(vocab, args.requests, args.repeat, args.all_logprobs)
        for name, s in seconds.items():
            over = round(1e3 * (s - seconds["greedy"]), 2)
            print(
                json.dumps({"vocab": vocab, "case": name, "ms": round(1e3 * s, 2), "over_greedy_ms": over}), flush=True
            )
        start = round(1e3 * start_seconds(args.requests, vocab), 2)
        print(json.dumps({"vocab": vocab, "case": "start of a row", "ms": start}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
