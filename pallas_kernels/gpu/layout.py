"""The head-major layout of K and V, used on GPUs and CPUs: [blocks, kv_heads, block_size, head_dim], K and V apart.

All tokens of one head in a block stand together, so that a block's scores are one small matrix product.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np


class HeadMajorKV(NamedTuple):
    """One layer's pool: K and V, each [blocks, kv_heads, block_size, head_dim]; arrays, or their shapes."""

    k: Any
    v: Any


def pack(k_pskh: np.ndarray, v_pskh: np.ndarray) -> HeadMajorKV:
    """The physical pool of logical K and V [blocks, block_size, kv_heads, head_dim]."""
    return HeadMajorKV(jnp.asarray(k_pskh).swapaxes(1, 2), jnp.asarray(v_pskh).swapaxes(1, 2))


def unpack(kv: HeadMajorKV) -> tuple[np.ndarray, np.ndarray]:
    """Logical K and V [blocks, block_size, kv_heads, head_dim] of a physical pool."""
    return np.asarray(kv.k).swapaxes(1, 2), np.asarray(kv.v).swapaxes(1, 2)
