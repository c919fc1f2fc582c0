"""Ragged paged attention for TPUs: one kernel, on tiles of queries, that writes the new K and V as well.

A tile is a window of positions of one request, `tile` long and aligned to that: its new tokens are the tile's queries.
Decodes are tiles of one position. A step that mixes prompt chunks and decodes takes the kernel twice: with tiles of one
for requests that have one new token, with longer ones for the others.

XLA puts queries and new K and V in the order of tiles, where row j is position `window × tile + j`. The kernel then
never shifts rows: a window of positions lies at a multiple of its length in a block, in a chunk of blocks in VMEM, and
in the tile of new tokens alike.

For each tile, one step of the grid (which is as long as there are tiles at hand), chunk after chunk from the newest to
the oldest:
  1. the copies of the next chunk's blocks start, be it this tile's or the next one's; then this chunk's are waited for;
  2. in the first chunk the new tokens are laid over the old ones, and the window, so completed, is copied into its
     blocks while the tile goes on. Whole memory tiles are written (8 tokens of float32, 16 of 16 bits, 32 of 8 or a
     block of 16), because rows are packed in their words: what stood beside the new tokens is written back as it was;
  3. scores, online softmax (arXiv:1805.02867) in float32, and the weighted sum of V, head after head.
The next tile of the same request reads what this one writes: its first copies start when the write is done. Different
requests never wait for each other's writes, for a block that is written has one owner.

A head of 128 lanes or more has its K and V in lanes of their own. One of 64 has both in 128 lanes: its query is padded
with zeros there, and the other half of the product is dropped, so that nothing is moved between lanes.

What a TPU should show. Rows (one token's K and V) moved for a decode with a context of c tokens: c in whole blocks,
the memory tile written, and the queries and outputs, which are padded to 8 for each KV head. Needed are c, and one
written. Needed ÷ moved is the most of the bandwidth that can do useful work:

  Llama-3.1-8B   (32 and 8 heads of 128, bf16; 4 KiB a row)  c = 100: 74 %   1000: 97 %   8000: 99.7 %   block_size 16
                                                             c = 100: 66 %   1000: 96 %   8000: 98.9 %   block_size 128
  TinyLlama-1.1B (32 and 4 heads of 64, bf16; 1 KiB a row)   c = 100: 70 %   1000: 96 %   8000: 99.6 %   block_size 16

A copy is a block: 64 KiB for the 8B at block_size 16, 16 KiB for TinyLlama, where larger blocks cost fewer copies. Two
chunks of up to 2 MiB, or of 128 tokens, are in flight. A tile of T queries does T × query heads ÷ KV heads operations
for each byte of K and V in 16 bits (T × 4 for the 8B; T is at most 128): above about 240 a v5e is bound by its MXUs,
above 560 a v6e. All of this is arithmetic, nothing is measured. On chips whose two cores look like one (v4, v5p) the
kernel uses one.

Letters beside those of the engine: w tiles, j positions of a tile, r query rows of a tile (for each query head of a
group, all positions), c tokens of a chunk, e elements of a token's K and V.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tpu.layout import rows_per_tile
from pallas_kernels.xla import request_of_token, stored

_MASKED = -1e30
_LANES = 128
_SMALLEST_BLOCK = 16
_LONGEST_TILE = 128
_MOST_ROWS = 4096
_MOST_ROWS_OF_A_HEAD = 512
_LONGEST_CHUNK = 512
_CHUNK_BYTES = 2 * 2**20
_VMEM_BYTES = 48 * 2**20


def paged_attention(
    q_tnh: jax.Array,
    k_tkh: jax.Array,
    v_tkh: jax.Array,
    kv: jax.Array,
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
    tile: int | None = None,
    chunk: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(out_tnh, kv) as `reference.paged_attention`, on the packed layout; the pool is written in place when donated.

    `is_decode` promises one query for each request, t = b. `tile` (positions of a prompt's tile) and `chunk` (tokens
    fetched at a time), powers of two, are chosen by size unless given. ValueError for a block size that is no power
    of two, 16 or more.
    """
    num_kv_heads, block_size = k_tkh.shape[1], kv.shape[1]
    _check_block_size(block_size)
    ones_k = jnp.ones(num_kv_heads, jnp.float32)
    k_scale_k = ones_k if k_scale_k is None else k_scale_k
    v_scale_k = ones_k if v_scale_k is None else v_scale_k
    new_tkh = [stored(x, scale_k, kv.dtype) for x, scale_k in ((k_tkh, k_scale_k), (v_tkh, v_scale_k))]
    new_te = jnp.concatenate(new_tkh, axis=-1).reshape(k_tkh.shape[0], -1)
    query_len_b = query_start_b1[1:] - query_start_b1[:-1]
    is_there_b = (jnp.arange(query_len_b.shape[0]) < num_requests) & (context_len_b > 0)
    query_len_b = jnp.where(is_there_b, query_len_b, 0)
    run = functools.partial(
        _run,
        q_tnh,
        new_te,
        query_start_b1=query_start_b1,
        context_len_b=context_len_b,
        page_table_bp=page_table_bp,
        scale_xk=jnp.stack([k_scale_k * scale, v_scale_k]),
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        chunk=chunk,
    )
    b, t, n = query_len_b.shape[0], q_tnh.shape[0], q_tnh.shape[1]
    out_tnh, kv = run(kv, query_len_b=jnp.where(query_len_b == 1, query_len_b, 0), tile=1, most_tiles=b)
    if is_decode:
        return out_tnh, kv
    tile = tile or _choose_tile(t, b, n, num_kv_heads, kv)
    most_tiles = t // tile + 2 * min(b, t // 2)
    long_tnh, kv = run(kv, query_len_b=jnp.where(query_len_b > 1, query_len_b, 0), tile=tile, most_tiles=most_tiles)
    return out_tnh + long_tnh, kv


