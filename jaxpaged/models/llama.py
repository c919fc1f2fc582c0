"""The Llama family (Llama 2 and 3, TinyLlama, SmolLM2) as data: config.json -> `ModelConfig`, weight name -> tree path.

The meaning of the rotary keys and their defaults follow transformers' `modeling_rope_utils.py`.
"""

from collections.abc import Mapping
from typing import Any

from jaxpaged.config import DTYPES, ModelConfig, RopeScaling

NAMES = {
    "model.embed_tokens.weight": ("embed_vd", 0),
    "model.layers.{l}.input_layernorm.weight": ("layers.{l}.attention_norm_d", 0),
    "model.layers.{l}.self_attn.q_proj.weight": ("layers.{l}.qkv_od", 0),
    "model.layers.{l}.self_attn.k_proj.weight": ("layers.{l}.qkv_od", 1),
    "model.layers.{l}.self_attn.v_proj.weight": ("layers.{l}.qkv_od", 2),
    "model.layers.{l}.self_attn.o_proj.weight": ("layers.{l}.out_do", 0),
    "model.layers.{l}.post_attention_layernorm.weight": ("layers.{l}.mlp_norm_d", 0),
    "model.layers.{l}.mlp.gate_proj.weight": ("layers.{l}.gate_up_od", 0),
    "model.layers.{l}.mlp.up_proj.weight": ("layers.{l}.gate_up_od", 1),
    "model.layers.{l}.mlp.down_proj.weight": ("layers.{l}.down_df", 0),
    "model.layers.{l}.self_attn.q_proj.bias": ("layers.{l}.qkv_bias_o", 0),
    "model.layers.{l}.self_attn.k_proj.bias": ("layers.{l}.qkv_bias_o", 1),
    "model.layers.{l}.self_attn.v_proj.bias": ("layers.{l}.qkv_bias_o", 2),
    "model.layers.{l}.self_attn.o_proj.bias": ("layers.{l}.out_bias_d", 0),
    "model.layers.{l}.mlp.gate_proj.bias": ("layers.{l}.gate_up_bias_o", 0),
    "model.layers.{l}.mlp.up_proj.bias": ("layers.{l}.gate_up_bias_o", 1),
    "model.layers.{l}.mlp.down_proj.bias": ("layers.{l}.down_bias_d", 0),
    "model.norm.weight": ("final_norm_d", 0),
    "lm_head.weight": ("head_vd", 0),
}
"""Hugging Face name -> (path in `Weights`, which part of the fused matrix); `{l}` is the layer."""

IGNORED = ("model.layers.{l}.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq")
"""Names that old checkpoints carry and that are computed from the config here."""

IGNORED_WHEN_TIED = ("lm_head.weight",)
"""Copies of the embeddings."""

NEUTRAL = {
    "attention_multiplier": (None, 1),
    "attn_logit_softcapping": (None,),
    "clip_qkv": (None,),
    "compression_config": (None,),
    "embedding_multiplier": (None, 1),
    "final_logit_softcapping": (None,),
    "hidden_act": ("silu", "swish"),
    "logit_scale": (None, 1),
    "logits_scaling": (None, 1),
    "num_experts": (None, 0, 1),
    "num_local_experts": (None, 0, 1),
    "partial_rotary_factor": (None, 1),
    "qk_layernorm": (None, False),
    "quantization": (None,),
    "quantization_config": (None,),
    "residual_multiplier": (None, 1),
    "rope_interleaved": (None, False),
    "sliding_window": (None,),
    "use_qk_norm": (None, False),
}
"""Keys that change the mathematics, with the values that leave this family's as it is."""

ROPE_KEYS = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor"}),
    "llama3": frozenset({"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"}),
    "yarn": frozenset(
        {"factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"}
        | {"mscale", "mscale_all_dim", "truncate"}
    ),
}
"""What each `rope_type` reads."""


