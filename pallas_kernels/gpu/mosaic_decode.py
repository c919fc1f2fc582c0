"""Attention of decodes on Hopper GPUs (compute capability 9.0): K and V come by TMA while what is there is multiplied.

A program takes a request, one or two KV heads, and a split of the request's keys. One warpgroup, the producer, reads
the page table and asks TMA for block after block. They land in a ring in shared memory whose items are K, or V, of a
chunk of 64 tokens; one barrier says that an item is full, another that it is free. Each of the other warpgroups, the
consumers, has a KV head: it multiplies queries and keys by wgmma, takes the online softmax (arXiv:1805.02867) in
float32, and multiplies weights and values by wgmma. With head_dim 256 two consumers have the same head, and half of the
columns of V each: registers hold no more. Splits are merged as in `paged_attention.py`, which also writes new K and V,
and takes what `why_not` has a reason for.

Bytes in flight. An H200 reads 4.8 TB/s, and a byte takes up to 1 µs to come: 4.8 MB must be under way, 36 KB for each
of 132 multiprocessors. A program fills one, and its ring has 128 KiB: four items of 64 tokens of two heads of 128 in 16
bits. One of them is being read, so that 96 KiB are under way, in copies of a block of a head: 4 KiB for 16 tokens.

Arithmetic. A product of wgmma has 64 rows, of which a group of m query heads uses m; the others hold what shared memory
held, and are not written. A chunk of a head of 128 costs the tensor cores 512 cycles, and its consumer some 1500 with
softmax and waits. Its 32 KiB take 1650 cycles to come, at a multiprocessor's share of the bandwidth, and two consumers
work side by side: memory is the limit, by about two. One consumer, where the number of KV heads is odd, is near it.

By this arithmetic a program that reads 1 MiB (1024 tokens of two heads) takes 29 µs, and 4 more, in which it reads
nothing, to start and to write its output: 88 % of what a copy reaches, 64 % at 256 tokens, 97 % at 4096. These are
predictions. The kernel has been compiled and interpreted, and neither run nor timed on a GPU.

So that an interpreter can run all of it, weights go through shared memory, not registers, and products start from zero
and are added to what was there: jax 0.12 interprets neither wgmma of registers nor accumulators with a first value.

Letters beside those of the engine: r rows of a product, c tokens of a chunk j, w consumers, i items of the ring.
"""

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu import mosaic
from pallas_kernels.gpu.layout import HeadMajorKV
from pallas_kernels.gpu.paged_attention import LOG2_E, MASKED, choose_splits, merge_splits, write_new

_CHUNK = 64
_ROWS = mosaic.TILE
_RING_BYTES = 2**17
_PROGRAMS_TO_FILL = 132
"""One for each multiprocessor of an H100 or H200: the shared memory of one holds one program."""
_CONSUMER_REGISTERS, _PRODUCER_REGISTERS = 232, 40
"""Of a thread. Three warpgroups start with 168 each, which is as much together."""


class _Plan(NamedTuple):
    """What is known when a program is compiled.

    `heads`: KV heads of a program; `parts`: consumers of a head, each with a part of the columns of V; `group`: query
    heads of a KV head; `stages`: items that the ring holds.
    """

    heads: int
    parts: int
    group: int
    stages: int
    block_size: int
    scale: float
    sliding_window: int | None
    soft_cap: float | None

    @property
    def num_consumers(self) -> int:
        return self.heads * self.parts


class _Shared(NamedTuple):
    """A program's shared memory and barriers; w is a consumer, i an item of the ring."""

    q_krh: Any
    weight_wrc: Any
    out_wrh: Any
    lse_wr: Any
    ring_ikch: Any
    has_q: Any
    is_full_i: Any
    is_free_i: Any


class _Span(NamedTuple):
    """What a program attends to: whose keys, from which KV head on, how many keys there are, its first chunk, and how
    many chunks. These are scalars of the kernel."""

    request: Any
    head: Any
    num_keys: Any
    first: Any
    num_chunks: Any


