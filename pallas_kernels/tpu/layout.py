"""The packed layout of K and V, used on TPUs: one array for each layer, [blocks, block_size, kv_heads × 2 × head_dim].

A token is a row. In it stand K of the first head, V of the first head, K of the second, and so on: a block is one
contiguous copy, a shard of the last axis has whole heads, and rows fill lanes of 128 without padding wherever
kv_heads × head_dim is a multiple of 64 (a head of 64 has its K and V side by side in 128 lanes).
"""

import jax
import jax.numpy as jnp
import numpy as np


def rows_per_tile(dtype) -> int:
    """Tokens that stand together in the sublanes of one memory tile: 8 in float32, 16 in 16 bits, 32 in 8.

    New tokens are written in groups of as many, or of a block where that is smaller.
    """
    return 32 // jnp.dtype(dtype).itemsize


def pack(k_pskh: np.ndarray, v_pskh: np.ndarray) -> jax.Array:
    """The physical pool of logical K and V [blocks, block_size, kv_heads, head_dim]."""
    p, s, k, h = k_pskh.shape
    return jnp.concatenate([jnp.asarray(k_pskh), jnp.asarray(v_pskh)], axis=-1).reshape(p, s, k * 2 * h)


def unpack(kv: jax.Array, num_kv_heads: int) -> tuple[np.ndarray, np.ndarray]:
    """Logical K and V [blocks, block_size, kv_heads, head_dim] of a physical pool."""
    p, s, width = kv.shape
    kv_pskxh = np.asarray(kv).reshape(p, s, num_kv_heads, 2, width // (2 * num_kv_heads))
    return kv_pskxh[:, :, :, 0], kv_pskxh[:, :, :, 1]
