"""Paged attention for XLA alone: CPUs, and devices that Pallas does not reach.

Two forms, both looping over a few blocks at a time with online softmax, so that what is gathered stays in the cache
(gathering all blocks at once reads memory three times slower on a CPU) and the work follows the lengths at hand:

  decode   one query for each request; a flat list of (request, chunk of its tokens), some pairs at a time. Chunks that
           all requests begin with (a shared prefix in the same blocks) are gathered once for all of them before that;
  tiles    the queries of a request in tiles of up to 64, or of 16 where it has no more, one tile after another through
           its blocks. Where the requests of a step can have many tokens each, tiles of up to 128.

A step that mixes prompt chunks and decodes uses both: requests with one query take the first, the others the second.
Scores of absent positions are masked, and their V is zero before the product, so that NaN in stale slots stays there.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gpu.layout import HeadMajorKV

_MASKED = -1e30
_TILE = 64
_SHORT_TILE = 16
_LONG_TILE = 128
_PAIRS = 16
_FEWEST_THAT_SHARE = 8
_TOKENS_PER_CHUNK_DECODE = 64
_TOKENS_PER_CHUNK_TILE = 128
_TOKENS_PER_CHUNK_SHARED = 128


def paged_attention(
    q_tnh: jax.Array,
    k_tkh: jax.Array,
    v_tkh: jax.Array,
    kv: HeadMajorKV,
    query_start_b1: jax.Array,
    context_len_b: jax.Array,
    page_table_bp: jax.Array,
    num_requests: jax.Array,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    is_decode: bool = False,
) -> tuple[jax.Array, HeadMajorKV]:
    """(out_tnh, kv) as `reference.paged_attention`, on the head-major layout.

    `is_decode` promises one query for each request, t = b. The pool is written in place where it is donated.
    """
    query_len_b = query_start_b1[1:] - query_start_b1[:-1]
    is_there_b = (jnp.arange(query_len_b.shape[0]) < num_requests) & (context_len_b > 0)
    query_len_b = jnp.where(is_there_b, query_len_b, 0)
    request_t = jnp.arange(q_tnh.shape[0]) if is_decode else request_of_token(query_start_b1, q_tnh.shape[0])
    slots = slot_of_token(request_t, query_start_b1, query_len_b, context_len_b, page_table_bp, kv)
    kv = write(kv, k_tkh, v_tkh, *slots)
    attend = functools.partial(_attend, scale=scale, sliding_window=sliding_window, soft_cap=soft_cap)
    if is_decode:
        live_len_b = jnp.where(query_len_b == 1, context_len_b, 0)
        return _decode(q_tnh, kv, live_len_b, page_table_bp, attend), kv

    is_single_b = query_len_b == 1
    many_len_b, out_tnh = jnp.where(is_single_b, 0, query_len_b), jnp.zeros_like(q_tnh)
    tiles = functools.partial(_tiles, q_tnh, kv, query_start_b1, context_len_b, page_table_bp, attend)
    if query_len_b.shape[0] * _SHORT_TILE >= q_tnh.shape[0] > _SHORT_TILE:  # else few requests are that short, or all
        is_short_b = many_len_b <= _SHORT_TILE
        out_tnh = tiles(jnp.where(is_short_b, many_len_b, 0), out_tnh, _SHORT_TILE)
        many_len_b = jnp.where(is_short_b, 0, many_len_b)
    has_long_requests = query_len_b.shape[0] * 2 * _LONG_TILE <= q_tnh.shape[0]
    out_tnh = tiles(many_len_b, out_tnh, _LONG_TILE if has_long_requests else _TILE)
    single_t = jnp.where(is_single_b, query_start_b1[:-1], q_tnh.shape[0])
    q_bnh = q_tnh.at[single_t].get(mode="fill", fill_value=0)
    out_bnh = _decode(q_bnh, kv, jnp.where(is_single_b, context_len_b, 0), page_table_bp, attend)
    return out_tnh.at[single_t].set(out_bnh, mode="drop"), kv


def request_of_token(query_start_b1: jax.Array, num_tokens: int) -> jax.Array:
    """For each packed token the index of its request [t]; padding belongs to the last."""
    # Comparing with all starts leaves no loop, which XLA would repeat in each layer.
    request_t = jnp.searchsorted(query_start_b1, jnp.arange(num_tokens), side="right", method="compare_all") - 1
    return jnp.minimum(request_t.astype(jnp.int32), query_start_b1.shape[0] - 2)


def slot_of_token(request_t, query_start_b1, query_len_b, context_len_b, page_table_bp, kv: HeadMajorKV):
    """(block_t, offset_t): where K and V of each new token go; for padded tokens a block behind the last."""
    num_blocks, block_size = kv.k.shape[0], kv.k.shape[2]
    offset_t = jnp.arange(request_t.shape[0]) - query_start_b1[request_t]
    position_t = context_len_b[request_t] - query_len_b[request_t] + offset_t
    block_t = page_table_bp[request_t, position_t // block_size]
    block_t = jnp.where((offset_t >= 0) & (offset_t < query_len_b[request_t]), block_t, num_blocks)
    return block_t, position_t % block_size


def write(kv: HeadMajorKV, k_tkh, v_tkh, block_t, offset_t, *, k_scale_k=None, v_scale_k=None) -> HeadMajorKV:
    """The pool with K and V of the new tokens in their slots; those of blocks that are not there are dropped.

    In place where the pool is donated: one scatter each for K and V, on CPUs and GPUs.
    """

    def put(pool, x_tkh, scale_k):
        return pool.at[block_t, :, offset_t].set(stored(x_tkh, scale_k, pool.dtype), mode="drop")

    return HeadMajorKV(put(kv.k, k_tkh, k_scale_k), put(kv.v, v_tkh, v_scale_k))


def stored(x_tkh: jax.Array, scale_k: jax.Array | None, dtype) -> jax.Array:
    """K or V as the pool keeps it: over its heads' scales, in 8 bits the nearest value, the largest for any beyond."""
    if scale_k is not None:
        x_tkh = x_tkh.astype(jnp.float32) / scale_k[None, :, None]
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.clip(jnp.round(x_tkh), -127, 127).astype(dtype)
    if jnp.dtype(dtype).itemsize == 1:
        largest = float(jnp.finfo(dtype).max)
        x_tkh = jnp.clip(x_tkh, -largest, largest)
    return x_tkh.astype(dtype)


