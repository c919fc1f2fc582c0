"""The decoder. Families differ in the fields of `ModelConfig` only.

Layers are a Python loop over per-layer weights and pools: XLA for GPUs copies scanned weights before each product,
and a pool passed through `lax.scan` as inputs and outputs is copied whole everywhere.
"""

import functools

import flax.struct
import jax
import jax.numpy as jnp

from jaxpaged.attention import paged_attention
from jaxpaged.config import ModelConfig
from jaxpaged.kv_cache import KVCache
from jaxpaged.models import layers
from jaxpaged.models.weights import LayerWeights, Weights


@flax.struct.dataclass
class PackedTokens:
    """Tokens of many requests, one request after another; see `step_data.StepInputs`."""

    token_t: jax.Array
    position_t: jax.Array
    query_start_b1: jax.Array
    context_len_b: jax.Array
    page_table_bp: jax.Array
    num_requests: jax.Array


def forward(
    config: ModelConfig,
    weights: Weights,
    tokens: PackedTokens,
    kv: KVCache,
    *,
    backend: str,
    max_model_len: int,
    is_decode: bool,
) -> tuple[jax.Array, KVCache]:
    """(hidden_td after the last norm, kv with the tokens' K and V written)."""
    hidden_td = layers.embedding(tokens.token_t, weights.embed_vd, weights.final_norm_d.dtype)
    angles = layers.rope_angles(tokens.position_t, config, max_model_len)
    # Traced and lowered once, not for each layer; XLA inlines it.
    layer = jax.jit(functools.partial(_layer, config, backend=backend, is_decode=is_decode))
    new_kv = []
    for layer_weights, layer_kv in zip(weights.layers, kv, strict=True):
        hidden_td, layer_kv = layer(layer_weights, hidden_td, angles, tokens, layer_kv)
        new_kv.append(layer_kv)
    return layers.rms_norm(hidden_td, weights.final_norm_d, config.rms_norm_eps), tuple(new_kv)


def logits(weights: Weights, hidden_bd: jax.Array) -> jax.Array:
    """Scores of the next token [b, v] in float32."""
    with jax.named_scope("logits"):
        return layers.logits(hidden_bd, weights.embed_vd if weights.head_vd is None else weights.head_vd)


def _layer(config: ModelConfig, w: LayerWeights, hidden_td, angles, tokens: PackedTokens, kv, *, backend, is_decode):
    with jax.named_scope("attention"):
        x_td = layers.rms_norm(hidden_td, w.attention_norm_d, config.rms_norm_eps)
        out_td, kv = _attention(config, w, x_td, angles, tokens, kv, backend=backend, is_decode=is_decode)
        hidden_td = hidden_td + out_td
    with jax.named_scope("mlp"):
        x_td = layers.rms_norm(hidden_td, w.mlp_norm_d, config.rms_norm_eps)
        out_td = layers.gated_mlp(x_td, w.gate_up_od, w.down_df, w.gate_up_bias_o, w.down_bias_d)
    return hidden_td + out_td, kv


def _attention(config: ModelConfig, w: LayerWeights, x_td, angles, tokens: PackedTokens, kv, *, backend, is_decode):
    t, n, k, h = x_td.shape[0], config.num_heads, config.num_kv_heads, config.head_dim
    qkv_tnh = layers.linear(x_td, w.qkv_od, w.qkv_bias_o).reshape(t, n + 2 * k, h)
    q_tnh, k_tkh, v_tkh = jnp.split(qkv_tnh, (n, n + k), axis=1)
    out_tnh, kv = paged_attention(
        layers.rotate(q_tnh, *angles),
        layers.rotate(k_tkh, *angles),
        v_tkh,
        kv,
        tokens.query_start_b1,
        tokens.context_len_b,
        tokens.page_table_bp,
        tokens.num_requests,
        backend=backend,
        scale=h**-0.5,
        is_decode=is_decode,
    )
    return layers.linear(out_tnh.reshape(t, n * h), w.out_do, w.out_bias_d), kv
