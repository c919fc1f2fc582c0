"""The functions that are compiled. Each takes donated device state and gives it back; all else is read only.

Donated: the KV pool, and the per-request state of rows. Weights are arguments, so that new ones need no recompile.
"""

from dataclasses import dataclass, replace

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from jaxpaged import sampler
from jaxpaged.adjustments import Adjustments, LogitsState, adjust, count_tokens
from jaxpaged.config import LogitsProcessor, ModelConfig
from jaxpaged.kv_cache import KVCache
from jaxpaged.models import decoder
from jaxpaged.models.weights import Weights
from jaxpaged.step_data import MAX_STOP_IDS, NO_TOKEN, NOT_DRAWN
from pallas_kernels.xla import request_of_token


@flax.struct.dataclass
class RowState:
    """What the device keeps for each running request, and for the row of padding at the end.

    `adjustments`: None in steps that no adjusted row draws in.
    """

    page_table_rp: jax.Array
    last_token_r: jax.Array
    seed_r2: jax.Array
    child_r: jax.Array
    temperature_r: jax.Array
    top_k_r: jax.Array
    top_p_r: jax.Array
    min_p_r: jax.Array
    num_prompt_tokens_r: jax.Array
    stop_id_rs: jax.Array
    is_adjusted_r: jax.Array
    adjustments: Adjustments | None = None


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
        num_prompt_tokens_r=jnp.zeros(num_rows, jnp.int32),
        stop_id_rs=jnp.full((num_rows, MAX_STOP_IDS), NOT_DRAWN, jnp.int32),
        is_adjusted_r=jnp.zeros(num_rows, bool),
    )


def update_rows(
    state: RowState,
    row_u,
    page_table_up,
    seed_u2,
    child_u,
    temperature_u,
    top_k_u,
    top_p_u,
    min_p_u,
    num_prompt_tokens_u,
    stop_id_us,
    is_adjusted_u,
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
        num_prompt_tokens_r=put(state.num_prompt_tokens_r, num_prompt_tokens_u),
        stop_id_rs=put(state.stop_id_rs, stop_id_us),
        is_adjusted_r=put(state.is_adjusted_r, is_adjusted_u),
    )


def sampling_rows(state: RowState, row_b) -> sampler.SamplingRows:
    """How the requests of a step draw."""
    return sampler.SamplingRows(
        seed_b2=state.seed_r2[row_b],
        child_b=state.child_r[row_b],
        temperature_b=state.temperature_r[row_b],
        top_k_b=state.top_k_r[row_b],
        top_p_b=state.top_p_r[row_b],
        min_p_b=state.min_p_r[row_b],
    )


def update_blocks(state: RowState, row_w, column_w, block_w) -> RowState:
    """State with single page-table entries overwritten; rows out of range are dropped. Donate `state`."""
    return replace(state, page_table_rp=state.page_table_rp.at[row_w, column_w].set(block_w, mode="drop"))


@dataclass(frozen=True)
class DrawOptions:
    """What a step that draws is compiled for. `num_logprobs`: of how many candidates."""

    num_logprobs: int
    has_processed_logprobs: bool
    logits_processors: tuple[LogitsProcessor, ...]
    logits_processor_counts: bool


@flax.struct.dataclass
class Drawn:
    """What a step gives to the host: of each draw the tokens [i, b], and their log-probabilities.

    NOT_DRAWN stands where a request had come to its end, and for padding. `logprobs`: see `sampler.token_logprobs`;
    void unless they were asked for, and None after the runner has dropped them for that. `prompt_logprobs`: the same of
    prompt tokens, chunk after chunk.
    """

    token_ib: jax.Array
    logprobs: tuple[jax.Array, ...] | None
    prompt_logprobs: list[tuple[jax.Array, ...]] | None = None


@flax.struct.dataclass
class Computed:
    """What a prefill leaves to draw from: of all tokens, and of each request's last one, what the last norm gave;
    and those last tokens."""

    hidden_td: jax.Array
    hidden_bd: jax.Array
    token_b: jax.Array