def _gather(pool, block_xc, num_tokens_x) -> jax.Array:
    """K or V of chunks of c blocks, [x · k, c · s, h]; what lies behind a chunk's first `num_tokens_x` tokens is 0.

    Rows of s · h elements, and a mask on K too, though V alone needs one: in this form XLA:CPU moves whole vectors
    (masked loads), without the mask it moves elements one by one.
    """
    k, s, h = pool.shape[1:]
    x, c = block_xc.shape
    row_xkc = block_xc[:, None] * k + jnp.arange(k)[None, :, None]
    x_xkce = pool.reshape(-1, s * h).at[row_xkc].get(mode="promise_in_bounds")
    element_ce = jnp.arange(c * s * h).reshape(c, s * h)
    is_kept_xkce = element_ce[None, None] < num_tokens_x[:, None, None, None] * h
    return jnp.where(is_kept_xkce, x_xkce, jnp.zeros((), pool.dtype)).reshape(x * k, c * s, h)


def _attend(carry: Any, q_xgh, k_xsh, v_xsh, visible_xgs, *, scale, sliding_window, soft_cap, distance_xgs):
    """A carry (maximum of the scores, sum of the weights, weighted values; in f32) with one more chunk of keys."""
    score_xgs = jnp.einsum("xgh,xsh->xgs", q_xgh, k_xsh, preferred_element_type=jnp.float32) * scale
    if soft_cap is not None:
        score_xgs = soft_cap * jnp.tanh(score_xgs / soft_cap)
    if sliding_window is not None:
        visible_xgs = visible_xgs & (distance_xgs < sliding_window)
    score_xgs = jnp.where(visible_xgs, score_xgs, _MASKED)
    max_xg = score_xgs.max(-1)
    weight_xgs = jnp.where(visible_xgs, jnp.exp(score_xgs - max_xg[..., None]), 0)
    value_xgh = jnp.einsum("xgs,xsh->xgh", weight_xgs.astype(v_xsh.dtype), v_xsh, preferred_element_type=jnp.float32)
    return _merge(carry, (max_xg, weight_xgs.sum(-1), value_xgh))


def _merge(old: Any, new: Any):
    """The carry over the keys of both: online softmax (arXiv:1805.02867)."""
    max_xg = jnp.maximum(old[0], new[0])
    decay_old_xg, decay_new_xg = jnp.exp(old[0] - max_xg), jnp.exp(new[0] - max_xg)
    out_xgh = old[2] * decay_old_xg[..., None] + new[2] * decay_new_xg[..., None]
    return max_xg, old[1] * decay_old_xg + new[1] * decay_new_xg, out_xgh


def _start(*xg: int, h: int):
    return jnp.full(xg, _MASKED), jnp.zeros(xg), jnp.zeros((*xg, h))


def _finish(carry: Any, dtype) -> jax.Array:
    """Weighted values over their weights; 0 where there was nothing to see."""
    _, sum_xg, out_xgh = carry
    return (out_xgh / jnp.where(sum_xg > 0, sum_xg, 1)[..., None]).astype(dtype)


