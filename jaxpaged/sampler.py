"""From logits to tokens, as pure functions on [batch, vocabulary].

A draw is argmax(logit / temperature + Gumbel noise) over the tokens that top-k, top-p and min-p keep. The noise of a
token is a function of (seed, child, position, token id) alone: it does not matter who the neighbours are, nor whether
all tokens are looked at or only the most probable ones. A batch without sampled rows costs one argmax.
"""

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

PURPOSE_SAMPLE = 0
"""The last number folded into a draw's key; others are for speculative decoding."""

_NUM_CANDIDATES = 256


@flax.struct.dataclass
class SamplingRows:
    """How each row draws: temperature 0 is greedy, top_k 0 and top_p 1 and min_p 0 keep everything."""

    seed_b2: jax.Array
    child_b: jax.Array
    temperature_b: jax.Array
    top_k_b: jax.Array
    top_p_b: jax.Array
    min_p_b: jax.Array


def sample(logits_bv: jax.Array, rows: SamplingRows, position_b: jax.Array) -> jax.Array:
    """One token for each row [b], int32. `position_b`: index in prompt + output of the token being drawn.

    Order of the truncations: temperature, min-p, top-k (ties with the k-th kept), top-p (of what is left).
    """
    greedy_b = jnp.argmax(logits_bv, axis=-1).astype(jnp.int32)
    is_sampled_b = rows.temperature_b > 0
    drawn_b = lax.cond(jnp.any(is_sampled_b), _draw, lambda *_: greedy_b, logits_bv, rows, position_b)
    return jnp.where(is_sampled_b, drawn_b, greedy_b)


def draw_keys(rows: SamplingRows, position_b: jax.Array, purpose: int) -> jax.Array:
    """The key of each row's draw: the seed's two words, then child, position and purpose folded in."""

    def key(seed_2, child, position):
        base = jax.random.wrap_key_data(seed_2, impl="threefry2x32")
        return jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(base, child), position), purpose)

    return jax.vmap(key)(rows.seed_b2, rows.child_b, position_b)


def token_logprobs(logits_bv: jax.Array, token_b: jax.Array, num_top: int):
    """Raw log-probabilities: (of `token_b` [b], their ranks [b], ids [b, k] and values [b, k] of the most probable).

    A rank counts the tokens at least as probable.
    """
    total_b = jax.nn.logsumexp(logits_bv, axis=-1)
    chosen_b1 = jnp.take_along_axis(logits_bv, token_b[:, None], axis=-1)
    rank_b = jnp.sum(logits_bv >= chosen_b1, axis=-1, dtype=jnp.int32)
    top_bk, id_bk = lax.top_k(logits_bv, num_top)
    return chosen_b1[:, 0] - total_b, rank_b, id_bk.astype(jnp.int32), top_bk - total_b[:, None]


def _draw(logits_bv, rows: SamplingRows, position_b) -> jax.Array:
    num_tokens = logits_bv.shape[-1]
    is_sampled_b = rows.temperature_b > 0
    temperature_b1 = jnp.where(is_sampled_b, rows.temperature_b, 1.0)[:, None]
    scaled_bv = (logits_bv - logits_bv.max(-1, keepdims=True)) / temperature_b1
    key_b = draw_keys(rows, position_b, PURPOSE_SAMPLE)

    top_bc, id_bc = lax.top_k(scaled_bv, min(_NUM_CANDIDATES, num_tokens))
    cut_b, is_covered_b = _cut(top_bc, scaled_bv, rows)
    is_covered_b |= ~is_sampled_b

    def from_candidates(_):
        noisy_bc = jnp.where(top_bc >= cut_b[:, None], top_bc + _gumbel_of(key_b, id_bc), -jnp.inf)
        return jnp.take_along_axis(id_bc, jnp.argmax(noisy_bc, axis=-1)[:, None], axis=-1)[:, 0].astype(jnp.int32)

    def from_vocabulary(_):
        is_filtered_b = (rows.top_k_b > 0) | (rows.top_p_b < 1)
        needs_sort_b = is_filtered_b & ~is_covered_b
        full_cut_b = lax.cond(
            jnp.any(needs_sort_b),
            lambda _: _cut(-jnp.sort(-scaled_bv, axis=-1), scaled_bv, rows)[0],
            lambda _: cut_b,
            None,
        )
        kept_bv = scaled_bv >= jnp.where(needs_sort_b, full_cut_b, cut_b)[:, None]
        noisy_bv = jnp.where(kept_bv, scaled_bv + _gumbel(key_b, num_tokens), -jnp.inf)
        return jnp.argmax(noisy_bv, axis=-1).astype(jnp.int32)

    return lax.cond(jnp.all(is_covered_b), from_candidates, from_vocabulary, None)


