"""Which form of paged attention runs: one `match` over the backends."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

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
        case _:
            raise ValueError(f"attention_backend={backend!r} is not known: xla, pallas_tpu or pallas_gpu")
    with jax.named_scope("paged_attention"):
        return attend(q_tnh, k_tkh, v_tkh, kv, query_start_b1, context_len_b, page_table_bp, num_requests)


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
