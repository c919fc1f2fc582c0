"""The weights of a decoder as a pytree, and what each of them is: shape, dtype, logical axes.

Matrices stand as in checkpoints, [out, in]: for 16 rows and more XLA:CPU multiplies by them faster than by
[in, out], tied embeddings serve as the output head without a second copy, and loading transposes nothing.
Q, K and V are one matrix, so are gate and up: a small product costs about 100 µs of overhead on a CPU,
a kernel launch on a GPU.

Initialization, sharding and loading all derive from `param_specs`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from jaxpaged.config import ModelConfig


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """Shape, dtype and logical axis names of one weight; `std` of its random initialization (None: ones)."""

    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str | None, ...]
    std: float | None

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


@flax.struct.dataclass
class LayerWeights:
    """One layer. `o` in a suffix is a fused output axis: Q, K, V heads one after another, or gate then up."""

    attention_norm_d: Any
    qkv_od: Any
    out_do: Any
    mlp_norm_d: Any
    gate_up_od: Any
    down_df: Any
    qkv_bias_o: Any = None
    out_bias_d: Any = None
    gate_up_bias_o: Any = None
    down_bias_d: Any = None


@flax.struct.dataclass
class Weights:
    """The whole model. `head_vd` is None where the embeddings are tied."""

    embed_vd: Any
    layers: tuple[LayerWeights, ...]
    final_norm_d: Any
    head_vd: Any = None


def param_specs(config: ModelConfig, dtype: str) -> Weights:
    """The tree of `Weights` with a `ParamSpec` for each array."""
    d, f, v = config.hidden_size, config.intermediate_size, config.vocab_size
    num_q, num_kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def norm(*shape):
        return ParamSpec(shape, dtype, (None,) * len(shape), None)

    def matrix(shape, axes):
        return ParamSpec(shape, dtype, axes, 1 / math.sqrt(shape[-1]))

    def bias(size, axis, present):
        return ParamSpec((size,), dtype, (axis,), 0.02) if present else None

    layer = LayerWeights(
        attention_norm_d=norm(d),
        qkv_od=matrix((num_q + 2 * num_kv, d), ("qkv", None)),
        out_do=matrix((d, num_q), (None, "heads")),
        mlp_norm_d=norm(d),
        gate_up_od=matrix((2 * f, d), ("gate_up", None)),
        down_df=matrix((d, f), (None, "mlp")),
        qkv_bias_o=bias(num_q + 2 * num_kv, "qkv", config.attention_bias),
        out_bias_d=bias(d, None, config.attention_bias),
        gate_up_bias_o=bias(2 * f, "gate_up", config.mlp_bias),
        down_bias_d=bias(d, None, config.mlp_bias),
    )
    return Weights(
        embed_vd=ParamSpec((v, d), dtype, ("vocab", None), 1 / math.sqrt(d)),
        layers=(layer,) * config.num_layers,
        final_norm_d=norm(d),
        head_vd=None if config.tie_word_embeddings else matrix((v, d), ("vocab", None)),
    )


def map_specs(f: Callable[[ParamSpec], Any], specs: Weights) -> Weights:
    """`f` of each spec, in the same tree."""
    return jax.tree.map(f, specs, is_leaf=lambda x: isinstance(x, ParamSpec))


def weight_bytes(specs: Weights) -> int:
    """Bytes of all weights."""
    return sum(spec.num_bytes for spec in jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, ParamSpec)))


def random_weights(specs: Weights, seed: int) -> Weights:
    """Random weights of the right shapes, made on the device: normal with the spec's `std`, norms one."""
    leaves, tree = jax.tree.flatten(specs, is_leaf=lambda x: isinstance(x, ParamSpec))
    words = jnp.array([seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF], jnp.uint32)
    keys = jax.random.split(jax.random.wrap_key_data(words, impl="threefry2x32"), len(leaves))

    def draw(spec, key):
        if spec.std is None:
            return jnp.ones(spec.shape, spec.dtype)
        return (jax.random.normal(key, spec.shape, jnp.float32) * spec.std).astype(spec.dtype)

    return jax.tree.unflatten(tree, [draw(spec, key) for spec, key in zip(leaves, keys, strict=True)])
