"""Attention under a mesh of two devices, each with half of the heads and of the pool, is the oracle's. Argument: a
backend, whose kernel is interpreted.

A program of its own, because JAX must be told before it starts that the CPU is two devices.
"""

import os
import sys

# In a thread of XLA's for each device the interpreter of TPU kernels waits for copies, which others make.
os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "NPROC": "4"}

import functools

import jax
from check_attention import PLATFORMS, kernel_of
from interpreted import interpreted
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxpaged.attention import paged_attention
from ragged import compare, make_batch

BACKEND = sys.argv[1]
MESH = Mesh(jax.devices(), ("tensor",), axis_types=(AxisType.Auto,))
HEADS = NamedSharding(MESH, PartitionSpec(None, "tensor"))
POOL = NamedSharding(MESH, PartitionSpec(None, None, "tensor")) if BACKEND == "pallas_tpu" else HEADS


def attend(q_tnh, k_tkh, v_tkh, kv, *batch, scale: float):
    run = functools.partial(paged_attention, backend=BACKEND, scale=scale, is_decode=False)
    new = jax.device_put((q_tnh, k_tkh, v_tkh), HEADS)
    out_tnh, kv = jax.jit(run, donate_argnums=3)(*new, jax.device_put(kv, POOL), *batch)
    assert out_tnh.sharding == HEADS and all(pool.sharding == POOL for pool in jax.tree.leaves(kv))
    return out_tnh, kv


jax.config.update("jax_default_matmul_precision", "highest")
assert len(MESH.devices) == 2
batch = make_batch([(20, 1), (0, 40), (33, 5)], block_size=16, num_heads=4, num_kv_heads=2, head_dim=64, tokens=48)
kernel = kernel_of(BACKEND)
with jax.set_mesh(MESH), interpreted(PLATFORMS[BACKEND]):
    compare(batch, attend, kernel.pack, lambda kv: kernel.unpack(kv, 2))
