"""The Triton lowering of Pallas, in one place: what differs between versions of jax is kept out of the kernels.

Without compiler parameters `pl.pallas_call` means Mosaic GPU in jax 0.11 and Triton in 0.10 and 0.12: they are always
given. The lowering needs compute capability 8.0 or newer. All arrays in a kernel have sizes that are powers of two, and
what lies beyond an array's end is masked by the kernel.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton


def call(
    kernel: Callable, *arguments: jax.Array, grid: tuple[int, ...], out_shape: Any, num_warps: int, num_stages: int = 1
) -> Any:
    """What the kernel writes, one program for each point of the grid, all arrays at hand whole in each of them.

    `num_warps`: of 32 threads, for a program; `num_stages`: rounds of a loop whose loads are under way at once.
    """
    params = triton.CompilerParams(num_warps=num_warps, num_stages=num_stages)
    return pl.pallas_call(kernel, grid=grid, out_shape=out_shape, compiler_params=params)(*arguments)


def load(ref: Any, indices: tuple, mask: jax.Array, dtype: Any = None) -> jax.Array:
    """Elements at broadcast indices, one for each axis of the array, as `dtype`; 0 where masked."""
    dtype, view = dtype or ref.dtype, ref.at[_broadcast(indices, mask.shape)]
    if jnp.issubdtype(ref.dtype, jnp.floating) and ref.dtype.itemsize == 1:
        # There are no constants of 8-bit floats, so that the zeros come after the conversion.
        value = triton.load(view, mask=mask).astype(dtype)
        return jnp.where(mask, value, jnp.zeros_like(value))
    return triton.load(view, mask=mask, other=0).astype(dtype)


def store(ref: Any, indices: tuple, value: jax.Array, mask: jax.Array):
    """Writes elements at broadcast indices, one for each axis of the array, but for those that are masked."""
    triton.store(ref.at[_broadcast(indices, mask.shape)], value.astype(ref.dtype), mask=mask)


def _broadcast(indices: tuple, shape: tuple[int, ...]) -> tuple:
    """Scalars stay scalars; arrays must agree in shape for Pallas."""
    return tuple(jnp.broadcast_to(i, shape) if getattr(i, "ndim", 0) else i for i in indices)
