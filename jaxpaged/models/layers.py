"""Pure layers. Suffixes name the axes of an array:

b requests, t packed tokens, d model, f MLP hidden, n query heads, k KV heads, h head dimension, v vocabulary,
o a fused output axis, l layers, p blocks of a request, s slots of a block, 1 an axis of one (or one more: b1).
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpaged.config import ModelConfig, RopeScaling
from jaxpaged.models import int8
from jaxpaged.models.int8 import Int8Matrix


def rms_norm(x_td: jax.Array, gamma_d: jax.Array, eps: float) -> jax.Array:
    """RMSNorm over d, computed in float32, in x's dtype (arXiv:1910.07467)."""
    x32_td = x_td.astype(jnp.float32)
    scale_t1 = lax.rsqrt(jnp.mean(jnp.square(x32_td), axis=-1, keepdims=True) + eps)
    return (x32_td * scale_t1).astype(x_td.dtype) * gamma_d[None]


_MOST_ROWS_IN_HALVES = 16


def matmul_nt(x_td: jax.Array, weight_od: jax.Array | Int8Matrix, dtype: jax.typing.DTypeLike) -> jax.Array:
    """x Wᵀ [t, o] in `dtype`, for W in a checkpoint's order [out, in]; x is quantized, row by row, for an int8 W."""
    if isinstance(weight_od, Int8Matrix):
        return int8.matmul_nt(int8.quantize(x_td), weight_od).astype(dtype)
    whole = functools.partial(_matmul_nt, dtype=dtype)
    if x_td.shape[0] > _MOST_ROWS_IN_HALVES or weight_od.shape[0] % 2:
        return whole(x_td, weight_od)
    return lax.platform_dependent(
        x_td, weight_od, cpu=functools.partial(_matmul_nt_in_halves, dtype=dtype), default=whole
    )


def _matmul_nt(x_td, weight_od, *, dtype) -> jax.Array:
    return lax.dot_general(x_td, weight_od, (((1,), (1,)), ((), ())), preferred_element_type=dtype)


