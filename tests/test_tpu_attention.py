"""The TPU kernel, interpreted, against the oracle: numerics, races, reads out of bounds, what is not initialized.

The interpreter copies when a copy is waited for, so that what is read too early is NaN, and raises for reads out of
bounds. Races are read back after each call.
"""

import dataclasses
import functools
import inspect
import sys
import types
from pathlib import Path

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

import same_tokens
import tiny
from pallas_kernels.tpu import paged_attention as kernel
from pallas_kernels.tpu.layout import pack
from ragged import SCALE, make_batch

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
from check_attention import cases, compare, error_in, kernel_of

pytestmark = pytest.mark.interpret

INTERPRETER = pltpu.InterpretParams(
    detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise", dma_execution_mode="on_wait"
)


def interpreted(function, *arguments, **options):
    """What the function gives, and whether the interpreter found a race."""
    pltpu.reset_tpu_interpret_mode_state()
    with pltpu.force_tpu_interpret_mode(INTERPRETER):
        result = jax.block_until_ready(function(*arguments, **options))
    races = interpret_pallas_call.races
    assert races is not None, "the interpreter has not looked for races"
    return result, races.races_found


def check(batch, **options):
    """Output and pool are the oracle's, and there is no race."""
    _, has_races = interpreted(compare, "pallas_tpu", batch, **options)
    assert not has_races


EDGES = [0, 1, 14, 15, 16, 17, 30, 31, 32, 33, 47, 63, 64, 65, 95, 96, 128]
"""Lengths around the edges of blocks of 16, tiles of 16 and chunks of 32 tokens."""
WINDOWS = [None, 1, 40]
"""The last begins inside a block, and reaches into one chunk before or two."""


def window(size: int | None) -> dict:
    return {} if size is None else {"sliding_window": size}


@settings(max_examples=10, deadline=None)
@given(
    before=st.lists(st.sampled_from(EDGES), min_size=1, max_size=6),
    gone=st.sets(st.integers(0, 5), max_size=3),
    num_shared=st.integers(0, 2),
    sliding_window=st.sampled_from(WINDOWS),
    seed=st.integers(0, 99),
)
def test_decodes_match_the_oracle(before, gone, num_shared, sliding_window, seed):
    """With rows between them that are not there, and prefixes of shared blocks."""
    before = [max(n, 16 * num_shared) for n in before]
    lengths = [(n, 1) for n in before]
    batch = make_batch(
        lengths, block_size=16, head_dim=64, tokens=7, requests=7, num_shared=num_shared, seed=seed, num_heads=4
    )
    batch.context_len_b[[i for i in gone if i < len(before) - 1]] = 0
    check(batch, is_decode=True, chunk=32, **window(sliding_window))


@settings(max_examples=10, deadline=None)
@given(
    lengths=st.lists(
        st.tuples(st.sampled_from(EDGES[:10]), st.sampled_from([1, 1, 2, 3, 15, 16, 17, 31, 33, 50])),
        min_size=1,
        max_size=4,
    ),
    gone=st.sets(st.integers(0, 3), max_size=2),
    num_shared=st.integers(0, 2),
    sliding_window=st.sampled_from(WINDOWS),
    seed=st.integers(0, 99),
)
def test_prompt_chunks_and_decodes_together_match_the_oracle(lengths, gone, num_shared, sliding_window, seed):
    """The same."""
    lengths = [(max(before, 16 * num_shared), new) for before, new in lengths]
    batch = make_batch(lengths, block_size=16, head_dim=64, tokens=208, requests=5, num_shared=num_shared, seed=seed)
    batch.context_len_b[[i for i in gone if i < len(lengths) - 1]] = 0
    check(batch, chunk=32, tile=16, **window(sliding_window))


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        chosen = cases("pallas_tpu", "pairs" if metafunc.config.getoption("every_mode") else "once")
        metafunc.parametrize(("seed", "case"), list(enumerate(chosen)), ids=[str(list(c.values())) for c in chosen])


def test_each_kind_of_heads_block_dtype_and_mask_matches_the_oracle(case, seed):
    """Each value of each axis, or each pair of them; several tiles, of the size chosen by default."""
    _, has_races = interpreted(error_in, "pallas_tpu", case, seed)
    assert not has_races


FAULTS = {
    "the next tile's copies start before the write that they read is done": (
        ("            writes(wait_copy, w)\n            fetches(start_copy, then_w, then_c, 1 - slot)\n",
         "            fetches(start_copy, then_w, then_c, 1 - slot)\n            writes(wait_copy, w)\n"),
    ),
    "a chunk is used before its copies are done": (
        ("        fetches(wait_copy, w, c, slot)\n", ""),
        ("        return 0\n\n    num_chunks",
         "        fetches(wait_copy, w, c, slot)\n        return 0\n\n    num_chunks"),
    ),
}  # fmt: skip


def mutated(fault: str):
    """The kernel with a fault in it."""
    source = inspect.getsource(kernel)
    for old, new in FAULTS[fault]:
        assert source.count(old) == 1
        source = source.replace(old, new)
    module = types.ModuleType("mutated")
    exec(compile(source, "mutated", "exec"), module.__dict__)
    return jax.jit(module.paged_attention, static_argnames=kernel_of("pallas_tpu").static)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_race_is_found(fault):
    batch = make_batch([(0, 40), (70, 30)], block_size=16, head_dim=64, tokens=80, requests=2)
    function = functools.partial(mutated(fault), chunk=32, tile=16)
    arguments = (batch.q_tnh, batch.k_tkh, batch.v_tkh, pack(*batch.kv), *batch.arguments())
    try:
        _, has_races = interpreted(function, *arguments, scale=SCALE)
    except Exception as error:  # newer interpreters raise at a race
        has_races = "race" in str(error).lower()
    finally:
        pltpu.reset_tpu_interpret_mode_state()
    assert has_races


@pytest.mark.parametrize("block_size", [8, 48])
def test_blocks_that_the_kernel_cannot_copy_whole_are_refused(block_size):
    batch = make_batch([(3, 1)], block_size=block_size, head_dim=64)
    arguments = (batch.q_tnh, batch.k_tkh, batch.v_tkh, pack(*batch.kv), *batch.arguments())
    with pytest.raises(ValueError, match=f"block_size={block_size}: .* a power of two, 16 or more"):
        kernel.paged_attention(*arguments, scale=SCALE)


@pytest.fixture
def model_that_fills_lanes(tmp_path, monkeypatch):
    """The small model with 4 KV heads of 16."""
    monkeypatch.setattr(tiny, "CONFIG", dataclasses.replace(tiny.CONFIG, num_kv_heads=4))
    monkeypatch.setitem(tiny.HF_CONFIG, "num_key_value_heads", 4)
    monkeypatch.setattr(tiny, "tensors", tiny.tensors.__wrapped__)
    return str(tiny.write_model(tmp_path / "model"))


def test_the_engine_on_the_interpreted_kernel_yields_the_same_tokens(model_that_fills_lanes, monkeypatch):
    def without_races(run):
        result, has_races = interpreted(run)
        assert not has_races
        return result

    facts = {"platform": "tpu"}
    same_tokens.check_kernel_in_engine(model_that_fills_lanes, "pallas_tpu", facts, monkeypatch, without_races)
