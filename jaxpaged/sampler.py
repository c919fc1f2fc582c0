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
    greedy_b = _argmax(logits_bv)
    is_sampled_b = rows.temperature_b > 0
    drawn_b = lax.cond(jnp.any(is_sampled_b), _draw, lambda *_: greedy_b, logits_bv, rows, position_b)
    return jnp.where(is_sampled_b, drawn_b, greedy_b)


def draw_keys(rows: SamplingRows, position_b: jax.Array, purpose: int) -> jax.Array:
    """The key of each row's draw: the seed's two words, then child, position and purpose folded in."""
    words = rows.seed_b2[:, 0], rows.seed_b2[:, 1]
    for number_b in rows.child_b, position_b, jnp.full_like(position_b, purpose):
        words = _fold_in(*words, number_b)
    return jax.random.wrap_key_data(jnp.stack(words, axis=-1), impl="threefry2x32")


def token_logprobs(logits_bv: jax.Array, token_b: jax.Array, num_top: int):
    """Log-probabilities: (of `token_b` [b], their ranks [b], ids [b, k] and values [b, k] of the most probable).

    A rank counts the tokens at least as probable.
    """
    total_b = jax.nn.logsumexp(logits_bv, axis=-1)
    chosen_b1 = jnp.take_along_axis(logits_bv, token_b[:, None], axis=-1)
    rank_b = jnp.sum(logits_bv >= chosen_b1, axis=-1, dtype=jnp.int32)
    top_bk, id_bk = lax.top_k(logits_bv, num_top)
    return chosen_b1[:, 0] - total_b, rank_b, id_bk.astype(jnp.int32), top_bk - total_b[:, None]


def processed_logits(logits_bv: jax.Array, rows: SamplingRows, token_b: jax.Array) -> jax.Array:
    """What a row's token was drawn from [b, v]: logits over temperature, −inf where a truncation leaves a token out.

    `token_b`, which was drawn, is in, though rounding may put it on the other side of the cut here.
    """
    scaled_bv, is_filtered_b = _scaled(logits_bv, rows)
    cut_b = lax.cond(
        jnp.any(is_filtered_b),
        lambda: _cut_vocabulary(scaled_bv, rows, is_filtered_b),
        lambda: jnp.full_like(rows.top_p_b, -jnp.inf),
    )
    drawn_b1 = jnp.take_along_axis(scaled_bv, token_b[:, None], axis=-1)
    is_out_bv = is_filtered_b[:, None] & (scaled_bv < jnp.minimum(cut_b[:, None], drawn_b1))
    return jnp.where(is_out_bv, -jnp.inf, scaled_bv)


def _scaled(logits_bv, rows: SamplingRows) -> tuple[jax.Array, jax.Array]:
    """(logits over temperature, 0 the largest [b, v], whether a truncation leaves out tokens [b])."""
    is_sampled_b = rows.temperature_b > 0
    is_filtered_b = is_sampled_b & ((rows.top_k_b > 0) | (rows.top_p_b < 1) | (rows.min_p_b > 0))
    temperature_b1 = jnp.where(is_sampled_b, rows.temperature_b, 1.0)[:, None]
    return (logits_bv - logits_bv.max(-1, keepdims=True)) / temperature_b1, is_filtered_b


