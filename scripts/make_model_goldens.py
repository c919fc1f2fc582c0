"""Writes tests/data/models/: small random Llama checkpoints and what Hugging Face computes with them.

Each directory holds what `save_pretrained` wrote (config.json comes from transformers itself) and goldens.npz:
`prompt_token_ids` int32 [48] and `logits` float32 [48, vocab], computed in float32 for all positions.
Needs `torch` and `transformers`, which the project itself does not. Usage: make_model_goldens.py [directory]
"""

import shutil
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

PROMPT_LEN = 48
BASE = dict(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    rms_norm_eps=1e-5,
    bos_token_id=1,
    eos_token_id=2,
)
# Its head_dim times its heads is not its hidden size.
SMALL = BASE | dict(hidden_size=32, intermediate_size=64, head_dim=16, tie_word_embeddings=True)


def rope(rope_type: str, max_position_embeddings: int, **parameters) -> dict:
    parameters = {"rope_theta": 10000.0, "rope_type": rope_type} | parameters
    return SMALL | dict(max_position_embeddings=max_position_embeddings, rope_parameters=parameters)


YARN = dict(factor=4.0, original_max_position_embeddings=512)
MODELS = {
    "gqa_tied": BASE | dict(num_hidden_layers=3, intermediate_size=64, tie_word_embeddings=True),
    "untied_biases": BASE | dict(attention_bias=True, mlp_bias=True, eos_token_id=[2, 5]),
    "mha_sharded": BASE | dict(num_key_value_heads=4, rope_parameters={"rope_type": "default", "rope_theta": 500000.0}),
    "bfloat16": SMALL | dict(num_key_value_heads=1),
    "rope_linear": rope("linear", 256, factor=4.0),
    "rope_dynamic": rope("dynamic", 64, factor=2.0),
    # Longer than the trained 32 positions: transformers takes the frequencies for the prompt's 48.
    "rope_dynamic_beyond": rope("dynamic", 32, factor=2.0),
    # Wavelengths from 6 to 20,000 tokens: below, between and above the bounds of 128 and 512.
    "rope_llama3": rope(
        "llama3",
        4096,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=512,
    ),
    "rope_yarn": rope("yarn", 2048, **YARN),
    "rope_yarn_attention_factor": rope("yarn", 2048, **YARN, attention_factor=1.5, beta_fast=16.0, beta_slow=2.0),
    "rope_yarn_mscale": rope("yarn", 2048, **YARN, mscale=0.707, mscale_all_dim=1.4, truncate=False),
}


@torch.no_grad()
def draw_weights(model: LlamaForCausalLM, seed: int) -> None:
    """Normal weights large enough that attention is uneven, the logits are far from uniform, and no bias is zero."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if name.endswith("bias"):
            weight.copy_(0.3 * noise)
        elif "norm" in name:
            weight.copy_(1 + 0.2 * noise)
        elif "embed" in name:
            weight.copy_(0.5 * noise)
        else:
            weight.copy_(1.5 * noise / weight.shape[1] ** 0.5)


def make(name: str, settings: dict, directory: Path, seed: int) -> None:
    """Writes one checkpoint and its goldens."""
    model = LlamaForCausalLM(LlamaConfig(**settings, attn_implementation="eager")).eval()
    draw_weights(model, seed)
    if name == "bfloat16":
        model = model.to(torch.bfloat16)
    shutil.rmtree(directory, ignore_errors=True)
    model.save_pretrained(directory, max_shard_size="100KB" if name.endswith("sharded") else "1GB")

    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    prompt = np.random.default_rng(seed).integers(3, settings["vocab_size"], PROMPT_LEN)
    with torch.no_grad():
        logits = model(torch.tensor(prompt)[None]).logits[0].numpy()
    assert np.ptp(logits, axis=1).min() > 3, f"{name}: the logits are nearly uniform"
    assert len(set(logits.argmax(1))) > 15, f"{name}: most positions have the same best token"
    np.savez_compressed(directory / "goldens.npz", prompt_token_ids=prompt.astype(np.int32), logits=logits)
    print(f"{name}: {sum(f.stat().st_size for f in directory.iterdir()) / 1e3:.0f} kB")


def main() -> None:
    default = Path(__file__).parent.parent / "tests" / "data" / "models"
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else default
    for seed, (name, settings) in enumerate(MODELS.items()):
        make(name, settings, root / name, seed)


if __name__ == "__main__":
    main()