def _cut(sorted_bc, scaled_bv, rows: SamplingRows) -> tuple[jax.Array, jax.Array]:
    """(the smallest scaled logit that is kept [b], whether `sorted_bc` shows every token that is kept [b]).

    `sorted_bc` are the largest of `scaled_bv` (0 at most), in descending order: all of them, or the first few.
    """
    num_shown = sorted_bc.shape[-1]
    kth_b1 = jnp.take_along_axis(sorted_bc, jnp.clip(rows.top_k_b - 1, 0, num_shown - 1)[:, None], axis=-1)
    has_kth_b = (rows.top_k_b > 0) & (rows.top_k_b <= num_shown)
    floor_b = jnp.maximum(jnp.log(rows.min_p_b), jnp.where(has_kth_b, kth_b1[:, 0], -jnp.inf))

    is_left_bc = sorted_bc >= floor_b[:, None]
    mass_bc = jnp.where(is_left_bc, jnp.exp(sorted_bc), 0)
    total_b = jnp.sum(jnp.where(scaled_bv >= floor_b[:, None], jnp.exp(scaled_bv), 0), axis=-1)
    mass_before_bc = jnp.cumsum(mass_bc, axis=-1) - mass_bc
    is_kept_bc = is_left_bc & (mass_before_bc < (rows.top_p_b * total_b)[:, None])
    nucleus_b = jnp.min(jnp.where(is_kept_bc, sorted_bc, jnp.inf), axis=-1)
    cut_b = jnp.where(rows.top_p_b < 1, nucleus_b, floor_b)
    if num_shown == scaled_bv.shape[-1]:
        return cut_b, jnp.ones_like(has_kth_b)
    return cut_b, (sorted_bc[:, -1] < cut_b) & (rows.top_k_b <= num_shown)


def _gumbel(key_b: jax.Array, num_tokens: int) -> jax.Array:
    """Gumbel noise of all tokens [b, v]. One threefry block gives two tokens theirs: 2i and 2i + 1."""
    block_v = jnp.arange(-(-num_tokens // 2))
    words_bv2 = _blocks(key_b, jnp.broadcast_to(block_v, (key_b.shape[0], block_v.shape[0])))
    return _to_gumbel(words_bv2.reshape(key_b.shape[0], -1)[:, :num_tokens])


def _gumbel_of(key_b: jax.Array, id_bc: jax.Array) -> jax.Array:
    """The same noise for some tokens only [b, c]."""
    words_bc2 = _blocks(key_b, id_bc // 2)
    return _to_gumbel(jnp.where(id_bc % 2 == 0, words_bc2[..., 0], words_bc2[..., 1]))


def _blocks(key_b: jax.Array, block_bx: jax.Array) -> jax.Array:
    """Two random 32-bit words for each (key, block number) [b, x, 2]."""
    return jax.random.key_data(jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)))(key_b, block_bx))


def _to_gumbel(bits: jax.Array) -> jax.Array:
    """−log(−log u) with u uniform in (0, 1), the 23 upper bits centred so that neither end is reached."""
    u = ((bits >> 9).astype(jnp.float32) + 0.5) * (1 / 2**23)
    return -jnp.log(-jnp.log(u))
