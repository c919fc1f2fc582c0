"""The weights of a decoder as a pytree, and what each of them is: shape, dtype, logical axes.

Matrices stand as in checkpoints, [out, in]: XLA:CPU multiplies by them faster than by [in, out] (float32 from 8 rows
on, bfloat16 and int8 with any number), tied embeddings serve as the output head without a second copy, and loading
transposes nothing. Q, K and V are one matrix, so are gate and up: a small product costs about 100 µs of overhead
on a CPU, a kernel launch on a GPU.

Quantized, a matrix is an `Int8Matrix` in the same place. Initialization, sharding and loading all derive from
`param_specs`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from jaxpaged.config import ModelConfig
from jaxpaged.models.int8 import Int8Matrix, quantize


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


def param_specs(config: ModelConfig, dtype: str, quantization: str | None = None) -> Weights:
    """The tree of `Weights` with a `ParamSpec` for each array.

    With quantization "int8" the matrices of the layers and the output head are `Int8Matrix`, and so are embeddings that
    serve as the head; embeddings of their own, norms and biases are as without.
    """
    d, f, v = config.hidden_size, config.intermediate_size, config.vocab_size
    num_q, num_kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def norm(*shape):
        return ParamSpec(shape, dtype, (None,) * len(shape), None)

    def matrix(shape, axes, quantization=quantization):
        std = 1 / math.sqrt(shape[-1])
        if quantization == "int8":
            return Int8Matrix(ParamSpec(shape, "int8", axes, std), ParamSpec(shape[:1], "float32", axes[:1], None))
        return ParamSpec(shape, dtype, axes, std)

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
        embed_vd=matrix((v, d), ("vocab", None), quantization if config.tie_word_embeddings else None),
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


def is_weight_spec(x: Any) -> bool:
    """Whether x is what `param_specs` says of one weight, which is two arrays where it is quantized."""
    return isinstance(x, (ParamSpec, Int8Matrix))


def unquantized(spec: ParamSpec | Int8Matrix) -> ParamSpec:
    """What is read or drawn for a weight: float32 where it is quantized afterwards, else the weight as it is."""
    return replace(spec.q_rc, dtype="float32") if isinstance(spec, Int8Matrix) else spec


_quantize = jax.jit(quantize)


def placed(array: Any, spec: ParamSpec | Int8Matrix) -> jax.Array | Int8Matrix:
    """A weight of `unquantized(spec)` on the device, quantized where the spec says so."""
    if isinstance(spec, Int8Matrix):
        # Waits, so that the device holds one weight in float32 at a time.
        return jax.block_until_ready(_quantize(array))
    return jnp.asarray(array)


def random_weights(specs: Weights, seed: int) -> Weights:
    """Random weights of the right shapes, made on the device: normal with the spec's `std`, norms one.

    A seed gives the same numbers with and without quantization.
    """
    leaves, tree = jax.tree.flatten(specs, is_leaf=is_weight_spec)
    words = jnp.array([seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF], jnp.uint32)
    keys = jax.random.split(jax.random.wrap_key_data(words, impl="threefry2x32"), len(leaves))

    def draw(spec, key):
        if spec.std is None:
            return jnp.ones(spec.shape, spec.dtype)
        return (jax.random.normal(key, spec.shape, jnp.float32) * spec.std).astype(spec.dtype)

    arrays = [placed(draw(unquantized(spec), key), spec) for spec, key in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(tree, arrays)
