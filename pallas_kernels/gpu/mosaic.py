"""The Mosaic GPU lowering of Pallas, in one place: what differs between versions of jax is kept out of the kernels.

It is the way to what Hopper (compute capability 9.0) has beyond older GPUs: warpgroups of 128 threads that do different
things, copies between global and shared memory that run on their own (TMA), and products of tiles in shared memory
(wgmma). Needs jax 0.11 or newer. Arrays in registers are laid out as wgmma leaves its results, or one of its columns.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

TILE = 64
"""Rows of a product's left side, which wgmma fixes; and elements of 16 bits in the 128 bytes that are swizzled."""


def call(
    kernel: Callable, *arguments: jax.Array, grid: dict[str, int], num_warpgroups: int, out_shape: Any, shared: Any
) -> Any:
    """What the kernel writes, one program for each point of the grid. It is given all arrays whole, in global memory,
    those that it writes, and `shared`; `lax.axis_index` of an axis of the grid, or "warpgroup", says where it is."""
    params = plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup)
    return plgpu.kernel(
        kernel,
        out_type=out_shape,
        scratch_types=[shared],
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=num_warpgroups,
        thread_name="warpgroup",
        compiler_params=params,
        kernel_name=getattr(kernel, "func", kernel).__name__,
    )(*arguments)


def tiles(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory that TMA fills and wgmma reads: in tiles of 8 rows of 128 bytes each, swizzled."""
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, TILE)), plgpu.SwizzleTransform(128)))


def full(shape: tuple[int, ...], value: float) -> jax.Array:
    """float32 in registers: as many rows and columns, or with one axis a value for each row."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), _layout(len(shape)))


def iota(shape: tuple[int, ...], axis: int) -> jax.Array:
    """The index along an axis, int32 in registers."""
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)


def over_columns(x_r: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A value for each row, the same in all columns."""
    return lax.broadcast_in_dim(x_r, shape, [0])


def load(ref: Any) -> jax.Array:
    """What shared memory in `tiles` holds, in registers."""
    return plgpu.layout_cast(ref[...], plgpu.Layout.WGMMA)


def store_rows(ref: Any, value: jax.Array):
    """Into shared memory row by row: slower than into `tiles`, but any number of rows can be copied from there."""
    store = getattr(plgpu, "store", None)
    if store is None:  # jax 0.11, where any store may be slow
        ref[...] = value
    else:
        store(ref, value, optimized=False)


def product(left_ref: Any, right_ref: Any) -> jax.Array:
    """left @ right, of `tiles` in shared memory, in float32."""

    def run(acc_ref):
        plgpu.wgmma(acc_ref, left_ref, right_ref)
        return acc_ref[...]

    return pl.run_scoped(run, plgpu.WGMMAAccumulatorRef((left_ref.shape[0], right_ref.shape[1]), jnp.float32))


def _layout(num_axes: int):
    return plgpu.Layout.WGMMA if num_axes == 2 else plgpu.Layout.WGMMA.reduce(1)