def _matmul_nt_in_halves(x_td, weight_od, *, dtype) -> jax.Array:
    """The same, half of the outputs each, as a batch of two W xᵀ: for few rows XLA:CPU takes 10 to 35 % less time."""
    (t, d), o = x_td.shape, weight_od.shape[0]
    x_2td, weight_2od = jnp.broadcast_to(x_td, (2, t, d)), weight_od.reshape(2, o // 2, d)
    y_2ot = lax.dot_general(weight_2od, x_2td, (((2,), (2,)), ((0,), (0,))), preferred_element_type=dtype)
    return y_2ot.transpose(2, 0, 1).reshape(t, o)


def linear(x_td: jax.Array, weight_od: jax.Array | Int8Matrix, bias_o: jax.Array | None = None) -> jax.Array:
    """x Wᵀ + bias [t, o] in x's dtype."""
    y_to = matmul_nt(x_td, weight_od, x_td.dtype)
    return y_to if bias_o is None else y_to + bias_o[None]


def gated_mlp(x_td, gate_up_od, down_df, gate_up_bias_o, down_bias_d) -> jax.Array:
    """(silu(x Gᵀ) · x Uᵀ) Dᵀ [t, d] (arXiv:2002.05202); gate and up are one matrix."""
    return linear(gated(linear(x_td, gate_up_od, gate_up_bias_o)), down_df, down_bias_d)


def gated(gate_up_to: jax.Array) -> jax.Array:
    """silu(gate) · up [t, f], silu computed in float32."""
    gate_tf, up_tf = jnp.split(gate_up_to, 2, axis=-1)
    return jax.nn.silu(gate_tf.astype(jnp.float32)).astype(up_tf.dtype) * up_tf


def logits(x_bd: jax.Array, head_vd: jax.Array | Int8Matrix) -> jax.Array:
    """x Wᵀ [b, v] in float32."""
    return matmul_nt(x_bd, head_vd, jnp.float32)


def embedding(token_t: jax.Array, embed_vd: jax.Array | Int8Matrix, dtype: jax.typing.DTypeLike) -> jax.Array:
    """The tokens' rows [t, d] in `dtype`; ids out of range are clipped."""
    if isinstance(embed_vd, Int8Matrix):
        return int8.take_rows(embed_vd, token_t).astype(dtype)
    return embed_vd.at[token_t].get(mode="clip").astype(dtype)


def rope_angles(position_t: jax.Array, config: ModelConfig, max_model_len: int) -> tuple[jax.Array, jax.Array]:
    """(cos, sin) of the rotary angles [t, h/2] in float32, with the scaling's attention factor in both."""
    frequency_h, attention_factor = rope_frequencies(config, max_model_len)
    angle_th = position_t.astype(jnp.float32)[:, None] * jnp.asarray(frequency_h)[None]
    return jnp.cos(angle_th) * attention_factor, jnp.sin(angle_th) * attention_factor


def rotate(x_tnh: jax.Array, cos_th: jax.Array, sin_th: jax.Array) -> jax.Array:
    """x with the pairs (i, i + h/2) of each head turned by their angles (arXiv:2104.09864), computed in float32."""
    first, second = jnp.split(x_tnh.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos_th[:, None], sin_th[:, None]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x_tnh.dtype)


def rope_frequencies(config: ModelConfig, max_model_len: int) -> tuple[np.ndarray, float]:
    """(radians per position for each pair [h/2], factor on cos and sin).

    The frequencies are the same for every position and length, or cached keys would be wrong: "dynamic" takes those
    of max_model_len, where Hugging Face changes them with each length beyond the trained one.
    """
    scaling = config.rope_scaling
    exponent_h = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    frequency_h, factor = config.rope_theta**-exponent_h, 1.0
    if scaling is not None:
        match scaling.kind:
            case "linear":
                frequency_h = frequency_h / scaling.factor
            case "dynamic":
                frequency_h = _dynamic_theta(config, scaling, max_model_len) ** -exponent_h
            case "llama3":
                frequency_h = _llama3_frequencies(frequency_h, scaling)
            case "yarn":
                frequency_h, factor = _yarn_frequencies(frequency_h, config, scaling), _yarn_attention_factor(scaling)
    return frequency_h.astype(np.float32), factor


def _dynamic_theta(config: ModelConfig, scaling: RopeScaling, max_model_len: int) -> float:
    """NTK-aware base for a context of max_model_len tokens; the trained one up to the trained length."""
    trained = scaling.original_max_position_embeddings or config.max_position_embeddings
    if max_model_len <= trained:
        return config.rope_theta
    stretch = scaling.factor * max_model_len / trained - (scaling.factor - 1)
    return config.rope_theta * stretch ** (config.head_dim / (config.head_dim - 2))


def _llama3_frequencies(frequency_h: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Slow frequencies divided by the factor, fast ones kept, a blend between (Llama 3.1 model card)."""
    trained = scaling.original_max_position_embeddings
    assert trained and scaling.low_freq_factor and scaling.high_freq_factor
    turns_h = trained * frequency_h / (2 * math.pi)
    blend_h = (turns_h - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept_h = np.clip(blend_h, 0, 1)
    return kept_h * frequency_h + (1 - kept_h) * frequency_h / scaling.factor


def _yarn_frequencies(frequency_h: np.ndarray, config: ModelConfig, scaling: RopeScaling) -> np.ndarray:
    """Blend of kept and interpolated frequencies by number of turns over the trained length (arXiv:2309.00071)."""
    trained = scaling.original_max_position_embeddings or config.max_position_embeddings

    def pair_of_turns(turns):
        return config.head_dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    low, high = pair_of_turns(scaling.beta_fast or 32), pair_of_turns(scaling.beta_slow or 1)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.head_dim - 1)
    width = high - low if high != low else 0.001
    interpolated_h = np.clip((np.arange(config.head_dim // 2) - low) / width, 0, 1)
    return frequency_h / scaling.factor * interpolated_h + frequency_h * (1 - interpolated_h)


def _yarn_attention_factor(scaling: RopeScaling) -> float:
    def mscale(weight):
        return 0.1 * weight * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0

    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return mscale(scaling.mscale) / mscale(scaling.mscale_all_dim)
    return mscale(1)
