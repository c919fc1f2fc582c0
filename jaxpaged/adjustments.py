"""What changes a row's logits before temperature and truncation: penalties, biases, tokens that are forbidden.

The state of rows [r] is dense over the vocabulary and lives on the device, which counts the tokens that it draws. It
is allocated when the first request needs it, in bytes set aside for it; steps without such requests do not take it.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpaged.config import LogitsProcessor
from jaxpaged.step_data import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, AdjustedRow

_IN_PROMPT, _ENDS = 1, 2
"""Bits of a token's flags: the prompt has it; it ends the request."""

_ANY = -1
"""In place of a bad word's token before its first: whatever the output has there."""

_NONE = -2
"""In place of a drawn token: the output is not as long as that. Of a bad word: there is none."""


@flax.struct.dataclass
class Adjustments:
    """Of each row: what is added to logits (−inf forbids a token), how often each token was drawn, flags of tokens,
    penalties; of each bad word of several tokens the last one, and those before it, right-aligned; the last tokens
    drawn, as many as a bad word has before its last."""

    bias_rv: jax.Array
    count_rv: jax.Array
    flags_rv: jax.Array
    min_tokens_r: jax.Array
    presence_r: jax.Array
    frequency_r: jax.Array
    repetition_r: jax.Array
    bad_last_rn: jax.Array
    bad_before_rnw: jax.Array
    recent_rw: jax.Array


@flax.struct.dataclass
class LogitsState:
    """What a logits processor is told of each row, beside its logits.

    Tokens in the prompt, and drawn so far; how often each token was drawn (None unless the engine was made with
    logits_processor_counts=True); the last token of prompt and output; the two 32-bit words of the request's seed.
    """

    prompt_len_b: jax.Array
    output_len_b: jax.Array
    output_counts_bv: jax.Array | None
    last_token_b: jax.Array
    seed_b2: jax.Array


def check_processors(processors: Sequence[LogitsProcessor], vocab_size: int, *, has_counts: bool):
    """ValueError for a logits processor that cannot be traced, or does not give back logits as it got them."""
    logits_bv = jax.ShapeDtypeStruct((2, vocab_size), jnp.float32)

    def some_state() -> LogitsState:
        length_b = jnp.zeros(2, jnp.int32)
        count_bv = jnp.zeros((2, vocab_size), jnp.int32) if has_counts else None
        return LogitsState(length_b, length_b, count_bv, length_b, jnp.zeros((2, 2), jnp.uint32))

    state = jax.eval_shape(some_state)
    for i, processor in enumerate(processors):
        try:
            out = jax.eval_shape(processor, logits_bv, state)
        except Exception as error:  # whatever the caller's function raises
            raise ValueError(f"logits_processors[{i}] cannot be traced: {type(error).__name__}: {error}") from error
        if (getattr(out, "shape", None), getattr(out, "dtype", None)) != (logits_bv.shape, logits_bv.dtype):
            raise ValueError(
                f"logits_processors[{i}] made {out} of logits of shape {logits_bv.shape} and dtype float32; it must "
                "return logits of the same shape and dtype"
            )


def make_adjustments(num_rows: int, vocab_size: int) -> Adjustments:
    """Rows that change nothing."""
    return Adjustments(
        bias_rv=jnp.zeros((num_rows, vocab_size), jnp.float32),
        count_rv=jnp.zeros((num_rows, vocab_size), jnp.int32),
        flags_rv=jnp.zeros((num_rows, vocab_size), jnp.uint8),
        min_tokens_r=jnp.zeros(num_rows, jnp.int32),
        presence_r=jnp.zeros(num_rows, jnp.float32),
        frequency_r=jnp.zeros(num_rows, jnp.float32),
        repetition_r=jnp.ones(num_rows, jnp.float32),
        bad_last_rn=jnp.full((num_rows, MAX_BAD_WORDS), _NONE, jnp.int32),
        bad_before_rnw=jnp.full((num_rows, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS - 1), _ANY, jnp.int32),
        recent_rw=jnp.full((num_rows, MAX_BAD_WORD_TOKENS - 1), _NONE, jnp.int32),
    )


