"""Matrices in int8 with a float32 scale for each row, and their product.

Weights and activations are quantized alike, symmetrically: a row of a weight is an output channel, a row of activations
a token (W8A8 as in arXiv:2206.01861, without groups). The sums of products are int32 and exact, so a token's result
does not depend on which others are in the batch. In suffixes r and c are rows and columns of any matrix.
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

LEAST_MAGNITUDE = 1e-30
"""What a row's largest magnitude is taken to be at least: 127 ÷ it stays finite, and rows of zeros stay zero."""


@flax.struct.dataclass
class Int8Matrix:
    """Row r stands for `q_rc[r] * scale_r[r]`: q in int8, −127 to 127, scale in float32."""

    q_rc: Any
    scale_r: Any


def quantize(x_rc: jax.Array) -> Int8Matrix:
    """The matrix in int8: each row's largest magnitude becomes 127, the others are rounded to the nearest step.

    A number is off by half a step at most, 1/254 of its row's largest. A row with a NaN or an infinity is NaN again
    when it is multiplied.
    """
    x32_rc = x_rc.astype(jnp.float32)
    largest_r1 = jnp.maximum(jnp.max(jnp.abs(x32_rc), axis=1, keepdims=True), LEAST_MAGNITUDE)
    # A product, not a quotient for each number: prefill is up to a tenth faster on a CPU. And no clip: the largest
    # number becomes 127 but for one part in 2^22, and is rounded to it.
    q_rc = jnp.round(x32_rc * (127 / largest_r1)).astype(jnp.int8)
    return Int8Matrix(q_rc, largest_r1[:, 0] * (1 / 127))


def matmul_nt(x_tc: Int8Matrix, w_oc: Int8Matrix) -> jax.Array:
    """x Wᵀ [t, o] in float32. The int32 sums overflow beyond 133,143 columns (2^31 / 127²)."""
    sum_to = lax.dot_general(x_tc.q_rc, w_oc.q_rc, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32)
    return sum_to.astype(jnp.float32) * (x_tc.scale_r[:, None] * w_oc.scale_r[None])


def take_rows(w_rc: Int8Matrix, row_t: jax.Array) -> jax.Array:
    """The rows [t, c] in float32; indices out of range are clipped."""
    q_tc = w_rc.q_rc.at[row_t].get(mode="clip")
    return q_tc.astype(jnp.float32) * w_rc.scale_r.at[row_t].get(mode="clip")[:, None]
