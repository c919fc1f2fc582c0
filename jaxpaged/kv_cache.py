"""The block pool's arrays: for each layer K and V in the layout of the attention, with one scratch block at the end.

Unused page-table entries point to the scratch block; nothing is ever written there.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.buffer_callback import buffer_callback

from jaxpaged.config import ModelConfig
from jaxpaged.memory import kv_block_shape, kv_layout
from pallas_kernels.gpu.layout import HeadMajorKV

KVCache = tuple[HeadMajorKV | jax.Array, ...]


def pool_specs(model: ModelConfig, num_blocks: int, block_size: int, dtype: str, backend: str) -> Any:
    """Shapes and dtypes of the pool of `num_blocks` blocks and the scratch block, for an attention backend."""
    layout = kv_layout(backend)
    shape = (num_blocks + 1, *kv_block_shape(layout, block_size, model.num_kv_heads, model.head_dim))
    spec = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    return tuple(spec if layout == "packed" else HeadMajorKV(spec, spec) for _ in range(model.num_layers))


def make_pool(model: ModelConfig, num_blocks: int, block_size: int, dtype: str, backend: str) -> KVCache:
    """The pool on the device: zeroed, but on a CPU with whatever was there.

    Nobody reads a slot that was not written. Writing zeros to 4 GiB takes a CPU seconds; unwritten, the memory is
    reserved, and the system hands its pages out as blocks are used for the first time.
    """
    make = _allocate if jax.default_backend() == "cpu" else lambda spec: jnp.zeros(spec.shape, spec.dtype)
    return jax.tree.map(make, pool_specs(model, num_blocks, block_size, dtype, backend))


@functools.partial(jax.jit, static_argnums=0)
def _allocate(spec: jax.ShapeDtypeStruct) -> jax.Array:
    """An array that nobody has written: the callback is to fill its output in place, and leaves it as it is."""
    return buffer_callback(lambda context, output: None, spec)()


def copy_blocks(kv: KVCache, source_c: jax.Array, target_c: jax.Array) -> KVCache:
    """The pool with blocks `target_c` holding what `source_c` hold; targets out of range are dropped. Donate `kv`."""
    return jax.tree.map(lambda pool: pool.at[target_c].set(pool[source_c], mode="drop"), kv)
