"""Which form of paged attention runs: one `match` over the backends."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxpaged.config import EngineConfig, ModelConfig
from pallas_kernels import xla
from pallas_kernels.gpu import paged_attention as gpu
from pallas_kernels.tpu import paged_attention as tpu


def paged_attention(
    q_tnh: jax.Array,
    k_tkh: jax.Array,
    v_tkh: jax.Array,
    kv: Any,
    query_start_b1: jax.Array,
    context_len_b: jax.Array,
    page_table_bp: jax.Array,
    num_requests: jax.Array,
    *,
    backend: str,
    scale: float,
    is_decode: bool,
) -> tuple[jax.Array, Any]:
    """(out_tnh, kv): attention of packed queries over their requests' blocks, the new K and V written there.

    See `pallas_kernels.reference.paged_attention`. `is_decode`: one query for each request, t = b.
    """
    match backend:
        case "xla":
            attend = functools.partial(xla.paged_attention, scale=scale, is_decode=is_decode)
        case "pallas_tpu":
            attend = functools.partial(tpu.paged_attention, scale=scale, is_decode=is_decode)
            attend = _over_kv_heads(attend, PartitionSpec(None, None, "tensor"))
        case "pallas_gpu":
            attend = functools.partial(gpu.paged_attention, scale=scale, is_decode=is_decode)
            attend = _over_kv_heads(attend, PartitionSpec(None, "tensor"))
        case "mosaic_gpu":
            attend = functools.partial(_mosaic_gpu, scale=scale, is_decode=is_decode)
            attend = _over_kv_heads(attend, PartitionSpec(None, "tensor"))
        case _:
            raise ValueError(f"attention_backend={backend!r} is not known: xla, pallas_tpu, pallas_gpu or mosaic_gpu")
    with jax.named_scope("paged_attention"):
        return attend(q_tnh, k_tkh, v_tkh, kv, query_start_b1, context_len_b, page_table_bp, num_requests)


def _mosaic_gpu(q_tnh, k_tkh, v_tkh, kv, *batch, scale: float, is_decode: bool) -> tuple[jax.Array, Any]:
    """Decodes in the kernel for Hopper GPUs, where it fits; all else like "pallas_gpu"."""
    (_, n, h), (_, k, block_size, _) = q_tnh.shape, kv.k.shape
    sizes = {"num_heads": n, "num_kv_heads": k, "head_dim": h, "block_size": block_size}
    if is_decode and _mosaic_decode().why_not(dtype=q_tnh.dtype, kv_dtype=kv.k.dtype, **sizes) is None:
        return _mosaic_decode().paged_attention(q_tnh, k_tkh, v_tkh, kv, *batch, scale=scale)
    return gpu.paged_attention(q_tnh, k_tkh, v_tkh, kv, *batch, scale=scale, is_decode=is_decode)


def decode_notice(config: EngineConfig, model: ModelConfig) -> str | None:
    """A line for when attention_backend='mosaic_gpu' has no kernel of its own for the model's decodes."""
    if config.attention_backend != "mosaic_gpu":
        return None
    assert config.block_size != "auto"
    sizes = {"num_heads": model.num_heads, "num_kv_heads": model.num_kv_heads, "head_dim": model.head_dim}
    sizes["block_size"] = config.block_size
    reason = _mosaic_decode().why_not(dtype=config.dtype, kv_dtype=config.dtype, **sizes)
    return reason and f"attention_backend='mosaic_gpu' takes the kernel of 'pallas_gpu' for decodes as well: {reason}"


def _mosaic_decode():
    """The module, at first use: it takes a third of a second to import."""
    from pallas_kernels.gpu import mosaic_decode

    return mosaic_decode


def _over_kv_heads(attend: Callable, pool: PartitionSpec) -> Callable:
    """`attend`, under a mesh on each shard of the heads, which the pool is split by as well: the compiler cannot split
    a kernel."""
    if jax.sharding.get_abstract_mesh().shape.get("tensor", 1) == 1:
        return attend
    heads, whole = PartitionSpec(None, "tensor"), PartitionSpec()
    return jax.shard_map(
        attend,
        in_specs=(heads, heads, heads, pool, whole, whole, whole, whole),
        out_specs=(heads, pool),
        check_vma=False,
    )
