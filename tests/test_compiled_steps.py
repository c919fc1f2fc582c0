"""The compiled steps update the pool in place and copy neither pool nor weights."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import pytest

import tiny
from jaxpaged import steps
from jaxpaged.batch import make_buckets
from jaxpaged.config import EngineConfig
from jaxpaged.kv_cache import copy_blocks, pool_specs
from jaxpaged.models.weights import param_specs
from jaxpaged.runner import DrawShape, PrefillShape, StepCompiler

MODEL = dataclasses.replace(tiny.CONFIG, num_layers=3)
BLOCK_SIZE = 16
NUM_BLOCKS = 4000
SHAPES = {"decode": DrawShape(True, 8, 20), "prefill": PrefillShape(128, 8)}


def compiler(num_blocks: int, num_decode_steps: int = 8, max_num_seqs: int = 8) -> StepCompiler:
    config = EngineConfig(
        dtype="float32",
        block_size=BLOCK_SIZE,
        max_model_len=512,
        max_num_seqs=max_num_seqs,
        attention_backend="xla",
        num_device_blocks=num_blocks,
        num_decode_steps=num_decode_steps,
    )
    return StepCompiler(config, MODEL, make_buckets(config), num_blocks)


def size_of(tree) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def layer_pool_bytes(num_blocks: int) -> int:
    return size_of(pool_specs(MODEL, num_blocks, BLOCK_SIZE, "float32", "xla")[0])


def assert_in_place(compile_step, state_bytes: int):
    """`compile_step(num_blocks)`: alias bytes are pool + scratch block + state of rows; temporaries do not grow with
    the pool; nothing of a pool's or weight's shape is copied."""
    temporaries = []
    for num_blocks in (NUM_BLOCKS, 2 * NUM_BLOCKS, 4 * NUM_BLOCKS):
        compiled = compile_step(num_blocks)
        analysis = compiled.memory_analysis()
        pool_bytes = size_of(pool_specs(MODEL, num_blocks, BLOCK_SIZE, "float32", "xla"))
        assert analysis.alias_size_in_bytes == pool_bytes + state_bytes
        assert analysis.temp_size_in_bytes < layer_pool_bytes(num_blocks)
        assert_nothing_copied(compiled.as_text(), num_blocks)
        temporaries.append(analysis.temp_size_in_bytes)
    assert len(set(temporaries)) == 1, f"temporaries grow with the pool: {temporaries}"


def assert_nothing_copied(hlo: str, num_blocks: int):
    """No copy, transpose or convert in the optimized HLO has as many elements, in dimensions, as a weight or a pool."""
    forbidden = {
        tuple(sorted(leaf.shape))
        for leaf in (
            *jax.tree.leaves(pool_specs(MODEL, num_blocks, BLOCK_SIZE, "float32", "xla")),
            *(s for s in jax.tree.leaves(param_specs(MODEL, "float32"), is_leaf=lambda x: hasattr(x, "axes"))),
        )
        if len(leaf.shape) > 1
    }
    for line in hlo.splitlines():
        match = re.search(r"= \w+\[([\d,]+)\]\S* (copy|transpose|convert)\(", line)
        if match:
            shape = tuple(sorted(int(size) for size in match[1].split(",")))
            assert shape not in forbidden, f"a weight or a pool is copied: {line.strip()}"


def state_bytes(kind: str) -> int:
    """A prefill only reads the state of rows."""
    return 0 if kind == "prefill" else compiler(1).state_bytes


@pytest.mark.parametrize(("kind", "num_decode_steps"), [("decode", 1), ("decode", 8), ("prefill", 1)])
def test_steps_update_the_pool_in_place_and_copy_no_weight(kind, num_decode_steps):
    def compile_step(num_blocks):
        return compiler(num_blocks, num_decode_steps).lower(SHAPES[kind]).compile()

    assert_in_place(compile_step, state_bytes(kind))


@pytest.mark.parametrize("is_decode", [True, False])
def test_draws_update_counts_and_masks_in_place(is_decode):
    """As many rows as make one of their arrays larger than all else that a step of 8 requests needs."""
    many = compiler(16, max_num_seqs=2000)
    compiled = many.lower(DrawShape(is_decode, 8, 20, True)).compile()
    analysis, pool = compiled.memory_analysis(), size_of(pool_specs(MODEL, 16, BLOCK_SIZE, "float32", "xla"))
    assert analysis.alias_size_in_bytes == many.state_bytes + many.adjustments_bytes + (pool if is_decode else 0)
    assert analysis.temp_size_in_bytes < many.adjustments_bytes / 20
    assert not re.search(r"\[2001,[\d,]+\]\S* copy\(", compiled.as_text())


def test_a_copy_of_blocks_is_in_place():
    for num_blocks in (NUM_BLOCKS, 2 * NUM_BLOCKS):
        kv, ids = pool_specs(MODEL, num_blocks, BLOCK_SIZE, "float32", "xla"), jax.ShapeDtypeStruct((8,), jnp.int32)
        compiled = jax.jit(copy_blocks, donate_argnums=0).lower(kv, ids, ids).compile()
        assert compiled.memory_analysis().alias_size_in_bytes == size_of(kv)
        assert compiled.memory_analysis().temp_size_in_bytes < layer_pool_bytes(NUM_BLOCKS) / 10


def planted(step):
    """The step with a copy of the pool planted in it: it reads the old pool after writing the new one."""

    @functools.wraps(step)
    def with_copy(weights, kv, state, *arguments, **static):
        output, new_kv, *rest = step(weights, kv, state, *arguments, **static)
        changed = jnp.sum(jnp.stack([jnp.sum(new.k - old.k) for new, old in zip(new_kv, kv, strict=True)]))
        output = jax.tree.map(lambda x: x + (changed > 1e30).astype(x.dtype), output)
        return output, new_kv, *rest

    return with_copy


@pytest.mark.parametrize("kind", SHAPES)
def test_a_planted_copy_of_the_pool_is_noticed(kind, monkeypatch):
    name = f"{kind}_step"
    monkeypatch.setattr(steps, name, planted(getattr(steps, name)))
    with pytest.raises(AssertionError):
        assert_in_place(lambda num_blocks: compiler(num_blocks).lower(SHAPES[kind]).compile(), state_bytes(kind))


def test_a_planted_copy_of_a_weight_is_noticed():
    def cast(w):
        return jnp.sum(w.astype(jnp.bfloat16).T @ jnp.ones((w.shape[0], 2), jnp.bfloat16))

    weight = jax.ShapeDtypeStruct((MODEL.vocab_size, MODEL.hidden_size), jnp.float32)
    with pytest.raises(AssertionError, match="copied"):
        assert_nothing_copied(jax.jit(cast).lower(weight).compile().as_text(), NUM_BLOCKS)
