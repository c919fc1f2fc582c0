"""The functions that are compiled. Each takes donated device state and gives it back; all else is read only.

Donated: the KV pool, and the per-request state of rows. Weights are arguments, so that new ones need no recompile.
"""

import functools
from dataclasses import replace

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from jaxpaged import sampler
from jaxpaged.config import ModelConfig
from jaxpaged.kv_cache import KVCache
from jaxpaged.models import decoder
from jaxpaged.models.weights import Weights
from jaxpaged.step_data import MAX_STOP_IDS, NOT_DRAWN
from pallas_kernels.xla import request_of_token


@flax.struct.dataclass
class RowState:
    """What the device keeps for each running request, and for the row of padding at the end."""

    page_table_rp: jax.Array
    last_token_r: jax.Array
    seed_r2: jax.Array
    child_r: jax.Array
    temperature_r: jax.Array
    top_k_r: jax.Array
    top_p_r: jax.Array
    min_p_r: jax.Array
    stop_id_rs: jax.Array


def make_row_state(num_rows: int, max_blocks: int, scratch_block: int) -> RowState:
    """Rows that belong to nobody: their blocks are the scratch block, they draw greedily."""
    return RowState(
        page_table_rp=jnp.full((num_rows, max_blocks), scratch_block, jnp.int32),
        last_token_r=jnp.zeros(num_rows, jnp.int32),
        seed_r2=jnp.zeros((num_rows, 2), jnp.uint32),
        child_r=jnp.zeros(num_rows, jnp.int32),
        temperature_r=jnp.zeros(num_rows, jnp.float32),
        top_k_r=jnp.zeros(num_rows, jnp.int32),
        top_p_r=jnp.ones(num_rows, jnp.float32),
        min_p_r=jnp.zeros(num_rows, jnp.float32),
        stop_id_rs=jnp.full((num_rows, MAX_STOP_IDS), NOT_DRAWN, jnp.int32),
    )


def update_rows(
    state: RowState, row_u, page_table_up, seed_u2, child_u, temperature_u, top_k_u, top_p_u, min_p_u, stop_id_us
) -> RowState:
    """State with whole rows overwritten; rows out of range are dropped. Donate `state`."""

    def put(array, values):
        return array.at[row_u].set(values, mode="drop")

    return replace(
        state,
        page_table_rp=put(state.page_table_rp, page_table_up),
        seed_r2=put(state.seed_r2, seed_u2),
        child_r=put(state.child_r, child_u),
        temperature_r=put(state.temperature_r, temperature_u),
        top_k_r=put(state.top_k_r, top_k_u),
        top_p_r=put(state.top_p_r, top_p_u),
        min_p_r=put(state.min_p_r, min_p_u),
        stop_id_rs=put(state.stop_id_rs, stop_id_us),
    )


def update_blocks(state: RowState, row_w, column_w, block_w) -> RowState:
    """State with single page-table entries overwritten; rows out of range are dropped. Donate `state`."""
    return replace(state, page_table_rp=state.page_table_rp.at[row_w, column_w].set(block_w, mode="drop"))


@flax.struct.dataclass
class Drawn:
    """What a step gives to the host: of each draw the tokens [i, b], and their log-probabilities.

    NOT_DRAWN stands where a request had come to its end, and for padding. `logprobs`: see `sampler.token_logprobs`;
    void unless they were asked for, and None after the runner has dropped them for that.
    """

    token_ib: jax.Array
    logprobs: tuple[jax.Array, ...] | None


def prefill_step(
    weights: Weights,
    kv: KVCache,
    state: RowState,
    token_t,
    row_b,
    query_start_b1,
    context_len_b,
    num_requests,
    has_logprobs,
    *,
    config: ModelConfig,
    backend: str,
    max_model_len: int,
    num_logprobs: int,
) -> tuple[Drawn, KVCache, RowState]:
    """One step over packed tokens of many requests. Donate `kv` and `state`.

    Draws a token after the last scheduled token of each request; a token of −1 stands for the row's last drawn one.
    `has_logprobs`: whether log-probabilities are wanted, of `num_logprobs` candidates and of the drawn tokens.
    """
    num_tokens, num_padded = token_t.shape[0], row_b.shape[0]
    request_t = request_of_token(query_start_b1, num_tokens)
    query_len_b = query_start_b1[1:] - query_start_b1[:-1]
    position_t = (context_len_b - query_len_b - query_start_b1[:-1])[request_t] + jnp.arange(num_tokens)
    tokens = decoder.PackedTokens(
        token_t=jnp.where(token_t < 0, state.last_token_r[row_b[request_t]], token_t),
        position_t=jnp.maximum(position_t, 0),
        query_start_b1=query_start_b1,
        context_len_b=context_len_b,
        page_table_bp=state.page_table_rp[row_b],
        num_requests=num_requests,
    )
    hidden_td, kv = decoder.forward(
        config, weights, tokens, kv, backend=backend, max_model_len=max_model_len, is_decode=False
    )
    last_b = jnp.clip(query_start_b1[1:] - 1, 0, num_tokens - 1)
    is_live_b = jnp.arange(num_padded) < num_requests
    logprobs = has_logprobs, num_logprobs
    drawn, state = _draw(weights, hidden_td[last_b], state, row_b, context_len_b, is_live_b, *logprobs)
    return jax.tree.map(lambda x: x[None], drawn), kv, state


