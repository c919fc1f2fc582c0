"""The oracle of paged attention: numpy in float64, one request after another, nothing clever."""

import jax.numpy as jnp
import numpy as np


def paged_attention(
    q_tnh,
    k_tkh,
    v_tkh,
    kv,
    query_start_b1,
    context_len_b,
    page_table_bp,
    num_requests,
    *,
    scale,
    sliding_window=None,
    soft_cap=None,
    k_scale_k=None,
    v_scale_k=None,
):
    """(out_tnh, kv): attention of packed queries over their requests' blocks, after writing the new K and V there.

    Request i has queries [query_start[i], query_start[i + 1]); context_len[i] counts its tokens with these.
    A request of context length 0 is not there, whatever queries it has: its output is 0.
    Token j of a request lives in block page_table[i, j // block_size] at j % block_size.
    `kv` holds logical K and V [blocks, block_size, kv_heads, head_dim] and is not changed; a new pair is returned.
    A query sees the positions up to its own, the last `sliding_window` of them where that is given.
    `soft_cap`: scores become soft_cap × tanh(score / soft_cap). `k_scale_k`, `v_scale_k`: stored values times these,
    per KV head, are K and V; new ones are divided by them and `stored`. Padded queries give 0.
    Softmax: arXiv:1706.03762.
    """
    q_tnh, k_tkh, v_tkh = (np.asarray(x, np.float64) for x in (q_tnh, k_tkh, v_tkh))
    k_pool, v_pool = (np.array(x) for x in kv)
    num_kv_heads, block_size = k_pool.shape[2], k_pool.shape[1]
    k_scale_k = np.ones(num_kv_heads) if k_scale_k is None else np.asarray(k_scale_k, np.float64)
    v_scale_k = np.ones(num_kv_heads) if v_scale_k is None else np.asarray(v_scale_k, np.float64)
    group = q_tnh.shape[1] // num_kv_heads
    out_tnh = np.zeros(q_tnh.shape)

    requests = [i for i in range(int(num_requests)) if context_len_b[i] > 0]
    for i in requests:
        start, stop, context_len = int(query_start_b1[i]), int(query_start_b1[i + 1]), int(context_len_b[i])
        first = context_len - (stop - start)
        for t in range(start, stop):
            position = first + t - start
            block, offset = int(page_table_bp[i, position // block_size]), position % block_size
            k_pool[block, offset] = stored(k_tkh[t] / k_scale_k[:, None], k_pool.dtype)
            v_pool[block, offset] = stored(v_tkh[t] / v_scale_k[:, None], v_pool.dtype)

    for i in requests:
        start, stop, context_len = int(query_start_b1[i]), int(query_start_b1[i + 1]), int(context_len_b[i])
        blocks = [int(page_table_bp[i, p // block_size]) for p in range(context_len)]
        offsets = [p % block_size for p in range(context_len)]
        k_ckh = k_pool[blocks, offsets].astype(np.float64) * k_scale_k[:, None]
        v_ckh = v_pool[blocks, offsets].astype(np.float64) * v_scale_k[:, None]
        for t in range(start, stop):
            position = context_len - (stop - start) + t - start
            oldest = 0 if sliding_window is None else max(0, position - sliding_window + 1)
            for n in range(q_tnh.shape[1]):
                scores = k_ckh[oldest : position + 1, n // group] @ q_tnh[t, n] * scale
                if soft_cap is not None:
                    scores = soft_cap * np.tanh(scores / soft_cap)
                weights = np.exp(scores - scores.max())
                out_tnh[t, n] = weights @ v_ckh[oldest : position + 1, n // group] / weights.sum()
    return out_tnh, (k_pool, v_pool)


def stored(x: np.ndarray, dtype) -> np.ndarray:
    """x as the pool keeps it: in 8 bits the nearest value, the largest where x is beyond it."""
    if dtype.itemsize > 1:
        return x.astype(dtype)
    if np.issubdtype(dtype, np.integer):
        return np.clip(np.rint(x), -127, 127).astype(dtype)
    largest = float(jnp.finfo(dtype).max)
    return np.clip(x, -largest, largest).astype(dtype)
