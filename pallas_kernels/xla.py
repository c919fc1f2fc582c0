"""Paged attention for XLA alone: CPUs, and devices that Pallas does not reach.

Two forms, both looping over a few blocks at a time with online softmax, so that what is gathered stays in the cache
(gathering all blocks at once reads memory three times slower on a CPU) and the work follows the lengths at hand:

  decode   one query for each request; all requests advance together through their blocks;
  tiles    the queries of a request in tiles of up to 64, one tile after another through its blocks.

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
_TOKENS_PER_CHUNK_DECODE = 128
_TOKENS_PER_CHUNK_TILE = 128


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
    kv = _write(kv, k_tkh, v_tkh, query_start_b1, query_len_b, context_len_b, page_table_bp)
    attend = functools.partial(_attend, scale=scale, sliding_window=sliding_window, soft_cap=soft_cap)
    if is_decode:
        live_len_b = jnp.where(query_len_b == 1, context_len_b, 0)
        return _decode(q_tnh, kv, live_len_b, page_table_bp, attend), kv

    is_single_b = query_len_b == 1
    out_tnh = _tiles(
        q_tnh, kv, query_start_b1, jnp.where(is_single_b, 0, query_len_b), context_len_b, page_table_bp, attend
    )
    single_t = jnp.where(is_single_b, query_start_b1[:-1], q_tnh.shape[0])
    q_bnh = q_tnh.at[single_t].get(mode="fill", fill_value=0)
    out_bnh = _decode(q_bnh, kv, jnp.where(is_single_b, context_len_b, 0), page_table_bp, attend)
    return out_tnh.at[single_t].set(out_bnh, mode="drop"), kv


def request_of_token(query_start_b1: jax.Array, num_tokens: int) -> jax.Array:
    """For each packed token the index of its request [t]; padding belongs to the last."""
    request_t = jnp.searchsorted(query_start_b1, jnp.arange(num_tokens), side="right").astype(jnp.int32) - 1
    return jnp.minimum(request_t, query_start_b1.shape[0] - 2)


def _write(kv, k_tkh, v_tkh, query_start_b1, query_len_b, context_len_b, page_table_bp) -> HeadMajorKV:
    """The pool with K and V of the new tokens in their slots; padded tokens are dropped."""
    num_blocks, block_size = kv.k.shape[0], kv.k.shape[2]
    num_tokens = k_tkh.shape[0]
    request_t = request_of_token(query_start_b1, num_tokens)
    offset_t = jnp.arange(num_tokens) - query_start_b1[request_t]
    position_t = context_len_b[request_t] - query_len_b[request_t] + offset_t
    block_t = page_table_bp[request_t, position_t // block_size]
    block_t = jnp.where((offset_t >= 0) & (offset_t < query_len_b[request_t]), block_t, num_blocks)
    slot_t = position_t % block_size

    def put(pool, x_tkh):
        return pool.at[block_t, :, slot_t].set(x_tkh.astype(pool.dtype), mode="drop")

    return HeadMajorKV(put(kv.k, k_tkh), put(kv.v, v_tkh))


def _attend(carry: Any, q_xgh, k_xsh, v_xsh, visible_xgs, *, scale, sliding_window, soft_cap, distance_xgs):
    """One round of online softmax (arXiv:1805.02867) over a chunk of keys: (maximum, sum, weighted values), in f32."""
    max_xg, sum_xg, out_xgh = carry
    score_xgs = jnp.einsum("xgh,xsh->xgs", q_xgh, k_xsh, preferred_element_type=jnp.float32) * scale
    if soft_cap is not None:
        score_xgs = soft_cap * jnp.tanh(score_xgs / soft_cap)
    if sliding_window is not None:
        visible_xgs = visible_xgs & (distance_xgs < sliding_window)
    score_xgs = jnp.where(visible_xgs, score_xgs, _MASKED)
    new_max_xg = jnp.maximum(max_xg, score_xgs.max(-1))
    weight_xgs = jnp.where(visible_xgs, jnp.exp(score_xgs - new_max_xg[..., None]), 0)
    decay_xg = jnp.exp(max_xg - new_max_xg)
    value_xgh = jnp.einsum("xgs,xsh->xgh", weight_xgs.astype(v_xsh.dtype), v_xsh, preferred_element_type=jnp.float32)
    return new_max_xg, sum_xg * decay_xg + weight_xgs.sum(-1), out_xgh * decay_xg[..., None] + value_xgh


def _start(x: int, g: int, h: int):
    return jnp.full((x, g), _MASKED), jnp.zeros((x, g)), jnp.zeros((x, g, h))


def _finish(carry, dtype) -> jax.Array:
    """Weighted values over their weights; 0 where there was nothing to see."""
    _, sum_xg, out_xgh = carry
    return (out_xgh / jnp.where(sum_xg > 0, sum_xg, 1)[..., None]).astype(dtype)


def _padded_table(page_table_bp: jax.Array, blocks_per_chunk: int) -> jax.Array:
    """The page table widened to whole chunks; the added entries are masked by length."""
    width = page_table_bp.shape[1]
    return jnp.pad(page_table_bp, ((0, 0), (0, -width % blocks_per_chunk)))


def _decode(q_bnh, kv: HeadMajorKV, live_len_b, page_table_bp, attend) -> jax.Array:
    """Attention of one query for each request [b, n, h]; rows of length 0 give 0 and cost nothing."""
    b, n, h = q_bnh.shape
    k, s = kv.k.shape[1], kv.k.shape[2]
    per_chunk = max(1, _TOKENS_PER_CHUNK_DECODE // s)
    table = _padded_table(page_table_bp, per_chunk)
    q_xgh = q_bnh.reshape(b * k, n // k, h)

    def gather(pool, block_bc):
        return pool.at[block_bc].get(mode="promise_in_bounds").swapaxes(1, 2).reshape(b * k, per_chunk * s, h)

    def body(i, carry):
        block_bc = lax.dynamic_slice(table, (0, i * per_chunk), (b, per_chunk))
        position_s = i * per_chunk * s + jnp.arange(per_chunk * s)
        distance_bs = live_len_b[:, None] - 1 - position_s[None]
        distance_xgs = jnp.repeat(distance_bs, k, axis=0)[:, None]
        v_xsh = gather(kv.v, block_bc)
        v_xsh = jnp.where((distance_xgs >= 0).swapaxes(1, 2), v_xsh, jnp.zeros((), v_xsh.dtype))
        return attend(carry, q_xgh, gather(kv.k, block_bc), v_xsh, distance_xgs >= 0, distance_xgs=distance_xgs)

    num_chunks = -(-live_len_b.max() // (per_chunk * s))
    return _finish(lax.fori_loop(0, num_chunks, body, _start(b * k, n // k, h)), q_bnh.dtype).reshape(b, n, h)


def _tiles(q_tnh, kv: HeadMajorKV, query_start_b1, query_len_b, context_len_b, page_table_bp, attend) -> jax.Array:
    """Causal attention of requests' queries, tile by tile [t, n, h]; requests of query length 0 are left out.

    A tile's rows beyond its request's end hold garbage until the next tile, or the caller, overwrites them.
    """
    t, n, h = q_tnh.shape
    k, s = kv.k.shape[1], kv.k.shape[2]
    g, tile = n // k, min(_TILE, t)
    per_chunk = max(1, _TOKENS_PER_CHUNK_TILE // s)
    table = _padded_table(page_table_bp, per_chunk)
    q_padded = jnp.pad(q_tnh, ((0, tile), (0, 0), (0, 0)))
    last_tile_b = jnp.cumsum(-(-query_len_b // tile))
    key_s = jnp.arange(per_chunk * s)

    def gather(pool, block_c):
        return pool.at[block_c].get(mode="promise_in_bounds").swapaxes(0, 1).reshape(k, per_chunk * s, h)

    def one_tile(i, out):
        r = jnp.searchsorted(last_tile_b, i, side="right")
        done = (i - (last_tile_b[r] - -(-query_len_b[r] // tile))) * tile
        start = query_start_b1[r] + done
        first = context_len_b[r] - query_len_b[r] + done
        last = jnp.minimum(first + tile, context_len_b[r])
        q_kgh = lax.dynamic_slice(q_padded, (start, 0, 0), (tile, n, h))
        q_kgh = q_kgh.reshape(tile, k, g, h).transpose(1, 2, 0, 3).reshape(k, g * tile, h)
        position_g = jnp.tile(first + jnp.arange(tile), g)

        def body(c, carry):
            block_c = lax.dynamic_slice(table, (r, c * per_chunk), (1, per_chunk))[0]
            position_s = c * per_chunk * s + key_s
            distance_gs = position_g[:, None] - position_s[None]
            v_ksh = gather(kv.v, block_c)
            v_ksh = jnp.where((position_s < last)[None, :, None], v_ksh, jnp.zeros((), v_ksh.dtype))
            visible_gs = ((distance_gs >= 0) & (position_s < last)[None])[None]
            return attend(carry, q_kgh, gather(kv.k, block_c), v_ksh, visible_gs, distance_xgs=distance_gs[None])

        carry = lax.fori_loop(0, -(-last // (per_chunk * s)), body, _start(k, g * tile, h))
        out_qnh = _finish(carry, q_tnh.dtype).reshape(k, g, tile, h).transpose(2, 0, 1, 3).reshape(tile, n, h)
        return lax.dynamic_update_slice(out, out_qnh, (start, 0, 0))

    out = lax.fori_loop(0, last_tile_b[-1], one_tile, jnp.zeros_like(q_padded))
    return out[:t]
