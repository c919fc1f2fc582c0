"""Weights, architecture and vocabulary in one GGUF file, llama.cpp's format. The `gguf` package parses and dequantizes.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import dequantize

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""llama.cpp's name of a module -> Hugging Face's, without the layer before and `.weight` or `.bias` behind."""

KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
"""Metadata key after `llama.` -> key of config.json."""

ROPE_SCALING_KEYS = {
    "type": "rope_type",
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
"""Metadata key after `llama.rope.scaling.` -> key of rope_scaling."""

NEUTRAL = {"expert_count": 0, "expert_used_count": 0, "rope.scaling.attn_factor": 1, "rope.scaling.yarn_attn_factor": 1}
"""Keys after `llama.` that are supported with this value only."""

REMARKS = {"vocab_size", "rope.dimension_count", "attention.value_length", "rope.scaling.finetuned"}
"""Keys after `llama.` that say what other keys and the tensors say too."""


class GGUFFile:
    """One file, opened once. ValueError where it is damaged, split, or of an architecture other than llama."""

    def __init__(self, path: Path):
        self.path = path
        try:
            reader = _Reader(path)
        except (ValueError, IndexError, KeyError) as error:
            raise ValueError(f"{path} cannot be read as GGUF ({error}); download it again") from None
        self.metadata: dict[str, Any] = {key: field.contents() for key, field in reader.fields.items()}
        self.stored = {tensor.name: tensor for tensor in reader.tensors}
        if self.metadata.get("split.count", 1) > 1:
            raise ValueError(
                f"{path} is one of {self.metadata['split.count']} parts; merge them: llama-gguf-split --merge"
            )
        if (architecture := self.metadata.get("general.architecture")) != "llama":
            raise ValueError(f"{path}: architecture {architecture!r} is not supported in GGUF files; only 'llama' is")
        self.hf_config = self._hf_config()

    def names(self) -> list[str]:
        """The Hugging Face names of all tensors. `rope_freqs.weight` is in the config already."""
        return [_hf_name(name) for name in self.stored if name != "rope_freqs.weight"]

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """(Hugging Face name, float32 array), dequantized one at a time; rows of Q and K in Hugging Face's order."""
        for name, tensor in self.stored.items():
            if name == "rope_freqs.weight":
                continue
            try:
                # As a plain array: the package slices it thousands of times, which numpy.memmap makes slow.
                data = tensor.data.view(np.ndarray)
                array = dequantize(_joined(data), tensor.tensor_type).reshape(*data.shape[:-1], -1)
            except NotImplementedError:
                raise ValueError(
                    f"{self.path}: {name} is stored as {tensor.tensor_type.name}, which the gguf package cannot "
                    "dequantize; convert the file to a plain k-quant or Q8_0"
                ) from None
            if ".attn_q." in name:
                array = unpermute(array, self.hf_config["num_attention_heads"])
            if ".attn_k." in name:
                array = unpermute(array, self.hf_config["num_key_value_heads"])
            yield _hf_name(name), array

    def _hf_config(self) -> dict[str, Any]:
        """What config.json would say, for `llama.model_config`. ValueError on keys that it has no word for."""
        prefix = "llama."
        keys = {k.removeprefix(prefix): _short(v) for k, v in self.metadata.items() if k.startswith(prefix)}
        hf = {KEYS[key]: value for key, value in keys.items() if key in KEYS}
        rope = {name: keys[key] for k, name in ROPE_SCALING_KEYS.items() if (key := f"rope.scaling.{k}") in keys}
        unknown = keys.keys() - KEYS.keys() - REMARKS - {f"rope.scaling.{k}" for k in ROPE_SCALING_KEYS}
        unknown = sorted(key for key in unknown if key not in NEUTRAL or keys[key] != NEUTRAL[key])
        if unknown:
            raise ValueError(
                f"{self.path}: metadata {', '.join(f'{prefix}{key}={keys[key]!r}' for key in unknown)} is not supported"
            )
        hf.setdefault("num_key_value_heads", hf.get("num_attention_heads"))
        for name in ("hidden_size", "num_attention_heads", "num_key_value_heads"):
            if not isinstance(hf.get(name), int):
                key = next(key for key, hf_name in KEYS.items() if hf_name == name)
                raise ValueError(
                    f"{self.path}: metadata {prefix}{key}={hf.get(name)!r} must be one whole number for all layers"
                )
        embeddings = self._tensor("token_embd.weight")
        head_dim = hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
        if (rotated := keys.get("rope.dimension_count", head_dim)) != head_dim:
            hf["partial_rotary_factor"] = rotated / head_dim
        # llama.cpp takes a factor without a type as linear.
        if rope and rope.setdefault("rope_type", "linear") != "none":
            hf["rope_scaling"] = rope
        if "rope_freqs.weight" in self.stored:
            hf["rope_scaling"] = self._llama3_scaling(head_dim, hf.get("rope_theta", 10000.0))
        eos = [self.metadata.get(f"tokenizer.ggml.{which}_token_id") for which in ("eos", "eot", "eom")]
        return hf | {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": int(embeddings.shape[1]),
            "tie_word_embeddings": "output.weight" not in self.stored,
            "attention_bias": "blk.0.attn_q.bias" in self.stored,
            "mlp_bias": "blk.0.ffn_up.bias" in self.stored,
            "dtype": {"F16": "float16", "BF16": "bfloat16"}.get(embeddings.tensor_type.name, "float32"),
            "eos_token_id": [i for i in eos if i is not None],
        }

    def _llama3_scaling(self, head_dim: int, theta: float) -> dict[str, Any]:
        """The rope_scaling of Llama 3.1 and 3.2, of which such files keep only the divisors of the frequencies.

        The converter's formula with Llama 3's bounds must give the same divisors; ValueError where it does not.
        """
        divisors = dequantize(self.stored["rope_freqs.weight"].data, self.stored["rope_freqs.weight"].tensor_type)
        factor, low, high, original = float(divisors.max()), 1.0, 4.0, 8192
        wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
        smooth = np.clip((original / wavelengths - low) / (high - low), 0, 1)
        if not np.allclose(divisors, 1 / ((1 - smooth) / factor + smooth), rtol=1e-4):
            raise ValueError(
                f"{self.path}: rope_freqs.weight is not Llama 3's (low_freq_factor 1, high_freq_factor 4, "
                "8192 original positions); give the model as safetensors, where config.json has the parameters"
            )
        return {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": original,
        }

    def _tensor(self, name: str) -> Any:
        if name not in self.stored:
            raise ValueError(f"{self.path} has no tensor {name}; is it a vocabulary only?")
        return self.stored[name]


def _joined(data: np.ndarray) -> np.ndarray:
    """Rows joined to about 3 kB each: the package takes 16 at a time, and short ones cost more in calls than work."""
    most = max(1, 3072 // (data.shape[-1] * data.itemsize))
    num_joined = math.gcd(math.prod(data.shape[:-1]), 1 << (most.bit_length() - 1))
    return data.reshape(-1, num_joined * data.shape[-1])


def unpermute(array: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows (2i, 2i + 1) of each head, which llama.cpp rotates as a pair, back at (i, i + head_dim / 2)."""
    heads = array.reshape(num_heads, -1, 2, *array.shape[1:])
    return heads.swapaxes(1, 2).reshape(array.shape)


def _hf_name(name: str) -> str:
    """The name in Hugging Face's checkpoints; a name that is not known stays as it is."""
    layer = ""
    module, _, kind = name.rpartition(".")
    if module.startswith("blk."):
        _, number, module = module.split(".", 2)
        layer = f"model.layers.{number}."
    return f"{layer}{NAMES[module]}.{kind}" if module in NAMES else name


def _short(value: Any) -> Any:
    """A float32 as the shortest decimal that gives it: 1e-5, not 9.999999747378752e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


class _Reader(gguf.GGUFReader):
    """Reads arrays of the metadata in one go: a vocabulary of 49,000 tokens in 0.2 s instead of 2 s."""

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type != gguf.GGUFValueType.ARRAY or self.byte_order != "I":
            return super()._get_field_parts(orig_offs, raw_type)
        item_type = gguf.GGUFValueType(self._get(orig_offs, np.uint32)[0])
        count = int(self._get(orig_offs + 4, np.uint64)[0])
        start, types = orig_offs + 12, [gguf.GGUFValueType.ARRAY, item_type]
        if item_type != gguf.GGUFValueType.STRING:
            items = self._get(start, self.gguf_scalar_to_np[item_type], count)
            return 12 + items.nbytes, [items], [0], types
        data, parts, offset = np.asarray(self.data), [], start
        for _ in range(count):
            end = offset + 8 + int.from_bytes(data[offset : offset + 8].tobytes(), "little")
            if end > len(data):
                raise ValueError(f"an array of {count} texts goes beyond its end")
            parts.append(data[offset + 8 : end])
            offset = end
        return offset - orig_offs, parts, list(range(count)), types