def row_values(row: AdjustedRow, vocab_size: int) -> Adjustments:
    """A row's values as numpy arrays without the leading dimension."""
    bias_v, flags_v = np.zeros(vocab_size, np.float32), np.zeros(vocab_size, np.uint8)
    count_v = np.bincount(row.output_token_ids, minlength=vocab_size).astype(np.int32)
    if row.allowed_token_ids is not None:
        bias_v[:] = -np.inf
        bias_v[list(row.allowed_token_ids)] = 0
    for token_id, bias in row.logit_bias.items():
        bias_v[token_id] += bias
    bias_v[[word[0] for word in row.bad_words if len(word) == 1]] = -np.inf
    flags_v[list(row.prompt_token_ids)] |= _IN_PROMPT
    flags_v[list(row.stop_ids)] |= _ENDS

    bad_last_n = np.full(MAX_BAD_WORDS, _NONE, np.int32)
    bad_before_nw = np.full((MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS - 1), _ANY, np.int32)
    for n, word in enumerate(word for word in row.bad_words if len(word) > 1):
        bad_last_n[n] = word[-1]
        bad_before_nw[n, 1 - len(word) :] = word[:-1]
    recent_w = np.full(MAX_BAD_WORD_TOKENS - 1, _NONE, np.int32)
    recent = row.output_token_ids[1 - MAX_BAD_WORD_TOKENS :]
    recent_w[len(recent_w) - len(recent) :] = recent
    values: dict[str, Any] = {
        "bias_rv": bias_v,
        "count_rv": count_v,
        "flags_rv": flags_v,
        "min_tokens_r": np.int32(row.min_tokens),
        "presence_r": np.float32(row.presence_penalty),
        "frequency_r": np.float32(row.frequency_penalty),
        "repetition_r": np.float32(row.repetition_penalty),
        "bad_last_rn": bad_last_n,
        "bad_before_rnw": bad_before_nw,
        "recent_rw": recent_w,
    }
    return Adjustments(**values)


def start_row(adjustments: Adjustments, row, values: Adjustments) -> Adjustments:
    """The state with one row overwritten by `row_values`. Donate `adjustments`."""
    return jax.tree.map(lambda array, value: array.at[row].set(value), adjustments, values)


def count_tokens(adjustments: Adjustments, row_b, token_b) -> Adjustments:
    """The state after a draw. Rows out of range are dropped."""
    recent_bw = jnp.concatenate([adjustments.recent_rw[row_b, 1:], token_b[:, None]], axis=1)
    return replace(
        adjustments,
        count_rv=adjustments.count_rv.at[row_b, token_b].add(1, mode="drop"),
        recent_rw=adjustments.recent_rw.at[row_b].set(recent_bw, mode="drop"),
    )


def adjust(logits_bv: jax.Array, adjustments: Adjustments, row_b, output_len_b) -> jax.Array:
    """The rows' logits, changed in the order that `SamplingParams` documents. `output_len_b`: tokens drawn before."""
    rows = jax.tree.map(lambda array: array[row_b], adjustments)
    count_bv, flags_bv = rows.count_rv, rows.flags_rv
    is_early_b1 = (output_len_b < rows.min_tokens_r)[:, None]
    logits_bv = jnp.where(is_early_b1 & (flags_bv & _ENDS > 0), -jnp.inf, logits_bv + rows.bias_rv)
    logits_bv = lax.cond(jnp.any(rows.bad_last_rn >= 0), _without_bad_words, lambda x, _: x, logits_bv, rows)

    is_known_bv = (count_bv > 0) | (flags_bv & _IN_PROMPT > 0)
    repetition_b1 = rows.repetition_r[:, None]
    repeated_bv = jnp.where(logits_bv > 0, logits_bv / repetition_b1, logits_bv * repetition_b1)
    logits_bv = jnp.where(is_known_bv, repeated_bv, logits_bv)
    logits_bv = logits_bv - rows.frequency_r[:, None] * count_bv.astype(jnp.float32)
    return logits_bv - rows.presence_r[:, None] * (count_bv > 0).astype(jnp.float32)


def _without_bad_words(logits_bv, rows: Adjustments) -> jax.Array:
    """−inf for the last token of each bad word whose tokens before it are the last ones drawn."""
    is_next_bnw = (rows.bad_before_rnw == _ANY) | (rows.bad_before_rnw == rows.recent_rw[:, None])
    is_next_bn = jnp.all(is_next_bnw, axis=-1) & (rows.bad_last_rn >= 0)
    last_bn = jnp.where(is_next_bn, rows.bad_last_rn, logits_bv.shape[-1])
    return logits_bv.at[jnp.arange(logits_bv.shape[0])[:, None], last_bn].set(-jnp.inf, mode="drop")