def why_not(
    *, dtype: Any, kv_dtype: Any, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int
) -> str | None:
    """Why such decodes are not for this kernel; None: they are. The numbers of heads may be those of a shard."""
    dtype, kv_dtype = jnp.dtype(dtype).name, jnp.dtype(kv_dtype).name
    if dtype not in ("bfloat16", "float16"):
        return f"it computes in bfloat16 and float16, not in {dtype}"
    if kv_dtype != dtype:
        return f"K and V must be in {dtype} like the queries, not in {kv_dtype}"
    if head_dim not in (64, 128, 256):
        return f"head_dim must be 64, 128 or 256, not {head_dim}"
    if block_size not in (16, 32, 64):
        return f"block_size must be 16, 32 or 64, not {block_size}"
    if num_heads // num_kv_heads > _ROWS:
        return f"a KV head can serve {_ROWS} query heads, not {num_heads // num_kv_heads}"
    return None


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
    num_splits: int | None = None,
    num_stages: int | None = None,
) -> tuple[jax.Array, HeadMajorKV]:
    """(out_tnh, kv) as `reference.paged_attention`, for one query of each request, t = b, on the head-major layout; the
    pool is written in place when donated. Compiles for compute capability 9.0 alone.

    `num_splits` of a request's keys, a power of two, and `num_stages` of the ring are chosen by size unless given.
    ValueError with what `why_not` says.
    """
    (b, n, h), (_, k, block_size, _) = q_tnh.shape, kv.k.shape
    reason = why_not(
        dtype=q_tnh.dtype, kv_dtype=kv.k.dtype, num_heads=n, num_kv_heads=k, head_dim=h, block_size=block_size
    )
    if reason is not None:
        raise ValueError(f"the Mosaic GPU kernel for decodes cannot be used: {reason}")
    kv, live_len_b = write_new(
        k_tkh, v_tkh, kv, query_start_b1, context_len_b, page_table_bp, num_requests, is_decode=True
    )
    parts = max(1, h // 128)
    heads = 2 if parts == 1 and k % 2 == 0 else 1
    stages = num_stages or _RING_BYTES // (heads * _CHUNK * h * q_tnh.dtype.itemsize)
    plan = _Plan(heads, parts, n // k, stages, block_size, scale, sliding_window, soft_cap)
    most_chunks = page_table_bp.shape[1] * block_size // _CHUNK
    num_splits = num_splits or choose_splits(b * k // heads, most_chunks, _PROGRAMS_TO_FILL)
    return _attend(page_table_bp, live_len_b, q_tnh, kv, num_splits, plan), kv


def _attend(page_table_bp, live_len_b, q_tnh, kv: HeadMajorKV, num_splits: int, plan: _Plan) -> jax.Array:
    """The kernel over all requests, KV heads and splits, and what the splits give together [t, n, h]."""
    (b, n, h), k, dtype = q_tnh.shape, kv.k.shape[1], q_tnh.dtype
    # Tiles have 8 rows, of which TMA copies all.
    num_rows = -(-plan.group // 8) * 8
    q_bkrh = jnp.pad(q_tnh.reshape(b, k, plan.group, h), ((0, 0), (0, 0), (0, num_rows - plan.group), (0, 0)))
    out = jax.ShapeDtypeStruct((b, n, h), dtype)
    parts = [
        jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((num_splits, b, n, h), (num_splits, b, k, num_rows))
    ]
    outs = mosaic.call(
        functools.partial(decode_kernel, plan=plan),
        page_table_bp, live_len_b, q_bkrh, kv.k, kv.v,
        grid={"request": b, "heads": k // plan.heads, "split": num_splits},
        num_warpgroups=plan.num_consumers + 1,
        out_shape=[out] if num_splits == 1 else parts,
        shared=_shared_memory(plan, h, dtype, dtype if num_splits == 1 else jnp.float32),
    )  # fmt: skip
    if num_splits == 1:
        return outs[0]
    part_xtnh, lse_xtkr = outs
    return merge_splits(part_xtnh, lse_xtkr, dtype)


def _shared_memory(plan: _Plan, h: int, dtype, out_dtype) -> _Shared:
    """Of a program: 192 to 210 KiB of the 227 that there are."""
    num_consumers, num_copies = plan.num_consumers, plan.heads * _CHUNK // plan.block_size
    return _Shared(
        q_krh=mosaic.tiles((plan.heads, _ROWS, h), dtype),
        weight_wrc=mosaic.tiles((num_consumers, _ROWS, _CHUNK), dtype),
        out_wrh=plgpu.SMEM((num_consumers, _ROWS, mosaic.TILE), out_dtype),
        lse_wr=plgpu.SMEM((num_consumers, _ROWS), jnp.float32),
        ring_ikch=mosaic.tiles((plan.stages, plan.heads, _CHUNK, h), dtype),
        has_q=plgpu.Barrier(num_arrivals=plan.heads),
        is_full_i=plgpu.Barrier(num_arrivals=num_copies, num_barriers=plan.stages),
        is_free_i=plgpu.Barrier(num_arrivals=num_consumers, num_barriers=plan.stages),
    )


def decode_kernel(table_bp, len_b, q_bkrh, k_pksh, v_pksh, *refs, plan: _Plan):
    """One request's queries of some KV heads, over one split of its keys: one warpgroup copies, the others compute."""
    *outs, shared = refs
    request, split, warpgroup = (lax.axis_index(axis) for axis in ("request", "split", "warpgroup"))
    num_splits = 1 if len(outs) == 1 else outs[0].shape[0]
    num_keys, window = len_b[request], plan.sliding_window
    first = 0 if window is None else lax.div(jnp.maximum(num_keys - window, 0), _CHUNK)
    end = lax.div(num_keys + (_CHUNK - 1), _CHUNK)
    per_split = lax.div(end - first + (num_splits - 1), num_splits)
    first = first + split * per_split
    num_chunks = jnp.maximum(jnp.minimum(per_split, end - first), 0)
    span = _Span(request, lax.axis_index("heads") * plan.heads, num_keys, first, num_chunks)

    @pl.when(warpgroup == plan.num_consumers)
    def _():
        plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")
        _produce(table_bp, q_bkrh, (k_pksh, v_pksh), shared, span, plan)

    @pl.when(warpgroup < plan.num_consumers)
    def _():
        plgpu.set_max_registers(_CONSUMER_REGISTERS, action="increase")
        place = (request,) if num_splits == 1 else (split, request)
        _consume([out.at[place] for out in outs], shared, span, plan)


def _produce(table_bp, q_bkrh, pools, shared: _Shared, span: _Span, plan: _Plan):
    """Copies the queries; then K and V of one chunk after the other, each where the ring is free."""
    num_rows, blocks = q_bkrh.shape[2], _CHUNK // plan.block_size
    for k in range(plan.heads):
        plgpu.copy_gmem_to_smem(
            q_bkrh.at[span.request, span.head + k], shared.q_krh.at[k, pl.ds(0, num_rows)], shared.has_q
        )
    # A chunk's blocks behind the last key are copies of the last one: to read that again costs no bandwidth.
    last = lax.div(span.num_keys - 1, plan.block_size)

    @pl.loop(0, span.num_chunks)
    def _(j):
        block_of = [table_bp[span.request, jnp.minimum((span.first + j) * blocks + p, last)] for p in range(blocks)]
        for is_v, pool in enumerate(pools):
            item = 2 * j + is_v
            i = lax.rem(item, plan.stages)

            @pl.when(item >= plan.stages)
            def _(i=i):
                plgpu.barrier_wait(shared.is_free_i.at[i])

            for p, k in itertools.product(range(blocks), range(plan.heads)):
                rows = pl.ds(p * plan.block_size, plan.block_size)
                source = pool.at[block_of[p], span.head + k]
                plgpu.copy_gmem_to_smem(source, shared.ring_ikch.at[i, k, rows], shared.is_full_i.at[i])

    # No barrier is left with a phase that nobody waited for, which jax 0.11's interpreter takes for an error.
    @pl.loop(jnp.maximum(2 * span.num_chunks - plan.stages, 0), 2 * span.num_chunks)
    def _(item):
        plgpu.barrier_wait(shared.is_free_i.at[lax.rem(item, plan.stages)])


def _consume(outs, shared: _Shared, span: _Span, plan: _Plan):
    """Attention of one KV head's queries, for a part of the columns of V."""
    w, h = lax.axis_index("warpgroup"), shared.q_krh.shape[-1]
    k, part = lax.div(w, plan.parts), lax.rem(w, plan.parts)
    width = h // plan.parts
    begin = 0 if plan.parts == 1 else pl.multiple_of(part * width, mosaic.TILE)
    columns = [pl.ds(begin + c, mosaic.TILE) for c in range(0, width, mosaic.TILE)]
    plgpu.barrier_wait(shared.has_q)

    def attend(j, carry):
        max_r, sum_r, accs_rh = carry
        start = (span.first + j) * _CHUNK
        i = lax.rem(2 * j, plan.stages)
        plgpu.barrier_wait(shared.is_full_i.at[i])
        score_rc = mosaic.product(shared.q_krh.at[k], shared.ring_ikch.at[i, k].transpose((1, 0)))
        plgpu.barrier_arrive(shared.is_free_i.at[i])
        score_rc = _masked(score_rc, start, span.num_keys, plan)
        new_max_r = jnp.maximum(max_r, score_rc.max(axis=1))
        weight_rc = jnp.exp2(score_rc - mosaic.over_columns(new_max_r, score_rc.shape))
        decay_r = jnp.exp2(max_r - new_max_r)
        shared.weight_wrc[w] = weight_rc.astype(shared.weight_wrc.dtype)

        i = lax.rem(2 * j + 1, plan.stages)
        plgpu.barrier_wait(shared.is_full_i.at[i])
        values_ch = [shared.ring_ikch.at[i, k, :, cols] for cols in columns]
        _zero_behind_last_key(values_ch, start, span.num_keys)
        plgpu.commit_smem()
        decay_rh = mosaic.over_columns(decay_r, (_ROWS, mosaic.TILE))
        accs_rh = tuple(
            acc_rh * decay_rh + mosaic.product(shared.weight_wrc.at[w], v_ch)
            for acc_rh, v_ch in zip(accs_rh, values_ch, strict=True)
        )
        plgpu.barrier_arrive(shared.is_free_i.at[i])
        return new_max_r, sum_r * decay_r + weight_rc.sum(axis=1), accs_rh

    accs_rh = tuple(mosaic.full((_ROWS, mosaic.TILE), 0.0) for _ in columns)
    carry = (mosaic.full((_ROWS,), MASKED), mosaic.full((_ROWS,), 0.0), accs_rh)
    max_r, sum_r, accs_rh = lax.fori_loop(0, span.num_chunks, attend, carry)
    _write_out(outs, shared, (w, span.head + k, part), columns, max_r, sum_r, accs_rh, plan)


def _write_out(outs, shared: _Shared, place, columns, max_r, sum_r, accs_rh, plan: _Plan):
    """The output of the consumer at `place` (its number, KV head and part), and the logarithm of its sum of weights."""
    w, head, part = place
    out_nh, *lse_kr = outs
    scale_r = 1 / jnp.where(sum_r > 0, sum_r, 1.0)
    for acc_rh, cols in zip(accs_rh, columns, strict=True):
        out_rh = acc_rh * mosaic.over_columns(scale_r, acc_rh.shape)
        mosaic.store_rows(shared.out_wrh.at[w], out_rh.astype(shared.out_wrh.dtype))
        rows = pl.ds(head * plan.group, plan.group)
        _copy_out(shared.out_wrh.at[w, pl.ds(0, plan.group)], out_nh.at[rows, cols])
    if lse_kr:

        @pl.when(part == 0)
        def _():
            lse_r = jnp.where(sum_r > 0, max_r + jnp.log(jnp.where(sum_r > 0, sum_r, 1.0)) * LOG2_E, MASKED)
            shared.lse_wr[w] = lse_r
            _copy_out(shared.lse_wr.at[w, pl.ds(0, lse_kr[0].shape[-1])], lse_kr[0].at[head])


def _masked(score_rc, start, num_keys, plan: _Plan):
    """Scores, times the logarithm of e to base 2, of the positions from `start` on; those that are not seen masked."""
    if plan.soft_cap is None:
        score_rc = score_rc * (plan.scale * LOG2_E)
    else:
        # tanh(x) = 1 - 2 / (1 + exp(2 x)): the instruction for tanh has 11 bits.
        power_rc = jnp.exp2(score_rc * (2 * LOG2_E * plan.scale / plan.soft_cap))
        score_rc = (plan.soft_cap * LOG2_E) * (1 - 2 / (1 + power_rc))
    position_rc = start + mosaic.iota(score_rc.shape, 1)
    visible_rc = position_rc < num_keys
    if plan.sliding_window is not None:
        visible_rc &= position_rc >= num_keys - plan.sliding_window
    return jnp.where(visible_rc, score_rc, MASKED)


def _zero_behind_last_key(values_ch: list, start, num_keys):
    """Clears rows of V that are no keys: a weight of 0 does not take NaN away."""

    @pl.when(start + _CHUNK > num_keys)
    def _():
        for v_ch in values_ch:
            value_ch = mosaic.load(v_ch)
            is_key_ch = start + mosaic.iota(value_ch.shape, 0) < num_keys
            v_ch[...] = jnp.where(is_key_ch, value_ch, jnp.zeros_like(value_ch))


def _copy_out(shared_ref, ref):
    """Copies what was stored to shared memory to global memory, and waits until that has been read."""
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(shared_ref, ref)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