def prefill_step(
    weights: Weights,
    kv: KVCache,
    state: RowState,
    token_t,
    row_b,
    query_start_b1,
    context_len_b,
    num_requests,
    *,
    config: ModelConfig,
    backend: str,
    max_model_len: int,
) -> tuple[Computed, KVCache]:
    """Computes packed tokens of many requests; a token of −1 stands for the row's last drawn one. Donate `kv`."""
    num_tokens = token_t.shape[0]
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
    return Computed(hidden_td, hidden_td[last_b], tokens.token_t[last_b]), kv


def draw_step(
    weights: Weights,
    state: RowState,
    hidden_bd,
    token_b,
    row_b,
    context_len_b,
    num_draws_b,
    has_logprobs,
    mask_bw=None,
    *,
    options: DrawOptions,
) -> tuple[Drawn, RowState]:
    """Draws a token after the last one, `token_b`, of each request whose `num_draws_b` is not 0. Donate `state`.

    `has_logprobs`: whether log-probabilities are wanted. `mask_bw`: the tokens that may be drawn, token i as bit
    i mod 32 of word i ÷ 32; None: all. Of the weights it needs those of the head alone.
    """
    drawn, state = _draw(
        weights, hidden_bd, state, token_b, row_b, context_len_b, num_draws_b > 0, has_logprobs, options, mask_bw
    )
    return jax.tree.map(lambda x: x[None], drawn), state


def head_of(weights: Weights) -> Weights:
    """The weights without their layers: all that logits need."""
    return replace(weights, layers=())


def prompt_logprobs_step(weights: Weights, hidden_td, index_p, token_p, *, num_logprobs: int) -> tuple[jax.Array, ...]:
    """`sampler.token_logprobs` of tokens that follow those at `index_p` in the prompt, from the raw logits."""
    return sampler.token_logprobs(decoder.logits(weights, hidden_td[index_p]), token_p, num_logprobs)


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
    max_draws: int,
    options: DrawOptions,
) -> tuple[Drawn, KVCache, RowState]:
    """Computes one token of each request and draws `num_draws_b` after it, one after another. Donate `kv` and `state`.

    A request whose drawn token is one of its row's stop ids draws no more; when none draws any more, the step is over.
    Each draw but a request's last is computed in turn. Requests with a context length of 0 are padding.
    """
    num_requests = jnp.sum(context_len_b > 0, dtype=jnp.int32)

    def draw(kv, state: RowState, token_b, context_len_b, is_drawn_b):
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
        drawn, state = _draw(
            weights, hidden_bd, state, tokens.token_t, row_b, context_len_b, is_drawn_b, has_logprobs, options
        )
        return drawn, kv, state

    if max_draws == 1:
        drawn, kv, state = draw(kv, state, token_b, context_len_b, num_draws_b > 0)
        return jax.tree.map(lambda x: x[None], drawn), kv, state

    def draw_again(carry):
        i, num_left_b, all_drawn, kv, state = carry
        given_b, is_drawn_b = jnp.where(i == 0, token_b, NOT_DRAWN), num_left_b > 0
        drawn, kv, state = draw(kv, state, given_b, jnp.where((i == 0) | is_drawn_b, context_len_b + i, 0), is_drawn_b)
        all_drawn = jax.tree.map(lambda all_ix, x: all_ix.at[i].set(x), all_drawn, drawn)
        is_stopped_b = jnp.any(drawn.token_ib[:, None] == state.stop_id_rs[row_b], axis=-1)
        is_stopped_b |= drawn.token_ib == NO_TOKEN
        return i + 1, jnp.where(is_stopped_b, 0, jnp.maximum(num_left_b - 1, 0)), all_drawn, kv, state

    shapes, _, _ = jax.eval_shape(draw, kv, state, token_b, context_len_b, num_draws_b > 0)
    none_drawn = jax.tree.map(lambda x: jnp.full((max_draws, *x.shape), NOT_DRAWN, x.dtype), shapes)
    _, _, all_drawn, kv, state = lax.while_loop(
        lambda carry: (carry[0] == 0) | jnp.any(carry[1] > 0),
        draw_again,
        (jnp.int32(0), num_draws_b, none_drawn, kv, state),
    )
    return all_drawn, kv, state


