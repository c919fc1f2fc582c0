"""Ragged paged attention for NVIDIA GPUs of compute capability 8.0 or newer: one kernel, on tiles of queries.

A tile is some consecutive queries of one request. One program takes a tile and a KV head: its rows are the tile's
queries times the query heads of the group, so that K and V are read once for all of them. Prompt chunks and decodes are
tiles of one launch, whose grid has as many programs as there can be tiles at most; those that are too many, like the
padding and requests that are not there, have no keys and write zeros, or nothing.

K and V come chunk by chunk: each row of a chunk is gathered from its block by address, so that the length of a chunk
does not depend on the block size. Scores, online softmax (arXiv:1805.02867) and the weighted sum are in float32.
New K and V are written before, by a scatter of XLA in place: one launch each, of work that is too small to matter.

In a decode of few requests there are fewer programs than the GPU has room for. Then each request's chunks are split
among several programs, whose outputs over their own keys are merged by a second kernel (arXiv:2311.01282), each
weighted by the sum of its weights, which the first one leaves as a logarithm.

What moves, per program: the keys that the tile sees, once, times 2 (K and V); with m query heads for each KV head, a
tile of j tokens does j × m operations for each byte of K and V in 16 bits. Decodes are bound by memory at any m that
models have; prompt tiles of 128 rows do 128 operations a byte, which an L2 cache must serve for the rest. All of this
is arithmetic: the kernel has been compiled and interpreted, and not been timed.

Letters beside those of the engine: i tiles, r rows of a tile, c tokens of a chunk, x splits. h is padded to a power of
two within the kernels.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.gpu import triton
from pallas_kernels.gpu.layout import HeadMajorKV
from pallas_kernels.xla import request_of_token, slot_of_token, write

MASKED = -1e30
LOG2_E = math.log2(math.e)
_FEWEST_ROWS = 16
_CHUNK_BYTES = 2**15
_PROGRAMS_TO_FILL = 512
"""Four for each of the 128 multiprocessors that a large GPU has, about: 108 in an A100, 132 in an H200."""
_MOST_SPLITS = 32


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
    k_scale_k: jax.Array | None = None,
    v_scale_k: jax.Array | None = None,
    is_decode: bool = False,
    num_rows: int | None = None,
    chunk: int | None = None,
    num_splits: int | None = None,
) -> tuple[jax.Array, HeadMajorKV]:
    """(out_tnh, kv) as `reference.paged_attention`, on the head-major layout; the pool is written in place when
    donated. Any block size, any head_dim up to 256.

    `is_decode` promises one query for each request, t = b. `num_rows` (of a tile: queries × query heads of a group),
    `chunk` (tokens at a time) and `num_splits` (of a decode), powers of two, are chosen by size unless given.
    ValueError for a pool in 8 bits whose offsets the lowering would compute in too few bits.
    """
    (t, n, h), (b, k) = q_tnh.shape, (context_len_b.shape[0], k_tkh.shape[1])
    _check_offsets(kv)
    kv, live_len_b = write_new(
        k_tkh, v_tkh, kv, query_start_b1, context_len_b, page_table_bp, num_requests,
        k_scale_k=k_scale_k, v_scale_k=v_scale_k, is_decode=is_decode,
    )  # fmt: skip
    group, width = n // k, pl.next_power_of_2(h)
    num_rows = num_rows or _choose_rows(t, b, group, width, q_tnh.dtype, kv.k.dtype, is_decode)
    chunk = chunk or _choose_chunk(width, q_tnh.dtype)
    if is_decode:
        token_b = jnp.arange(b)
        plan_4i = jnp.stack([token_b, token_b, token_b + 1, live_len_b])
        most_chunks = page_table_bp.shape[1] * kv.k.shape[2] // chunk
        num_splits = num_splits or choose_splits(b * k, most_chunks, _PROGRAMS_TO_FILL)
    else:
        plan_4i, num_splits = _plan_tiles(query_start_b1, live_len_b, num_requests, t, num_rows // group), 1
    ones_k = jnp.ones(k, jnp.float32)
    k_scale_k, v_scale_k = (ones_k if scale_k is None else scale_k for scale_k in (k_scale_k, v_scale_k))
    out_tnh = _attend(
        plan_4i, page_table_bp, jnp.stack([k_scale_k * scale, v_scale_k]), q_tnh, kv, num_splits,
        num_rows=num_rows, chunk=chunk, sliding_window=sliding_window, soft_cap=soft_cap,
    )  # fmt: skip
    return out_tnh, kv


def write_new(
    k_tkh, v_tkh, kv: HeadMajorKV, query_start_b1, context_len_b, page_table_bp, num_requests,
    *, is_decode: bool, k_scale_k=None, v_scale_k=None,
) -> tuple[HeadMajorKV, jax.Array]:  # fmt: skip
    """The pool with the new K and V, and how many keys each request has, 0 where it is not there [b]."""
    query_len_b = query_start_b1[1:] - query_start_b1[:-1]
    is_there_b = (jnp.arange(context_len_b.shape[0]) < num_requests) & (context_len_b > 0)
    t = k_tkh.shape[0]
    request_t = jnp.arange(t) if is_decode else request_of_token(query_start_b1, t)
    written_len_b = jnp.where(is_there_b, query_len_b, 0)
    slots = slot_of_token(request_t, query_start_b1, written_len_b, context_len_b, page_table_bp, kv)
    # Else each of the scatters computes them again, for each element that it writes.
    kv = write(kv, k_tkh, v_tkh, *lax.optimization_barrier(slots), k_scale_k=k_scale_k, v_scale_k=v_scale_k)
    return kv, jnp.where(is_there_b, context_len_b, 0)


def _attend(plan_4i, page_table_bp, scale_2k, q_tnh, kv: HeadMajorKV, num_splits: int, **static) -> jax.Array:
    """The kernel over all tiles, KV heads and splits, and what the splits give together [t, n, h]."""
    (t, n, h), num_kv_heads = q_tnh.shape, kv.k.shape[1]
    out = jax.ShapeDtypeStruct(q_tnh.shape, q_tnh.dtype)
    parts = [jax.ShapeDtypeStruct((num_splits, t, n, *rest), jnp.float32) for rest in ((h,), ())]
    outs = triton.call(
        functools.partial(paged_attention_kernel, **static),
        plan_4i, page_table_bp, scale_2k, q_tnh, kv.k, kv.v,
        grid=(plan_4i.shape[1], num_kv_heads, num_splits), out_shape=[out] if num_splits == 1 else parts,
        **_launch_sizes(static["num_rows"], pl.next_power_of_2(h), q_tnh.dtype, kv.k.dtype),
    )  # fmt: skip
    if num_splits == 1:
        return outs[0]
    part_xtnh, lse_xtn = outs
    return merge_splits(part_xtnh, lse_xtn.reshape(num_splits, t, num_kv_heads, n // num_kv_heads), q_tnh.dtype)


def _check_offsets(kv: HeadMajorKV):
    """Pallas computes element offsets in 32 bits, with a sign, into arrays of up to 2^32 bytes."""
    if kv.k.dtype.itemsize == 1 and 2**31 < kv.k.size <= 2**32:
        raise ValueError(
            f"K of {kv.k.size:,} elements in 8 bits: the GPU kernel needs 2^31 elements or fewer in a layer, or more "
            "than 2^32; change num_device_blocks"
        )


def _choose_rows(t: int, b: int, group: int, width: int, dtype, kv_dtype, is_decode: bool) -> int:
    """Rows of a tile: for prompts many, so that K and V are read seldom, but no more than twice what a request has on
    average, and no more than registers hold."""
    longest = _FEWEST_ROWS if dtype == jnp.float32 else 128 if width <= 128 and kv_dtype.itemsize > 1 else 64
    wanted = group if is_decode else min(longest, 2 * (t // b) * group)
    return max(_FEWEST_ROWS, pl.next_power_of_2(max(wanted, group)))


def _choose_chunk(width: int, dtype) -> int:
    """Tokens of a chunk: K and V of one head take 32 KiB, times the stages of the loop."""
    return max(16, min(64, _CHUNK_BYTES // (2 * width * jnp.dtype(dtype).itemsize)))


def _launch_sizes(num_rows: int, width: int, dtype, kv_dtype) -> dict[str, int]:
    """Warps and loop stages with which ptxas keeps everything in registers. Products in float32 are made there, and
    its conversions from 8 bits must not be for several rounds of the loop at once."""
    is_large, is_float32 = num_rows * width > 4096, dtype == jnp.float32
    num_stages = 1 if is_float32 and kv_dtype.itemsize == 1 else 2 if is_large else 3
    return {"num_warps": 8 if is_large or is_float32 else 4, "num_stages": num_stages}


def choose_splits(num_programs: int, most_chunks: int, num_to_fill: int) -> int:
    """Into how many parts the keys of a request are split, a power of two: as many as fill the GPU."""
    wanted = min(num_to_fill // num_programs, most_chunks, _MOST_SPLITS)
    return 1 << max(wanted.bit_length() - 1, 0)


def _plan_tiles(query_start_b1, live_len_b, num_requests, num_tokens: int, tile: int) -> jax.Array:
    """For each tile its request, its first token, the one behind its last, and how many keys the last one sees [4, i].

    The same for all layers: XLA computes it once. Padding is cut into tiles like one more request, which has no keys.
    """
    b = live_len_b.shape[0]
    start_x = jnp.where(jnp.arange(b + 1) < num_requests, query_start_b1, query_start_b1[num_requests])
    stop_x = jnp.append(start_x[1:], num_tokens)
    num_keys_x = jnp.append(live_len_b, 0)
    num_tiles_x = -(-(stop_x - start_x) // tile)
    end_x = jnp.cumsum(num_tiles_x)
    i = jnp.arange(num_tokens // tile + min(b + 1, num_tokens))
    x_i = jnp.minimum((end_x[None] <= i[:, None]).sum(1, dtype=jnp.int32), b)
    start_i = start_x[x_i] + (i - (end_x - num_tiles_x)[x_i]) * tile
    stop_i = jnp.minimum(start_i + tile, stop_x[x_i])
    num_keys_i = jnp.maximum(num_keys_x[x_i] - (stop_x[x_i] - stop_i), 0)
    return jnp.stack([jnp.minimum(x_i, b - 1), start_i, stop_i, jnp.where(start_i < stop_i, num_keys_i, 0)])


def paged_attention_kernel(
    plan_4i, table_bp, scale_2k, q_tnh, k_pksh, v_pksh, out_ref, *lse_ref,
    num_rows: int, chunk: int, sliding_window: int | None, soft_cap: float | None,
):  # fmt: skip
    """Attention of one tile's rows, for one KV head, over one split of the keys."""
    i, head, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    n, h = q_tnh.shape[1:]
    group, width = n // k_pksh.shape[1], pl.next_power_of_2(h)
    request, start, stop, num_keys = (plan_4i[field, i] for field in range(4))
    row_r, d_h = lax.iota(jnp.int32, num_rows), lax.iota(jnp.int32, width)
    token_r, n_r = start + lax.div(row_r, group), head * group + lax.rem(row_r, group)
    mask_rh = (token_r < stop)[:, None] & (d_h < h)[None, :]
    place_rh = (token_r[:, None], n_r[:, None], d_h[None, :])
    q_rh = triton.load(q_tnh, place_rh, mask_rh)
    position_r1 = (num_keys - stop + token_r)[:, None]
    k_scale, v_scale = scale_2k[0, head] * (LOG2_E if soft_cap is None else 1.0), scale_2k[1, head]
    dot = functools.partial(
        lax.dot_general,
        preferred_element_type=jnp.float32,
        precision=lax.Precision.HIGHEST if q_rh.dtype == jnp.float32 else lax.Precision.DEFAULT,
    )

    def attend(j, carry):
        max_r, sum_r, acc_rh = carry
        position_c = j * chunk + lax.iota(jnp.int32, chunk)
        k_ch, v_ch = _gather(table_bp, (k_pksh, v_pksh), request, head, position_c, num_keys, d_h, q_rh.dtype)
        score_rc = dot(q_rh, k_ch, (((1,), (1,)), ((), ()))) * k_scale
        if soft_cap is not None:
            score_rc = (soft_cap * LOG2_E) * jnp.tanh(score_rc / soft_cap)
        distance_rc = position_r1 - position_c[None, :]
        visible_rc = distance_rc >= 0
        if sliding_window is not None:
            visible_rc &= distance_rc < sliding_window
        score_rc = jnp.where(visible_rc, score_rc, MASKED)
        new_max_r = jnp.maximum(max_r, score_rc.max(1))
        weight_rc, decay_r = jnp.exp2(score_rc - new_max_r[:, None]), jnp.exp2(max_r - new_max_r)
        value_rh = dot(weight_rc.astype(q_rh.dtype), v_ch, (((1,), (0,)), ((), ())))
        return new_max_r, sum_r * decay_r + weight_rc.sum(1), acc_rh * decay_r[:, None] + value_rh

    first = 0
    if sliding_window is not None:
        first = lax.div(jnp.maximum(num_keys - (stop - start) - sliding_window + 1, 0), chunk)
    end = lax.div(num_keys + (chunk - 1), chunk)
    num_splits = 1 if not lse_ref else out_ref.shape[0]
    per_split = lax.div(end - first + (num_splits - 1), num_splits)
    first = first + split * per_split
    carry = (jnp.full(num_rows, MASKED), jnp.zeros(num_rows), jnp.zeros((num_rows, width)))
    max_r, sum_r, acc_rh = lax.fori_loop(first, jnp.minimum(first + per_split, end), attend, carry)
    out_rh = acc_rh * (v_scale / jnp.where(sum_r > 0, sum_r, 1.0))[:, None]
    if not lse_ref:
        triton.store(out_ref, place_rh, out_rh, mask_rh)
    else:
        triton.store(out_ref, (split, *place_rh), out_rh, mask_rh)
        lse_r = jnp.where(sum_r > 0, max_r + jnp.log(jnp.where(sum_r > 0, sum_r, 1.0)) * LOG2_E, MASKED)
        triton.store(lse_ref[0], (split, token_r, n_r), lse_r, token_r < stop)


