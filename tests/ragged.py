"""Ragged batches of paged attention, in logical K and V, for the oracle and every form of it."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from pallas_kernels import reference

SCALE = 0.3
TOLERANCE = {"float32": 2e-5, "float16": 2e-2, "bfloat16": 2e-2}


@dataclasses.dataclass
class Batch:
    q_tnh: np.ndarray
    k_tkh: np.ndarray
    v_tkh: np.ndarray
    kv: tuple[np.ndarray, np.ndarray]
    query_start_b1: np.ndarray
    context_len_b: np.ndarray
    page_table_bp: np.ndarray
    num_requests: int

    def arguments(self):
        return (self.query_start_b1, self.context_len_b, self.page_table_bp, np.int32(self.num_requests))


def make_batch(
    lengths, *, block_size, num_heads=6, num_kv_heads=2, head_dim=8, tokens=None, requests=None, num_shared=0, seed=0
):
    """`lengths`: (tokens computed before, new tokens) of each request; padded to `tokens` and `requests`. Blocks are
    scattered over the pool, the first `num_shared` are those of the first request; slots that no token has reached
    hold NaN."""
    rng = np.random.default_rng(seed)
    num_requests, b = len(lengths), requests or len(lengths)
    contexts = [before + new for before, new in lengths]
    width, num_blocks = -(-160 // block_size), -(-160 // block_size) * b
    free = list(rng.permutation(num_blocks))
    scratch = num_blocks
    page_table_bp = np.full((b, width), scratch, np.int32)
    k_pool = np.full((num_blocks + 1, block_size, num_kv_heads, head_dim), np.nan, np.float32)
    v_pool = k_pool.copy()
    for i, ((before, _), context) in enumerate(zip(lengths, contexts, strict=True)):
        for j in range(-(-context // block_size)):
            page_table_bp[i, j] = page_table_bp[0, j] if i and j < num_shared else free.pop()
        for p in range(before):
            slot = page_table_bp[i, p // block_size], p % block_size
            k_pool[slot], v_pool[slot] = rng.standard_normal((2, num_kv_heads, head_dim))
    num_tokens = sum(new for _, new in lengths)
    t = tokens or num_tokens
    query_start_b1 = np.full(b + 1, num_tokens, np.int32)
    query_start_b1[: num_requests + 1] = np.cumsum([0, *(new for _, new in lengths)])
    return Batch(
        q_tnh=rng.standard_normal((t, num_heads, head_dim)).astype(np.float32),
        k_tkh=rng.standard_normal((t, num_kv_heads, head_dim)).astype(np.float32),
        v_tkh=rng.standard_normal((t, num_kv_heads, head_dim)).astype(np.float32),
        kv=(k_pool, v_pool),
        query_start_b1=query_start_b1,
        context_len_b=np.array([*contexts, *[0] * (b - num_requests)], np.int32),
        page_table_bp=page_table_bp,
        num_requests=num_requests,
    )


def compare(
    batch: Batch, attend, pack, unpack, *, dtype="float32", kv_dtype=None, k_scale_k=None, v_scale_k=None, **options
) -> float:
    """The largest difference of the outputs of `attend` from the oracle's, on the same rounded values, ÷ the oracle's
    largest output; `pack` and `unpack` are its layout's.

    AssertionError where that is beyond the dtype's tolerance, or the pool is not the oracle's.
    """
    stored_dtype = np.dtype(jnp.dtype(kv_dtype or dtype))
    pools = [np.nan_to_num(x) if stored_dtype.kind == "i" else x for x in batch.kv]
    pools = [reference.stored(x, stored_dtype) for x in pools]
    new = [jnp.asarray(x, dtype) for x in (batch.q_tnh, batch.k_tkh, batch.v_tkh)]
    scales = {} if k_scale_k is None else {"k_scale_k": jnp.asarray(k_scale_k), "v_scale_k": jnp.asarray(v_scale_k)}
    out_tnh, kv = attend(*new, pack(*pools), *batch.arguments(), scale=SCALE, **scales, **options)
    masks = {name: options[name] for name in ("sliding_window", "soft_cap") if name in options}
    rounded = [np.asarray(x.astype(jnp.float32)) for x in new]
    expected_tnh, expected_kv = reference.paged_attention(
        *rounded, pools, *batch.arguments(), scale=SCALE, k_scale_k=k_scale_k, v_scale_k=v_scale_k, **masks
    )
    for actual, expected in zip(unpack(kv), expected_kv, strict=True):
        np.testing.assert_array_equal(actual.astype(np.float32), expected.astype(np.float32))
    error = float(np.abs(np.asarray(out_tnh, np.float32) - expected_tnh).max() / np.abs(expected_tnh).max())
    assert error <= TOLERANCE[dtype], f"outputs differ by {error:.1e} of the largest, more than {TOLERANCE[dtype]}"
    return error


def scales_of(kv_dtype: str | None, num_kv_heads: int) -> dict:
    """Scales of K and V in 8 bits, none for others. Powers of two, so that dividing by them rounds nowhere;
    they differ from head to head."""
    if kv_dtype is None:
        return {}
    step = 2.0**-5 if kv_dtype == "int8" else 2.0**-3
    k_scale_k = np.float32(step) * 2.0 ** np.arange(num_kv_heads, dtype=np.float32)
    return {"k_scale_k": k_scale_k, "v_scale_k": k_scale_k[::-1] * 2}