def decode_step(
    weights: Weights,
    kv: KVCache,
    state: RowState,
    token_b,
    row_b,
    context_len_b,
    num_draws_b,
    has_logprobs,
    *,
    config: ModelConfig,
    backend: str,
    max_model_len: int,
    num_logprobs: int,
    max_draws: int,
) -> tuple[Drawn, KVCache, RowState]:
    """Computes one token of each request and draws `num_draws_b` after it, one after another. Donate `kv` and `state`.

    A request whose drawn token is one of its row's stop ids draws no more; when none draws any more, the step is over.
    Each draw but a request's last is computed in turn. Requests with a context length of 0 are padding.
    """
    num_requests = jnp.sum(context_len_b > 0, dtype=jnp.int32)

    def draw(kv, state: RowState, token_b, context_len_b):
        tokens = decoder.PackedTokens(
            token_t=jnp.where(token_b < 0, state.last_token_r[row_b], token_b),
            position_t=jnp.maximum(context_len_b - 1, 0),
            query_start_b1=jnp.minimum(jnp.arange(row_b.shape[0] + 1), num_requests),
            context_len_b=context_len_b,
            page_table_bp=state.page_table_rp[row_b],
            num_requests=num_requests,
        )
        hidden_bd, kv = decoder.forward(
            config, weights, tokens, kv, backend=backend, max_model_len=max_model_len, is_decode=True
        )
        logprobs = has_logprobs, num_logprobs
        drawn, state = _draw(weights, hidden_bd, state, row_b, context_len_b, context_len_b > 0, *logprobs)
        return drawn, kv, state

    if max_draws == 1:
        drawn, kv, state = draw(kv, state, token_b, context_len_b)
        return jax.tree.map(lambda x: x[None], drawn), kv, state

    def draw_again(carry):
        i, num_left_b, all_drawn, kv, state = carry
        is_live_b = num_left_b > 0
        given_b = jnp.where(i == 0, token_b, NOT_DRAWN)
        drawn, kv, state = draw(kv, state, given_b, jnp.where(is_live_b, context_len_b + i, 0))
        all_drawn = jax.tree.map(lambda all_ix, x: all_ix.at[i].set(x), all_drawn, drawn)
        is_stopped_b = jnp.any(drawn.token_ib[:, None] == state.stop_id_rs[row_b], axis=-1)
        return i + 1, jnp.where(is_stopped_b, 0, jnp.maximum(num_left_b - 1, 0)), all_drawn, kv, state

    shapes, _, _ = jax.eval_shape(draw, kv, state, token_b, context_len_b)
    none_drawn = jax.tree.map(lambda x: jnp.full((max_draws, *x.shape), NOT_DRAWN, x.dtype), shapes)
    num_left_b = jnp.maximum(num_draws_b, (context_len_b > 0).astype(jnp.int32))
    _, _, all_drawn, kv, state = lax.while_loop(
        lambda carry: jnp.any(carry[1] > 0), draw_again, (jnp.int32(0), num_left_b, none_drawn, kv, state)
    )
    return all_drawn, kv, state


def _draw(
    weights: Weights, hidden_bd, state: RowState, row_b, context_len_b, is_live_b, has_logprobs, num_logprobs: int
) -> tuple[Drawn, RowState]:
    """One draw, and the state with the rows' last tokens. A token drawn in the middle of a prompt is never read."""
    logits_bv = decoder.logits(weights, hidden_bd)
    rows = sampler.SamplingRows(
        seed_b2=state.seed_r2[row_b],
        child_b=state.child_r[row_b],
        temperature_b=state.temperature_r[row_b],
        top_k_b=state.top_k_r[row_b],
        top_p_b=state.top_p_r[row_b],
        min_p_b=state.min_p_r[row_b],
    )
    with jax.named_scope("sample"):
        token_b = sampler.sample(logits_bv, rows, context_len_b)
    target_b = jnp.where(is_live_b, row_b, state.last_token_r.shape[0])
    state = replace(state, last_token_r=state.last_token_r.at[target_b].set(token_b, mode="drop"))
    logprobs_of = functools.partial(sampler.token_logprobs, num_top=num_logprobs)
    shapes = jax.eval_shape(logprobs_of, logits_bv, token_b)
    no_logprobs = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    with jax.named_scope("logprobs"):
        logprobs = lax.cond(has_logprobs, logprobs_of, lambda *_: no_logprobs, logits_bv, token_b)
    return Drawn(jnp.where(is_live_b, token_b, NOT_DRAWN), logprobs), state
