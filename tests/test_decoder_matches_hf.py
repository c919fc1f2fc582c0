"""The decoder against Hugging Face in float32, on small checkpoints of every kind (scripts/make_model_goldens.py)."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.checkpoints import load_weights, open_model
from jaxpaged.kv_cache import make_pool
from jaxpaged.models import decoder

MODELS = Path(__file__).parent / "data" / "models"
NAMES = sorted(path.name for path in MODELS.iterdir() if (path / "goldens.npz").exists())
BLOCK_SIZE = 8

TOLERANCE = 2e-4
"""On logits of magnitude 10 or so: float32 sums in another order differ by a few 1e-6 of their terms' size."""


def logits_in_chunks(name: str, chunks: list[int], *, max_model_len: int = 64) -> tuple[np.ndarray, np.ndarray]:
    """(logits [t, v] computed chunk by chunk through a paged pool, Hugging Face's)."""
    goldens = np.load(MODELS / name / "goldens.npz")
    token_ids = goldens["prompt_token_ids"].astype(np.int32)
    source = open_model(MODELS / name, "auto")
    weights = load_weights(source, "float32")
    num_blocks = -(-len(token_ids) // BLOCK_SIZE)
    kv = make_pool(source.config, num_blocks, BLOCK_SIZE, "float32", "xla")
    page_table_bp = jnp.arange(num_blocks, dtype=jnp.int32)[::-1][None]
    rows, start = [], 0
    for size in [*chunks, len(token_ids) - sum(chunks)]:
        position_t = jnp.arange(start, start + size)
        tokens = decoder.PackedTokens(
            token_t=jnp.asarray(token_ids[start : start + size]),
            position_t=position_t,
            query_start_b1=jnp.array([0, size]),
            context_len_b=jnp.array([start + size]),
            page_table_bp=page_table_bp,
            num_requests=jnp.int32(1),
        )
        forward = jax.jit(decoder.forward, static_argnums=0, static_argnames=("backend", "max_model_len", "is_decode"))
        hidden_td, kv = forward(
            source.config, weights, tokens, kv, backend="xla", max_model_len=max_model_len, is_decode=size == 1
        )
        rows.append(np.asarray(decoder.logits(weights, hidden_td)))
        start += size
    return np.concatenate(rows), goldens["logits"]


def test_there_are_goldens_for_every_rope_type_and_form_of_weights():
    assert {"gqa_tied", "mha_sharded", "untied_biases", "bfloat16"} <= set(NAMES)
    assert {"rope_linear", "rope_dynamic", "rope_llama3", "rope_yarn"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_hugging_faces(name):
    # Hugging Face takes the dynamic frequencies of the length at hand, the engine those of max_model_len.
    ours, theirs = logits_in_chunks(name, [], max_model_len=48)
    np.testing.assert_allclose(ours, theirs, atol=TOLERANCE, rtol=0)


def test_logits_in_chunks_and_single_tokens_equal_hugging_faces():
    ours, theirs = logits_in_chunks("gqa_tied", [17, 1, 1, 8, 1])
    np.testing.assert_allclose(ours, theirs, atol=TOLERANCE, rtol=0)


def test_the_tolerance_would_notice_positions_off_by_one():
    ours, theirs = logits_in_chunks("gqa_tied", [])
    assert np.abs(ours[1:] - theirs[:-1]).max() > 100 * TOLERANCE
    assert np.abs(theirs).max() > 1
