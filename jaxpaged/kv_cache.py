"""The block pool's arrays: for each layer K and V in the layout of the attention, with one scratch block at the end.

Unused page-table entries point to the scratch block; nothing is ever written there.
Blocks that are swapped out lie in host memory, all layers of a block together.
"""

import functools
from collections import deque
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.buffer_callback import buffer_callback
from jax.sharding import Sharding, SingleDeviceSharding

from jaxpaged.config import ModelConfig
from jaxpaged.memory import MOST_STAGED, kv_block_shape, kv_layout
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


def pinned_host(device: Any) -> SingleDeviceSharding | None:
    """Host memory that a `jax.Device` reads and writes on its own, for blocks on their way. None on a CPU, which has no
    other."""
    return None if device.platform == "cpu" else SingleDeviceSharding(device, memory_kind="pinned_host")


def gather_blocks(kv: KVCache, block_c: jax.Array) -> jax.Array:
    """What the blocks hold, in all layers: [c, arrays of the pool, …a block's shape]."""
    return jnp.stack([pool[block_c] for pool in jax.tree.leaves(kv)], axis=1)


def scatter_blocks(kv: KVCache, block_c: jax.Array, content_c: jax.Array, *, is_pinned: bool = False) -> KVCache:
    """The pool with the blocks holding what `gather_blocks` took; blocks out of range are dropped. Donate `kv`.

    `is_pinned`: `content_c` is in pinned memory of the host.
    """
    if is_pinned:
        content_c = jax.device_put(content_c, jax.memory.Space.Device)
    pools, structure = jax.tree.flatten(kv)
    return structure.unflatten([pool.at[block_c].set(content_c[:, i], mode="drop") for i, pool in enumerate(pools)])


def swap_spec(kv: KVCache, num_blocks: int, sharding: Sharding | None = None) -> jax.ShapeDtypeStruct:
    """Shape and dtype of what `num_blocks` blocks of the pool hold, and where it is."""
    pools = jax.tree.leaves(kv)
    return jax.ShapeDtypeStruct((num_blocks, len(pools), *pools[0].shape[1:]), pools[0].dtype, sharding=sharding)


class HostBlocks:
    """Blocks in host memory, whose pages the system commits when they are first written.

    What `store` takes is on its way from the device while steps run, by way of pinned memory where there is such. It
    lies here after `land`. At most MOST_STAGED gathered pieces are on their way, since each takes memory meanwhile.
    """

    def __init__(self, spec: jax.ShapeDtypeStruct):
        self._blocks = np.empty(spec.shape, spec.dtype)
        self._staged: deque[tuple[np.ndarray, jax.Array]] = deque()

    def store(self, host_blocks: np.ndarray, content_c: jax.Array):
        """Keeps gathered blocks, padding left out. Waits only for room: for the oldest piece, when there are many."""
        if len(self._staged) == MOST_STAGED:
            self._land_oldest()
        content_c.copy_to_host_async()
        self._staged.append((host_blocks, content_c))

    def land(self):
        """Takes in what has arrived. Waits for nothing."""
        while self._staged and self._staged[0][1].is_ready():  # pyright: ignore[reportAttributeAccessIssue]
            self._land_oldest()

    def load(self, host_blocks: np.ndarray, num_padded: int) -> np.ndarray:
        """What the blocks hold, padded with anything. Waits for those of them that are on their way."""
        wanted = set(host_blocks.tolist())
        while any(not wanted.isdisjoint(staged.tolist()) for staged, _ in self._staged):
            self._land_oldest()
        content_c = np.empty((num_padded, *self._blocks.shape[1:]), self._blocks.dtype)
        np.take(self._blocks, host_blocks, axis=0, out=content_c[: len(host_blocks)])
        return content_c

    def forget(self):
        """What is on its way is not waited for any more."""
        self._staged.clear()

    def _land_oldest(self):
        host_blocks, content_c = self._staged.popleft()
        self._blocks[host_blocks] = np.asarray(content_c)[: len(host_blocks)]