def _padded_table(page_table_bp: jax.Array, blocks_per_chunk: int) -> jax.Array:
    """The page table widened to whole chunks; the added entries are masked by length."""
    return jnp.pad(page_table_bp, ((0, 0), (0, -page_table_bp.shape[1] % blocks_per_chunk)))


def _decode(q_bnh, kv: HeadMajorKV, live_len_b, page_table_bp, attend) -> jax.Array:
    """Attention of one query for each request [b, n, h]; rows of length 0 give 0 and cost nothing.

    The pairs (request, chunk) stand in one list, request after request, and each round takes the next `pairs` of
    them, whoever they belong to: the cost follows the sum of the lengths, not the longest. A request's chunks are
    merged one by one and in order, so that its result does not depend on how its neighbours fill the rounds.
    """
    b, n, h = q_bnh.shape
    k, s = kv.k.shape[1], kv.k.shape[2]
    g, pairs, per_chunk = n // k, _PAIRS if b >= 8 else _PAIRS // 2, max(1, _TOKENS_PER_CHUNK_DECODE // s)
    chunk = per_chunk * s
    table = _padded_table(page_table_bp, per_chunk)
    q_bkgh = q_bnh.reshape(b, k, g, h)
    carry, num_shared = _start(b, k, g, h=h), 0
    if b >= _FEWEST_THAT_SHARE:
        num_shared = _num_shared_blocks(page_table_bp, live_len_b, s) // per_chunk
        carry = _decode_shared(q_bkgh, kv, live_len_b, page_table_bp, num_shared * chunk, attend)
    num_chunks_b = jnp.maximum(-(-live_len_b // chunk) - num_shared, 0)
    last_b = jnp.cumsum(num_chunks_b)

    def one_round(i, carry):
        pair_w = i * pairs + jnp.arange(pairs)
        is_pair_w = pair_w < last_b[-1]
        request_w = jnp.minimum((last_b[None] <= pair_w[:, None]).sum(1), b - 1)
        chunk_w = jnp.where(is_pair_w, num_shared + pair_w - (last_b - num_chunks_b)[request_w], 0)
        left_w = jnp.where(is_pair_w, live_len_b[request_w] - chunk_w * chunk, 0)
        block_wc = table[request_w[:, None], chunk_w[:, None] * per_chunk + jnp.arange(per_chunk)[None]]
        # Else XLA computes them again in each of the operations below.
        request_w, left_w, block_wc = lax.optimization_barrier((request_w, left_w, block_wc))
        distance_xgs = jnp.repeat(left_w - 1, k)[:, None, None] - jnp.arange(chunk)[None, None]
        q_xgh = q_bkgh[request_w].reshape(pairs * k, g, h)
        k_xsh, v_xsh = _gather(kv.k, block_wc, left_w), _gather(kv.v, block_wc, left_w)
        start = _start(pairs * k, g, h=h)
        chunks = attend(start, q_xgh, k_xsh, v_xsh, distance_xgs >= 0, distance_xgs=distance_xgs)
        chunks = jax.tree.map(lambda x: x.reshape(pairs, k, *x.shape[1:]), chunks)

        def one_pair(w, carry):
            old = jax.tree.map(lambda x: x[request_w[w]], carry)
            new = _merge(old, jax.tree.map(lambda x: x[w], chunks))
            return jax.tree.map(lambda x, y: lax.dynamic_update_index_in_dim(x, y, request_w[w], 0), carry, new)

        return lax.fori_loop(0, pairs, one_pair, carry)

    carry = lax.fori_loop(0, -(-last_b[-1] // pairs), one_round, carry)
    return _finish(carry, q_bnh.dtype).reshape(b, n, h)


def _num_shared_blocks(page_table_bp, live_len_b, block_size: int) -> jax.Array:
    """How many full blocks all requests of length above 0 begin with; 0 where there is one such request or none."""
    is_live_b = live_len_b > 0
    first = page_table_bp[jnp.argmax(is_live_b)]
    is_same_p = jnp.all((page_table_bp == first[None]) | ~is_live_b[:, None], axis=0)
    num_same = jnp.argmin(jnp.append(is_same_p, False))
    num_full = jnp.min(jnp.where(is_live_b, live_len_b, jnp.iinfo(jnp.int32).max)) // block_size
    return jnp.where(is_live_b.sum() > 1, jnp.minimum(num_same, num_full), 0)


def _decode_shared(q_bkgh, kv: HeadMajorKV, live_len_b, page_table_bp, num_tokens, attend):
    """The carry of all requests over their first `num_tokens` tokens, which are in the same blocks for all."""
    (b, k, g, h), s = q_bkgh.shape, kv.k.shape[2]
    per_chunk = max(1, _TOKENS_PER_CHUNK_SHARED // s)
    chunk, row = per_chunk * s, jnp.argmax(live_len_b > 0)
    table = _padded_table(page_table_bp, per_chunk)
    q_xgh = q_bkgh.transpose(1, 0, 2, 3).reshape(k, b * g, h)
    last_g1 = jnp.repeat(live_len_b - 1, g)[:, None]

    def one_chunk(c, carry):
        block_xc, left = lax.dynamic_slice(table, (row, c * per_chunk), (1, per_chunk)), num_tokens - c * chunk
        k_xsh, v_xsh = (_gather(pool, block_xc, left[None]) for pool in (kv.k, kv.v))
        visible_gs = (last_g1 >= 0) & (jnp.arange(chunk) < left)[None]
        distance_gs = last_g1 - (c * chunk + jnp.arange(chunk))[None]
        return attend(carry, q_xgh, k_xsh, v_xsh, visible_gs[None], distance_xgs=distance_gs[None])

    carry = lax.fori_loop(0, -(-num_tokens // chunk), one_chunk, _start(k, b * g, h=h))
    return jax.tree.map(lambda x: x.reshape(k, b, g, *x.shape[2:]).swapaxes(0, 1), carry)


def _tiles(
    q_tnh, kv: HeadMajorKV, query_start_b1, context_len_b, page_table_bp, attend, query_len_b, out_tnh, tile: int
) -> jax.Array:
    """`out_tnh` with causal attention of requests' queries, tile by tile; requests of query length 0 are left out."""
    t, n, h = q_tnh.shape
    k, s = kv.k.shape[1], kv.k.shape[2]
    g, tile, per_chunk = n // k, min(tile, t), max(1, _TOKENS_PER_CHUNK_TILE // s)
    chunk = per_chunk * s
    table = _padded_table(page_table_bp, per_chunk)
    num_tiles, plan_i5 = _plan_tiles(query_start_b1, query_len_b, context_len_b, t, tile)

    def one_tile(i, out_tnh):
        r, begin, skipped, position, last = lax.dynamic_index_in_dim(plan_i5, i, keepdims=False)
        position_q = position + jnp.arange(tile)
        is_mine_q = (jnp.arange(tile) >= skipped) & (position_q < last)
        q_kgh = lax.dynamic_slice(q_tnh, (begin, 0, 0), (tile, n, h))
        q_kgh = q_kgh.reshape(tile, k, g, h).transpose(1, 2, 0, 3).reshape(k, g * tile, h)
        position_g = jnp.tile(position_q, g)[:, None]

        def one_chunk(c, carry):
            block_xc = lax.dynamic_slice(table, (r, c * per_chunk), (1, per_chunk))
            left = last - c * chunk
            distance_gs = position_g - (c * chunk + jnp.arange(chunk))[None]
            visible_gs = (distance_gs >= 0) & (jnp.arange(chunk) < left)[None]
            k_ksh, v_ksh = _gather(kv.k, block_xc, left[None]), _gather(kv.v, block_xc, left[None])
            return attend(carry, q_kgh, k_ksh, v_ksh, visible_gs[None], distance_xgs=distance_gs[None])

        carry = lax.fori_loop(0, -(-last // chunk), one_chunk, _start(k, g * tile, h=h))
        out_qnh = _finish(carry, q_tnh.dtype).reshape(k, g, tile, h).transpose(2, 0, 1, 3).reshape(tile, n, h)
        old_qnh = lax.dynamic_slice(out_tnh, (begin, 0, 0), (tile, n, h))
        out_qnh = jnp.where(is_mine_q[:, None, None], out_qnh, old_qnh)
        return lax.dynamic_update_slice(out_tnh, out_qnh, (begin, 0, 0))

    return lax.fori_loop(0, num_tiles, one_tile, out_tnh)


def _plan_tiles(query_start_b1, query_len_b, context_len_b, t: int, tile: int) -> tuple[jax.Array, jax.Array]:
    """(number of tiles, for each tile its request, first row, rows to leave alone, position of the first row, and the
    end of its keys [i, 5]). The same for all layers: XLA computes it once.
    """
    num_tiles_b = -(-query_len_b // tile)
    last_tile_b = jnp.cumsum(num_tiles_b)
    i = jnp.arange(t // tile + query_len_b.shape[0])
    r_i = jnp.minimum((last_tile_b[None] <= i[:, None]).sum(1), query_len_b.shape[0] - 1)
    start_i = query_start_b1[r_i] + (i - (last_tile_b - num_tiles_b)[r_i]) * tile
    # The last tile of all may not fit: it begins earlier, and leaves the rows before `start` as they are.
    begin_i = jnp.minimum(start_i, t - tile)
    position_i = context_len_b[r_i] - query_len_b[r_i] + begin_i - query_start_b1[r_i]
    end_i = jnp.minimum(position_i + tile, context_len_b[r_i])
    return last_tile_b[-1], jnp.stack([r_i, begin_i, start_i - begin_i, position_i, end_i], axis=1)
