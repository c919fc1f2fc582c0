"""Ragged batches of paged attention, in logical K and V, for the oracle and every form of it."""

import dataclasses

import numpy as np


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