def _draw(
    weights: Weights,
    hidden_bd,
    state: RowState,
    last_token_b,
    row_b,
    context_len_b,
    is_drawn_b,
    has_logprobs,
    options: DrawOptions,
    mask_bw=None,
) -> tuple[Drawn, RowState]:
    """One draw after `last_token_b`, and the state with the rows' last tokens and counts."""
    raw_bv = decoder.logits(weights, hidden_bd)
    rows = sampling_rows(state, row_b)
    masked_bv = raw_bv if mask_bw is None else _masked(raw_bv, mask_bw)
    logits_bv = _adjusted(masked_bv, state, last_token_b, row_b, context_len_b, options)
    with jax.named_scope("sample"):
        token_b = sampler.sample(logits_bv, rows, context_len_b)
    with jax.named_scope("logprobs"):
        logprobs = _logprobs(raw_bv, logits_bv, rows, token_b, has_logprobs, options)

    target_b = jnp.where(is_drawn_b, row_b, state.last_token_r.shape[0])
    state = replace(state, last_token_r=state.last_token_r.at[target_b].set(token_b, mode="drop"))
    if state.adjustments is not None:
        state = replace(state, adjustments=count_tokens(state.adjustments, target_b, token_b))
    token_b = jnp.where(jnp.isfinite(logits_bv.max(-1)), token_b, NO_TOKEN)
    return Drawn(jnp.where(is_drawn_b, token_b, NOT_DRAWN), logprobs), state


def _masked(logits_bv, mask_bw) -> jax.Array:
    """−inf for tokens whose bit is not set."""
    is_allowed_bv = ((mask_bw[:, :, None] >> jnp.arange(32)[None, None]) & 1).reshape(len(mask_bw), -1)[
        :, : logits_bv.shape[-1]
    ]
    return jnp.where(is_allowed_bv > 0, logits_bv, -jnp.inf)


def _adjusted(given_bv, state: RowState, last_token_b, row_b, context_len_b, options: DrawOptions) -> jax.Array:
    """Logits after all that a request asks to be changed, then the engine's processors; `given_bv` itself for nothing.

    What is forbidden stays so, whatever a processor makes of it.
    """
    logits_bv, output_len_b = given_bv, context_len_b - state.num_prompt_tokens_r[row_b]
    if state.adjustments is not None:
        with jax.named_scope("adjust"):
            adjusted_bv = adjust(given_bv, state.adjustments, row_b, output_len_b)
            logits_bv = jnp.where(state.is_adjusted_r[row_b][:, None], adjusted_bv, given_bv)
    count_bv = None
    if options.logits_processor_counts and state.adjustments is not None:
        count_bv = state.adjustments.count_rv[row_b]
    logits_state = LogitsState(
        prompt_len_b=state.num_prompt_tokens_r[row_b],
        output_len_b=output_len_b,
        output_counts_bv=count_bv,
        last_token_b=last_token_b,
        seed_b2=state.seed_r2[row_b],
    )
    for processor in options.logits_processors:
        logits_bv = jnp.where(logits_bv == -jnp.inf, -jnp.inf, processor(logits_bv, logits_state))
    return logits_bv


def _logprobs(raw_bv, logits_bv, rows: sampler.SamplingRows, token_b, has_logprobs, options: DrawOptions):
    """`sampler.token_logprobs` of raw or processed logits; zeros where not wanted."""

    def logprobs_of(raw_bv, logits_bv, token_b):
        if options.has_processed_logprobs:
            raw_bv = sampler.processed_logits(logits_bv, rows, token_b)
        return sampler.token_logprobs(raw_bv, token_b, options.num_logprobs)

    shapes = jax.eval_shape(logprobs_of, raw_bv, logits_bv, token_b)
    no_logprobs = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return lax.cond(has_logprobs, logprobs_of, lambda *_: no_logprobs, raw_bv, logits_bv, token_b)
