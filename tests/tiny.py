"""A small random model whose greedy outputs vary with every prompt token, and naive attention as its oracle."""

import functools
import json
import tempfile
from pathlib import Path

import numpy as np
import tokenizers
from safetensors.numpy import save_file

from jaxpaged.config import ModelConfig

CONFIG = ModelConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=512,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    tie_word_embeddings=True,
    eos_token_ids=(2,),
)

HF_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": CONFIG.vocab_size,
    "hidden_size": CONFIG.hidden_size,
    "intermediate_size": CONFIG.intermediate_size,
    "num_hidden_layers": CONFIG.num_layers,
    "num_attention_heads": CONFIG.num_heads,
    "num_key_value_heads": CONFIG.num_kv_heads,
    "head_dim": CONFIG.head_dim,
    "max_position_embeddings": CONFIG.max_position_embeddings,
    "rms_norm_eps": CONFIG.rms_norm_eps,
    "rope_theta": CONFIG.rope_theta,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "eos_token_id": 2,
}


class CharsTokenizer:
    """Made with the tokenizers package: the token of an ASCII character from 3 on is its code. It may know fewer tokens
    than the model."""

    def __init__(self, num_tokens: int = CONFIG.vocab_size):
        bytes_to_chars = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        chars = [bytes_to_chars.pre_tokenize_str(chr(code))[0][0] for code in range(3, 128)]
        chars += sorted(set(bytes_to_chars.alphabet()) - set(chars))[: num_tokens - 128]
        vocab = {"<0>": 0, "<1>": 1, "<2>": 2} | {char: code for code, char in enumerate(chars, 3)}
        self.backend_tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
        self.backend_tokenizer.pre_tokenizer = bytes_to_chars
        self.backend_tokenizer.decoder = tokenizers.decoders.ByteLevel()
        self.backend_tokenizer.add_special_tokens(["<0>", "<1>", "<2>"])
        self.all_special_ids = [0, 1, 2]

    def encode(self, text: str) -> list[int]:
        return self.backend_tokenizer.encode(text).ids

    def decode(self, token_ids, skip_special_tokens: bool = False) -> str:
        return self.backend_tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)


@functools.cache
def tensors() -> dict[str, np.ndarray]:
    """The model's weights by Hugging Face name: large enough that attention is uneven and outputs do not repeat."""
    rng = np.random.default_rng(7)
    c = CONFIG

    def matrix(rows, columns, gain=1.6):
        return (rng.standard_normal((rows, columns)) * gain / np.sqrt(columns)).astype(np.float32)

    def norm():
        return (1 + 0.2 * rng.standard_normal(c.hidden_size)).astype(np.float32)

    weights = {
        "model.embed_tokens.weight": matrix(c.vocab_size, c.hidden_size, gain=3.0),
        "model.norm.weight": norm(),
    }
    for i in range(c.num_layers):
        layer = f"model.layers.{i}."
        weights |= {
            layer + "input_layernorm.weight": norm(),
            layer + "self_attn.q_proj.weight": matrix(c.num_heads * c.head_dim, c.hidden_size),
            layer + "self_attn.k_proj.weight": matrix(c.num_kv_heads * c.head_dim, c.hidden_size),
            layer + "self_attn.v_proj.weight": matrix(c.num_kv_heads * c.head_dim, c.hidden_size, gain=3.0),
            layer + "self_attn.o_proj.weight": matrix(c.hidden_size, c.num_heads * c.head_dim, gain=3.0),
            layer + "post_attention_layernorm.weight": norm(),
            layer + "mlp.gate_proj.weight": matrix(c.intermediate_size, c.hidden_size),
            layer + "mlp.up_proj.weight": matrix(c.intermediate_size, c.hidden_size),
            layer + "mlp.down_proj.weight": matrix(c.hidden_size, c.intermediate_size),
        }
    return weights


def write_model(directory: Path) -> Path:
    """The model as a Hugging Face directory, without a tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(HF_CONFIG))
    save_file(tensors(), directory / "model.safetensors")
    return directory


@functools.cache
def model_directory() -> str:
    """One directory with the model for all tests of a process."""
    return str(write_model(Path(tempfile.mkdtemp(prefix="jaxpaged-tiny-"))))


def prompts(num: int, *, least: int = 1, most: int = 70, seed: int = 0) -> list[list[int]]:
    """Random prompts without the end-of-sequence token."""
    rng = np.random.default_rng(seed)
    return [rng.integers(3, CONFIG.vocab_size, rng.integers(least, most + 1)).tolist() for _ in range(num)]


def naive_logits(token_ids: list[int]) -> np.ndarray:
    """Logits [t, v] of all positions: the textbook decoder with full attention, in float64, nothing cached."""
    c, w = CONFIG, {name: value.astype(np.float64) for name, value in tensors().items()}
    t = len(token_ids)
    x = w["model.embed_tokens.weight"][token_ids]

    def norm(x, gamma):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + c.rms_norm_eps) * gamma

    angle = np.arange(t)[:, None] * c.rope_theta ** (-np.arange(0, c.head_dim, 2) / c.head_dim)[None]
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]

    def rotate(x):
        a, b = np.split(x, 2, -1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    for i in range(c.num_layers):
        layer = {name.removeprefix(f"model.layers.{i}."): value for name, value in w.items() if f"layers.{i}." in name}
        h = norm(x, layer["input_layernorm.weight"])
        q = rotate((h @ layer["self_attn.q_proj.weight"].T).reshape(t, c.num_heads, c.head_dim))
        k = rotate((h @ layer["self_attn.k_proj.weight"].T).reshape(t, c.num_kv_heads, c.head_dim))
        v = (h @ layer["self_attn.v_proj.weight"].T).reshape(t, c.num_kv_heads, c.head_dim)
        k, v = (np.repeat(y, c.num_heads // c.num_kv_heads, axis=1) for y in (k, v))
        scores = np.einsum("tnh,snh->nts", q, k) / np.sqrt(c.head_dim)
        scores = np.where(np.tril(np.ones((t, t), bool)), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        x = x + np.einsum("nts,snh->tnh", weights, v).reshape(t, -1) @ layer["self_attn.o_proj.weight"].T
        h = norm(x, layer["post_attention_layernorm.weight"])
        gate = h @ layer["mlp.gate_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ layer["mlp.up_proj.weight"].T)) @ layer["mlp.down_proj.weight"].T
    return norm(x, w["model.norm.weight"]) @ w["model.embed_tokens.weight"].T


def naive_greedy(prompt: list[int], max_tokens: int) -> list[int]:
    """Greedy continuation, everything recomputed for each token; end-of-sequence is not looked for."""
    token_ids = list(prompt)
    for _ in range(max_tokens):
        token_ids.append(int(naive_logits(token_ids)[-1].argmax()))
    return token_ids[len(prompt) :]