def _draw(logits_bv, rows: SamplingRows, position_b) -> jax.Array:
    batch, num_tokens = logits_bv.shape
    is_sampled_b = rows.temperature_b > 0
    scaled_bv, is_filtered_b = _scaled(logits_bv, rows)
    key_b = draw_keys(rows, position_b, PURPOSE_SAMPLE)
    num_candidates = min(_NUM_CANDIDATES, num_tokens)

    def candidates():
        top_bc, id_bc = lax.top_k(scaled_bv, num_candidates)
        return top_bc, id_bc, *_cut_candidates(top_bc, scaled_bv, rows)

    def no_candidates():
        zeros_bc = jnp.zeros((batch, num_candidates))
        return zeros_bc, zeros_bc.astype(jnp.int32), jnp.full(batch, -jnp.inf), jnp.zeros(batch, bool)

    top_bc, id_bc, cut_b, is_covered_b = lax.cond(jnp.any(is_filtered_b), candidates, no_candidates)

    def draw_candidates():
        noisy_bc = jnp.where(top_bc >= cut_b[:, None], top_bc + _gumbel_of(key_b, id_bc), -jnp.inf)
        return _argmax(noisy_bc, id_bc)

    def draw_vocabulary():
        is_uncut_b = is_filtered_b & ~is_covered_b
        all_cut_b = lax.cond(
            jnp.any(is_uncut_b), lambda: _cut_vocabulary(scaled_bv, rows, is_uncut_b), lambda: jnp.full(batch, -jnp.inf)
        )
        kept_bv = scaled_bv >= jnp.where(is_uncut_b, all_cut_b, cut_b)[:, None]
        noisy_bv = jnp.where(kept_bv, scaled_bv + _gumbel(key_b, num_tokens), -jnp.inf)
        return _argmax(noisy_bv)

    return lax.cond(jnp.all(is_covered_b | ~is_sampled_b), draw_candidates, draw_vocabulary)


def _argmax(value_bx: jax.Array, id_bx: jax.Array | None = None) -> jax.Array:
    """The id of each row's largest value, of equals the lowest id [b]; without ids: the index.

    Two plain reductions: XLA:CPU does not vectorize jnp.argmax, nor what it fuses into it (the noise).
    """
    if id_bx is None:
        id_bx = jnp.broadcast_to(jnp.arange(value_bx.shape[-1], dtype=jnp.int32), value_bx.shape)
    return jnp.where(value_bx < value_bx.max(-1, keepdims=True), jnp.iinfo(jnp.int32).max, id_bx).min(-1)


def _cut_candidates(top_bc, scaled_bv, rows: SamplingRows) -> tuple[jax.Array, jax.Array]:
    """(the least scaled logit that is kept [b], whether `top_bc` holds every token that is kept [b]).

    `top_bc`: the largest of `scaled_bv`, in descending order. Where not all that is kept is held, the cut is void.
    """
    num_shown, num_tokens = top_bc.shape[-1], scaled_bv.shape[-1]
    kth_b = jnp.take_along_axis(top_bc, jnp.clip(rows.top_k_b - 1, 0, num_shown - 1)[:, None], axis=-1)[:, 0]
    has_kth_b = (rows.top_k_b > 0) & (rows.top_k_b <= num_shown)
    floor_b = jnp.maximum(jnp.log(rows.min_p_b), jnp.where(has_kth_b, kth_b, -jnp.inf))

    mass_bc = jnp.where(top_bc >= floor_b[:, None], jnp.exp(top_bc), 0)
    total_b = jnp.sum(jnp.where(scaled_bv >= floor_b[:, None], jnp.exp(scaled_bv), 0), axis=-1)
    mass_before_bc = jnp.cumsum(mass_bc, axis=-1) - mass_bc
    is_kept_bc = (mass_bc > 0) & (mass_before_bc < (rows.top_p_b * total_b)[:, None])
    # The first token (scaled logit 0) is always kept, even where top_p × total underflows.
    nucleus_b = jnp.min(jnp.where(is_kept_bc, top_bc, 0), axis=-1)
    cut_b = jnp.where(rows.top_p_b < 1, nucleus_b, floor_b)
    if num_shown == num_tokens:
        return cut_b, jnp.ones_like(has_kth_b)
    # min, not [:, -1]: XLA knows a top-k by the slice of its sort, and folding a second slice into it hides it.
    return cut_b, (top_bc.min(-1) < cut_b) & (rows.top_k_b <= num_shown)


def _cut_vocabulary(scaled_bv, rows: SamplingRows, is_wanted_b) -> jax.Array:
    """The least scaled logit that is kept [b], by the same rule but without sorting; void where not wanted."""
    most_b = jnp.where(is_wanted_b & (rows.top_k_b > 0), rows.top_k_b.astype(jnp.float32), jnp.inf)
    kth_b = _least_with_less_above(scaled_bv, jnp.ones_like(scaled_bv), most_b)
    floor_b = jnp.maximum(jnp.log(rows.min_p_b), kth_b)
    mass_bv = jnp.where(scaled_bv >= floor_b[:, None], jnp.exp(scaled_bv), 0)
    most_b = jnp.where(is_wanted_b & (rows.top_p_b < 1), rows.top_p_b * mass_bv.sum(-1), jnp.inf)
    return jnp.maximum(floor_b, _least_with_less_above(scaled_bv, mass_bv, most_b))