def model_config(hf: Mapping[str, Any]) -> ModelConfig:
    """The architecture that a Hugging Face config.json describes.

    ValueError names the key and the value where it is missing, of the wrong type, or asks for mathematics
    that the decoder does not have.
    """
    for key, allowed in NEUTRAL.items():
        if key in hf and hf[key] not in allowed:
            raise ValueError(
                f"config.json: {key}={hf[key]!r} is not supported for this family; it must be "
                f"{' or '.join(map(repr, allowed))}"
            )
    hidden_size, num_heads = _int(hf, "hidden_size"), _int(hf, "num_attention_heads")
    if hf.get("head_dim") is None and hidden_size % num_heads:
        raise ValueError(
            f"config.json: hidden_size={hidden_size} is no multiple of num_attention_heads={num_heads}, "
            "and head_dim is not given"
        )
    rope_theta, rope_scaling = _rope(hf)
    rms_norm_eps = _number(hf, "rms_norm_eps", 1e-6)
    if rms_norm_eps < 0:
        raise ValueError(f"config.json: rms_norm_eps={rms_norm_eps} must be 0 or more")
    vocab_size = _int(hf, "vocab_size")
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=_int(hf, "intermediate_size"),
        num_layers=_int(hf, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=_int(hf, "num_key_value_heads", num_heads),
        head_dim=_int(hf, "head_dim", hidden_size // num_heads),
        max_position_embeddings=_int(hf, "max_position_embeddings"),
        rms_norm_eps=rms_norm_eps,
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        tie_word_embeddings=_bool(hf, "tie_word_embeddings"),
        attention_bias=_bool(hf, "attention_bias"),
        mlp_bias=_bool(hf, "mlp_bias"),
        dtype=_dtype(hf),
        eos_token_ids=tuple(i for i in eos_token_ids(hf) if i < vocab_size),  # others are never drawn
    )


def eos_token_ids(hf: Mapping[str, Any]) -> tuple[int, ...]:
    """The ids under `eos_token_id` of a config.json or generation_config.json, which holds one, a list or none."""
    ids = hf.get("eos_token_id")
    ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
    if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
        raise ValueError(f"eos_token_id={hf['eos_token_id']!r} must be a token id or a list of token ids")
    return tuple(dict.fromkeys(ids))


def _rope(hf: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """(theta, scaling) from `rope_scaling` beside `rope_theta`, or from transformers 5's `rope_parameters`."""
    rope = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        raise ValueError(f"config.json: rope_scaling={rope!r} must be an object")
    rope = dict(rope)
    theta = _number(rope if rope.get("rope_theta") is not None else hf, "rope_theta", 10000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if theta <= 0:
        raise ValueError(f"config.json: rope_theta={theta} must be more than 0")
    if not isinstance(kind, str) or kind not in ROPE_KEYS:
        raise ValueError(
            f"config.json: rope_type={kind!r} is not supported; this family reads {', '.join(map(repr, ROPE_KEYS))}"
        )
    if rope.get("partial_rotary_factor") not in (None, 1):
        raise ValueError(f"config.json: partial_rotary_factor={rope['partial_rotary_factor']!r} is not supported")
    # `finetuned` is a remark of the first YaRN checkpoints, without effect.
    known = ROPE_KEYS[kind] | {"rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned"}
    unknown = {key: value for key, value in rope.items() if key not in known}
    if unknown:
        raise ValueError(
            f"config.json: rope_type={kind!r} does not know {', '.join(f'{k}={v!r}' for k, v in unknown.items())}; "
            f"its keys are {', '.join(sorted(ROPE_KEYS[kind])) or 'none'}"
        )
    return theta, None if kind == "default" else _rope_scaling(kind, rope, hf)


def _rope_scaling(kind: Any, rope: dict[str, Any], hf: Mapping[str, Any]) -> RopeScaling:
    max_positions = _int(hf, "max_position_embeddings")
    original = None
    if kind in ("llama3", "yarn"):
        # A key of the config itself wins over the one among the rope keys, as in transformers.
        source = hf if hf.get("original_max_position_embeddings") is not None else rope
        original = _int(source, "original_max_position_embeddings", max_positions)
    if kind == "yarn" and original and "factor" in rope and rope["factor"] is None:
        rope["factor"] = max_positions / original
    factor = _number(rope, "factor")
    if factor < 1:
        raise ValueError(f"config.json: factor={factor} of rope_type={kind!r} must be 1 or more")
    if kind in ("linear", "dynamic"):
        return RopeScaling(kind=kind, factor=factor)
    if kind == "llama3":
        low, high = _number(rope, "low_freq_factor"), _number(rope, "high_freq_factor")
        if high <= low:
            raise ValueError(f"config.json: high_freq_factor={high} must be greater than low_freq_factor={low}")
        return RopeScaling(
            kind=kind,
            factor=factor,
            original_max_position_embeddings=original,
            low_freq_factor=low,
            high_freq_factor=high,
        )
    optional = ("attention_factor", "mscale", "mscale_all_dim")
    return RopeScaling(
        kind=kind,
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=_number(rope, "beta_fast", 32.0) or 32.0,
        beta_slow=_number(rope, "beta_slow", 1.0) or 1.0,
        truncate=_bool(rope, "truncate", True),
        **{key: _number(rope, key) for key in optional if rope.get(key) is not None},
    )


def _dtype(hf: Mapping[str, Any]) -> str:
    dtype = hf.get("dtype") or hf.get("torch_dtype") or "float32"
    if dtype not in DTYPES:
        raise ValueError(f"config.json: dtype={dtype!r} is not supported; it must be one of {', '.join(DTYPES)}")
    return dtype


def _int(hf: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = hf.get(key) if hf.get(key) is not None else default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"config.json: {key}={value!r} must be a whole number, 1 or more")
    return value


def _number(hf: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = hf.get(key) if hf.get(key) is not None else default
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"config.json: {key}={value!r} must be a number")
    return float(value)


def _bool(hf: Mapping[str, Any], key: str, default: bool = False) -> bool:
    value = hf.get(key) if hf.get(key) is not None else default
    if not isinstance(value, bool):
        raise ValueError(f"config.json: {key}={value!r} must be true or false")
    return value