def _gather(table_bp, pools, request, head, position_c, num_keys, d_h, dtype) -> list[jax.Array]:
    """K and V at these positions of a request, each [c, h] in `dtype`; 0 behind its last key, where NaN may be."""
    block_size, h = pools[0].shape[2:]
    is_key_c = position_c < num_keys
    block_c = triton.load(table_bp, (request, lax.div(position_c, block_size)), is_key_c)
    slot_c = lax.rem(position_c, block_size)
    mask_ch = is_key_c[:, None] & (d_h < h)[None, :]
    place_ch = (block_c[:, None], head, slot_c[:, None], d_h[None, :])
    return [triton.load(pool, place_ch, mask_ch, dtype) for pool in pools]


def merge_splits(part_xtnh: jax.Array, lse_xtkr: jax.Array, dtype: Any) -> jax.Array:
    """The outputs over all keys [t, n, h] in `dtype`, from those over each split's own keys and the log2 of the sums of
    their weights. Rows of `lse_xtkr` beyond the query heads of a KV head mean nothing."""
    out = jax.ShapeDtypeStruct(part_xtnh.shape[1:], dtype)
    return triton.call(merge_splits_kernel, part_xtnh, lse_xtkr, grid=out.shape[:2], out_shape=out, num_warps=4)


def merge_splits_kernel(part_xtnh, lse_xtkr, out_tnh):
    """`merge_splits` for one token and query head."""
    t, n = pl.program_id(0), pl.program_id(1)
    num_splits, _, num_heads, h = part_xtnh.shape
    group = num_heads // lse_xtkr.shape[2]
    x, d_h = lax.iota(jnp.int32, num_splits), lax.iota(jnp.int32, pl.next_power_of_2(h))
    lse_x = triton.load(lse_xtkr, (x, t, lax.div(n, group), lax.rem(n, group)), x < num_splits)
    mask_xh = (x < num_splits)[:, None] & (d_h < h)[None, :]
    part_xh = triton.load(part_xtnh, (x[:, None], t, n, d_h[None, :]), mask_xh)
    weight_x = jnp.exp2(lse_x - lse_x.max(0))
    out_h = (part_xh * weight_x[:, None]).sum(0) / weight_x.sum(0)
    triton.store(out_tnh, (t, n, d_h), out_h, d_h < h)