def _least_with_less_above(scaled_bv, weight_bv, most_b) -> jax.Array:
    """The least t in [−inf, 0] such that the tokens above t weigh less than `most_b` [b]; 0 where there is none.

    Bisection over the bit patterns of −t, which count upwards from 0 to infinity: exact, in 31 passes. Rows with an
    infinite limit take none.
    """

    def is_less(bits_b):
        t_b = -lax.bitcast_convert_type(bits_b, jnp.float32)
        return jnp.sum(jnp.where(scaled_bv > t_b[:, None], weight_bv, 0), axis=-1) < most_b

    def halve(bounds):
        low_b, high_b = bounds
        middle_b = low_b + (high_b - low_b + 1) // 2
        is_less_b = is_less(middle_b)
        return jnp.where(is_less_b, middle_b, low_b), jnp.where(is_less_b, high_b, middle_b - 1)

    infinity_b = lax.bitcast_convert_type(jnp.full_like(most_b, jnp.inf), jnp.int32)
    low_b = jnp.where(is_less(infinity_b), infinity_b, 0)
    low_b, _ = lax.while_loop(lambda bounds: jnp.any(bounds[0] < bounds[1]), halve, (low_b, infinity_b))
    return -lax.bitcast_convert_type(low_b, jnp.float32)


def _gumbel(key_b: jax.Array, num_tokens: int) -> jax.Array:
    """Gumbel noise of all tokens [b, v]. One threefry block gives two tokens theirs: 2i and 2i + 1."""
    block_v = jnp.arange(-(-num_tokens // 2))
    words_bv2 = jnp.stack(_blocks(key_b, jnp.broadcast_to(block_v, (key_b.shape[0], block_v.shape[0]))), axis=-1)
    return _to_gumbel(words_bv2.reshape(key_b.shape[0], -1)[:, :num_tokens])


def _gumbel_of(key_b: jax.Array, id_bc: jax.Array) -> jax.Array:
    """The same noise for some tokens only [b, c]."""
    even_bc, odd_bc = _blocks(key_b, id_bc // 2)
    return _to_gumbel(jnp.where(id_bc % 2 == 0, even_bc, odd_bc))


def _to_gumbel(bits: jax.Array) -> jax.Array:
    """−log(−log(1 − w)), w uniform in (0, 1) with all 32 bits near 0, where the largest noise comes from.

    With the usual 23 bits, tokens less probable than 1e-7 would never be drawn, and ties would favour low ids.
    """
    w = jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    return -jnp.log(-jnp.log1p(-w))


def _blocks(key_b: jax.Array, block_bx: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two random 32-bit words for each (key, block number) [b, x]."""
    words_b2 = jax.random.key_data(key_b)
    return _fold_in(words_b2[:, :1], words_b2[:, 1:], block_bx)


def _fold_in(key0, key1, number) -> tuple[jax.Array, jax.Array]:
    """The two words of `jax.random.fold_in`: Threefry-2x32 of (0, number), 20 rounds (Salmon et al., 2011).

    Written out, since on a CPU jax's own is a loop that takes several times as long to compile, and twice to run.
    """
    keys = key0, key1, key0 ^ key1 ^ jnp.uint32(0x1BD11BDA)
    x, y = keys[0], keys[1] + number.astype(jnp.uint32)
    for i in range(5):
        for rotation in ((13, 15, 26, 6), (17, 29, 16, 24))[i % 2]:
            x = x + y
            y = ((y << rotation) | (y >> (32 - rotation))) ^ x
        x, y = x + keys[(i + 1) % 3], y + keys[(i + 2) % 3] + jnp.uint32(i + 1)
    return x, y