def _check_block_size(block_size: int):
    if block_size < _SMALLEST_BLOCK or block_size & (block_size - 1):
        raise ValueError(f"block_size={block_size}: the TPU kernel needs a power of two, {_SMALLEST_BLOCK} or more")


def _choose_tile(num_tokens: int, num_requests: int, num_heads: int, num_kv_heads: int, kv) -> int:
    """Long, so that K and V are read seldom, but no longer than twice what a request has on average: the rest of its
    last tile is padding."""
    rows = min(_MOST_ROWS // num_heads, _MOST_ROWS_OF_A_HEAD * num_kv_heads // num_heads)
    most_tokens = _CHUNK_BYTES // (kv.shape[2] * kv.dtype.itemsize)
    longest = min(_LONGEST_TILE, rows, most_tokens, 2 * num_tokens // num_requests)
    return max(rows_per_tile(kv.dtype), _power_of_two(longest))


def _power_of_two(n: int) -> int:
    """The largest power of two up to n, 1 or more."""
    return 1 << max(n.bit_length() - 1, 0)


class _Tiles(NamedTuple):
    """Tiles of the requests, one request after another; those from `num_tiles` on are not there.

    `start_w`, `stop_w`: the positions of a tile that are queries. `token_wj`: the packed token at each position, one
    beyond the last where there is none. `place_t`: where each packed token is among all w × j, one beyond for none.
    """

    num_tiles: jax.Array
    request_w: jax.Array
    start_w: jax.Array
    stop_w: jax.Array
    token_wj: jax.Array
    place_t: jax.Array


def _tiles(query_start_b1, query_len_b, context_len_b, *, tile: int, most_tiles: int, num_tokens: int) -> _Tiles:
    first_b = context_len_b - query_len_b
    lowest_b = first_b // tile
    num_tiles_b = jnp.where(query_len_b > 0, -(-context_len_b // tile) - lowest_b, 0)
    end_b = jnp.cumsum(num_tiles_b)
    w = jnp.arange(most_tiles)
    request_w = jnp.minimum((end_b[None] <= w[:, None]).sum(1, dtype=jnp.int32), end_b.shape[0] - 1)
    offset_b = lowest_b - (end_b - num_tiles_b)  # from a request's tile to its window
    window_w = w + offset_b[request_w]
    start_w = jnp.maximum(first_b[request_w], window_w * tile)
    stop_w = jnp.minimum(context_len_b[request_w], (window_w + 1) * tile)
    position_wj = window_w[:, None] * tile + jnp.arange(tile)[None]
    token_wj = position_wj + (query_start_b1[:-1] - first_b)[request_w][:, None]
    is_token_wj = (position_wj >= start_w[:, None]) & (position_wj < stop_w[:, None]) & (w < end_b[-1])[:, None]

    t = jnp.arange(num_tokens)
    request_t = request_of_token(query_start_b1, num_tokens)
    offset_t = t - query_start_b1[request_t]
    position_t = first_b[request_t] + offset_t
    place_t = position_t - offset_b[request_t] * tile
    is_token_t = (offset_t >= 0) & (offset_t < query_len_b[request_t])
    return _Tiles(
        num_tiles=end_b[-1],
        request_w=request_w,
        start_w=start_w,
        stop_w=stop_w,
        token_wj=jnp.where(is_token_wj, token_wj, num_tokens),
        place_t=jnp.where(is_token_t, place_t, most_tiles * tile),
    )


def _run(
    q_tnh, new_te, kv, *, query_start_b1, query_len_b, context_len_b, page_table_bp, scale_xk, sliding_window, soft_cap,
    tile: int, most_tiles: int, chunk: int | None,
):  # fmt: skip
    """(out_tnh, kv) of the requests with a query length above 0, cut into tiles; 0 for the tokens of others."""
    (t, n, h), k = q_tnh.shape, scale_xk.shape[1]
    g, block_size = n // k, kv.shape[1]
    tiles = _tiles(query_start_b1, query_len_b, context_len_b, tile=tile, most_tiles=most_tiles, num_tokens=t)
    # A head whose K does not end at a multiple of 128 lanes is read with its V, the query's part of which is 0.
    width = h if h % _LANES == 0 else 2 * h
    num_rows = -(-g * tile // 8) * 8
    q_wjkgh = q_tnh.at[tiles.token_wj].get(mode="fill", fill_value=0).reshape(most_tiles, tile, k, g, h)
    q_wkrh = q_wjkgh.transpose(0, 2, 3, 1, 4).reshape(most_tiles, k, g * tile, h)
    q_wkrh = jnp.pad(q_wkrh, ((0, 0), (0, 0), (0, num_rows - g * tile), (0, width - h)))
    new_wje = new_te.at[tiles.token_wj].get(mode="fill", fill_value=0)

    window = max(tile, rows_per_tile(kv.dtype))
    token_bytes = kv.shape[2] * kv.dtype.itemsize
    fitting = max(_LANES, min(_LONGEST_CHUNK, _power_of_two(_CHUNK_BYTES // token_bytes)))
    chunk = max(chunk or fitting, block_size, window)
    out_wkrh, kv = _call(
        tiles, page_table_bp, scale_xk, q_wkrh, new_wje, kv,
        head_dim=h, chunk=chunk, window=window, sliding_window=sliding_window, soft_cap=soft_cap,
    )  # fmt: skip
    out_wkgjh = out_wkrh[:, :, : g * tile, width - h :].reshape(most_tiles, k, g, tile, h)
    out_xnh = out_wkgjh.transpose(0, 3, 1, 2, 4).reshape(most_tiles * tile, n, h)
    return out_xnh.at[tiles.place_t].get(mode="fill", fill_value=0), kv


def _call(tiles: _Tiles, page_table_bp, scale_xk, q_wkrh, new_wje, kv, *, window: int, chunk: int, **static):
    """The kernel over the tiles at hand: attention of each tile's rows [w, k, r, h], and the pool."""
    _, k, num_rows, width = q_wkrh.shape
    tile, e = new_wje.shape[1:]
    row_spec = pl.BlockSpec((1, k, num_rows, width), lambda w, *_: (w, 0, 0, 0))
    scalars = (tiles.request_w, tiles.start_w, tiles.stop_w, page_table_bp.reshape(-1))
    kernel = functools.partial(_kernel, num_columns=page_table_bp.shape[1], **static)
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(tiles.num_tiles,),
            in_specs=[
                pl.BlockSpec(memory_space=pltpu.SMEM),
                row_spec,
                pl.BlockSpec((1, tile, e), lambda w, *_: (w, 0, 0)),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=[row_spec, pl.BlockSpec(memory_space=pl.ANY)],
            scratch_shapes=[
                pltpu.VMEM((2, chunk, e), kv.dtype),
                pltpu.VMEM((window, e), kv.dtype),
                pltpu.VMEM((k, num_rows, _LANES), jnp.float32),
                pltpu.VMEM((k, num_rows, _LANES), jnp.float32),
                pltpu.VMEM((k, num_rows, width), jnp.float32),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA,
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct(q_wkrh.shape, q_wkrh.dtype), jax.ShapeDtypeStruct(kv.shape, kv.dtype)],
        input_output_aliases={len(scalars) + 3: 1},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=_VMEM_BYTES),
        name=f"paged_attention_{tile}",
    )(*scalars, scale_xk, q_wkrh, new_wje, kv)


def _kernel(
    request_w, start_w, stop_w, table, scale_xk, q_ref, new_ref, _, out_ref, pool_ref,
    chunks_ref, window_ref, max_ref, sum_ref, acc_ref, slot_ref, fetched, written,
    *, num_columns: int, head_dim: int, sliding_window: int | None, soft_cap: float | None,
):  # fmt: skip
    """One tile. `slot_ref` has the half of `chunks_ref` where its first chunk is, which the tile before asked for."""
    w, num_tiles = pl.program_id(0), pl.num_programs(0)
    block_size, tile, chunk, window = pool_ref.shape[1], new_ref.shape[1], chunks_ref.shape[1], window_ref.shape[0]
    request, start, stop = request_w[w], start_w[w], stop_w[w]
    next_w = jnp.minimum(w + 1, request_w.shape[0] - 1)

    def fetches(act, w, c, slot):
        """Does `act` to the copies of the blocks of chunk c, as far as the tile sees, into half `slot`."""
        blocks_per_chunk = chunk // block_size
        first = c * blocks_per_chunk

        def one(i, _):
            block = table[request_w[w] * num_columns + first + i]
            rows = pl.ds(pl.multiple_of(i * block_size, block_size), block_size)
            act(pltpu.make_async_copy(pool_ref.at[block], chunks_ref.at[slot, rows], fetched.at[slot]))
            return 0

        lax.fori_loop(0, jnp.minimum(blocks_per_chunk, pl.cdiv(stop_w[w], block_size) - first), one, 0)

    def writes(act, w):
        """Does `act` to the copies of the window into its blocks, those parts of it that have new tokens."""
        window_start = start_w[w] // window * window
        part = min(block_size, window)
        for i in range(window // part):
            position = window_start + i * part

            @pl.when((position + part > start_w[w]) & (position < stop_w[w]))
            def _(i=i, position=position):
                block = table[request_w[w] * num_columns + position // block_size]
                rows = pl.ds(pl.multiple_of(position % block_size, part), part)
                source = window_ref.at[pl.ds(i * part, part)]
                act(pltpu.make_async_copy(source, pool_ref.at[block, rows], written))

    def start_copy(copy):
        copy.start()

    def wait_copy(copy):
        copy.wait()

    last = (stop - 1) // chunk
    first = 0 if sliding_window is None else jnp.maximum(start - sliding_window + 1, 0) // chunk
    first_slot = jnp.where(w == 0, 0, slot_ref[0])

    @pl.when(w == 0)
    def _():
        fetches(start_copy, w, last, 0)

    max_ref[...] = jnp.full_like(max_ref, _MASKED)
    sum_ref[...] = jnp.zeros_like(sum_ref)
    acc_ref[...] = jnp.zeros_like(acc_ref)

    def lay_over(slot):
        @pl.when((w > 0) & ((tile == 1) | (request_w[jnp.maximum(w - 1, 0)] != request)))
        def _():
            writes(wait_copy, w - 1)

        window_start = start // window * window
        position_j1 = window_start + lax.broadcasted_iota(jnp.int32, (window, 1), 0)
        rows = pl.ds(pl.multiple_of(window_start - last * chunk, window), window)
        is_new_j1 = (position_j1 >= start) & (position_j1 < stop)
        window_ref[...] = jnp.where(is_new_j1, new_ref[0], chunks_ref[slot, rows])
        chunks_ref[slot, rows] = window_ref[...]
        writes(start_copy, w)

    def one_chunk(i, _):
        c, slot = last - i, lax.rem(first_slot + i, 2)
        is_last_chunk = c == first
        then_w = jnp.where(is_last_chunk, next_w, w)
        then_c = jnp.where(is_last_chunk, (stop_w[next_w] - 1) // chunk, c - 1)
        is_end = is_last_chunk & (w + 1 == num_tiles)
        must_wait = (tile > 1) & is_last_chunk & (request_w[next_w] == request)

        @pl.when(~is_end & ~must_wait)
        def _():
            fetches(start_copy, then_w, then_c, 1 - slot)

        fetches(wait_copy, w, c, slot)

        @pl.when(i == 0)
        def _():
            lay_over(slot)

        @pl.when(~is_end & must_wait)
        def _():
            writes(wait_copy, w)
            fetches(start_copy, then_w, then_c, 1 - slot)

        _attend(
            q_ref, chunks_ref.at[slot], scale_xk, max_ref, sum_ref, acc_ref,
            chunk_start=c * chunk, tile_start=start // tile * tile, stop=stop,
            tile=tile, head_dim=head_dim, sliding_window=sliding_window, soft_cap=soft_cap,
        )  # fmt: skip
        return 0

    num_chunks = last - first + 1
    lax.fori_loop(0, num_chunks, one_chunk, 0)
    slot_ref[0] = lax.rem(first_slot + num_chunks, 2)
    for k in range(q_ref.shape[1]):
        out_ref[0, k] = (acc_ref[k] * (scale_xk[1, k] / sum_ref[k][:, :1])).astype(out_ref.dtype)

    @pl.when(w + 1 == num_tiles)
    def _():
        writes(wait_copy, w)


def _attend(
    q_ref, chunk_ref, scale_xk, max_ref, sum_ref, acc_ref,
    *, chunk_start, tile_start, stop, tile: int, head_dim: int, sliding_window: int | None, soft_cap: float | None,
):  # fmt: skip
    """Takes one chunk of keys into the maximum of the scores, the sum of the weights and the weighted values."""
    num_rows, width = q_ref.shape[2:]
    chunk = chunk_ref.shape[0]
    # Row r of a head is position r % tile. Rows beyond the tile's queries see what its last one sees.
    row_rc = lax.broadcasted_iota(jnp.int32, (num_rows, chunk), 0)
    query_rc = jnp.minimum(tile_start + (row_rc & (tile - 1)), stop - 1)
    distance_rc = query_rc - chunk_start - lax.broadcasted_iota(jnp.int32, (num_rows, chunk), 1)
    visible_rc = distance_rc >= 0
    if sliding_window is not None:
        visible_rc &= distance_rc < sliding_window
    is_there_c1 = lax.broadcasted_iota(jnp.int32, (chunk, 1), 0) < stop - chunk_start
    dot = functools.partial(
        lax.dot_general,
        preferred_element_type=jnp.float32,
        precision=lax.Precision.HIGHEST if q_ref.dtype == jnp.float32 else lax.Precision.DEFAULT,
    )
    for k in range(q_ref.shape[1]):
        start_of_v = head_dim if width == head_dim else 0
        k_ch = chunk_ref[:, pl.ds(2 * k * head_dim, width)].astype(q_ref.dtype)
        v_ch = chunk_ref[:, pl.ds(2 * k * head_dim + start_of_v, width)].astype(q_ref.dtype)
        score_rc = dot(q_ref[0, k], k_ch, (((1,), (1,)), ((), ()))) * scale_xk[0, k]
        if soft_cap is not None:
            score_rc = soft_cap * jnp.tanh(score_rc / soft_cap)
        score_rc = jnp.where(visible_rc, score_rc, _MASKED)
        old_max_r1 = max_ref[k][:, :1]
        max_r1 = jnp.maximum(old_max_r1, score_rc.max(1, keepdims=True))
        weight_rc = jnp.exp(score_rc - max_r1)
        decay_r1 = jnp.exp(old_max_r1 - max_r1)
        # What stands behind the last token may be NaN, which a weight of 0 does not take away.
        v_ch = jnp.where(is_there_c1, v_ch, jnp.zeros_like(v_ch))
        value_rh = dot(weight_rc.astype(v_ch.dtype), v_ch, (((1,), (0,)), ((), ())))
        sum_r1 = sum_ref[k][:, :1] * decay_r1 + weight_rc.sum(1, keepdims=True)
        acc_ref[k] = acc_ref[k] * decay_r1 + value_rh
        max_ref[k] = jnp.broadcast_to(max_r1, max_ref.shape[1:])
        sum_ref[k] = jnp.broadcast_to(sum_r1, sum_ref.shape[1:])
