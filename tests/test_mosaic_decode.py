"""The kernel for decodes on Hopper GPUs, interpreted, against the oracle.

Mosaic's interpreter runs warpgroups in threads, looks for races between what they read and write, counts the phases of
barriers, and fills memory with NaN. It multiplies at once: that a product has not ended, and what it reads, it does not
see, nor that writes must be committed for it. The merge of the splits is interpreted as in `test_gpu_attention.py`.
"""

import dataclasses
import functools
from unittest import mock

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu import mosaic_decode as kernel
from pallas_kernels.gpu import triton
from pallas_kernels.gpu.layout import pack, unpack
from ragged import SCALE, compare, make_batch

pytestmark = pytest.mark.interpret

STATIC = ("scale", "sliding_window", "soft_cap", "num_splits", "num_stages")
attend = jax.jit(kernel.paged_attention, static_argnames=STATIC)


@pytest.fixture(autouse=True)
def interpreted(request, monkeypatch):
    """Both lowerings are interpreted."""
    if not hasattr(plgpu, "InterpretGPUParams"):
        is_chosen = "interpret" in request.config.option.markexpr
        (pytest.fail if is_chosen else pytest.skip)(f"needs jax 0.11 or newer, this is {jax.__version__}")
    interpreter = plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan")
    monkeypatch.setattr(plgpu, "kernel", functools.partial(plgpu.kernel, interpret=interpreter))
    monkeypatch.setattr(triton.pl, "pallas_call", functools.partial(triton.pl.pallas_call, interpret=True))


def check(batch, dtype="bfloat16", **options):
    compare(batch, attend, pack, unpack, dtype=dtype, **options)
    assert not interpret_pallas_call.get_races().races_found


EDGES = [0, 1, 15, 16, 17, 62, 63, 64, 65, 126, 127, 128]
"""Lengths around the edges of blocks of 16 and chunks of 64 tokens."""


@settings(max_examples=4, deadline=None)
@given(
    before=st.lists(st.sampled_from(EDGES), min_size=1, max_size=3),
    gone=st.sets(st.integers(0, 2), max_size=1),
    num_shared=st.integers(0, 2),
    num_splits=st.sampled_from([1, 2]),
    seed=st.integers(0, 99),
)
def test_decodes_match_the_oracle_without_a_race(before, gone, num_shared, num_splits, seed):
    """With rows between them that are not there, prefixes of shared blocks, fewer chunks than splits, and a ring that
    holds a chunk and a half."""
    lengths = [(max(n, 16 * num_shared), 1) for n in before]
    batch = make_batch(
        lengths, block_size=16, head_dim=64, tokens=4, requests=4, num_shared=num_shared, seed=seed, num_heads=4
    )
    batch.context_len_b[[i for i in gone if i < len(before) - 1]] = 0
    check(batch, num_splits=num_splits, num_stages=3)


CASES = [
    {"heads": (4, 2), "head_dim": 128, "block_size": 16, "dtype": "bfloat16", "sliding_window": 40},
    {"heads": (3, 3), "head_dim": 64, "block_size": 64, "dtype": "float16", "soft_cap": 1.5},
    {"heads": (9, 1), "head_dim": 256, "block_size": 32, "dtype": "bfloat16", "sliding_window": 70, "soft_cap": 3.0},
    {"heads": (64, 1), "head_dim": 128, "block_size": 32, "dtype": "float16"},
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_kind_of_heads_block_dtype_and_mask_matches_the_oracle(case):
    """Each value of each axis at least once, with the sizes that are chosen by default."""
    (n, k), options = case["heads"], {name: case[name] for name in ("sliding_window", "soft_cap") if name in case}
    batch = make_batch(
        [(100, 1), (0, 1), (158, 1)], tokens=3, block_size=case["block_size"], num_heads=n, num_kv_heads=k,
        head_dim=case["head_dim"],
    )  # fmt: skip
    check(batch, case["dtype"], **options)


def test_a_request_yields_the_same_output_beside_any_neighbours():
    """Bit for bit."""
    together = make_batch([(100, 1), (63, 1), (140, 1)], block_size=16, head_dim=64)
    arguments = [jax.numpy.asarray(x, "bfloat16") for x in (together.q_tnh, together.k_tkh, together.v_tkh)]
    kv = pack(*(x.astype("bfloat16") for x in together.kv))
    out_tnh, _ = attend(*arguments, kv, *together.arguments(), scale=SCALE)
    alone = dataclasses.replace(together, context_len_b=np.where(np.arange(3) == 2, together.context_len_b, 0))
    alone_tnh, _ = attend(*arguments, kv, *alone.arguments(), scale=SCALE)
    np.testing.assert_array_equal(alone_tnh[2], out_tnh[2])
    assert not np.asarray(alone_tnh[:2], np.float32).any()


def careless(function, **left_out):
    """The function, traced with some calls of `plgpu` left out."""

    def call(*arguments):
        with mock.patch.multiple(plgpu, **left_out):
            return function(*arguments)

    return call


@pytest.mark.parametrize("who", ["_produce", "_consume"])
def test_who_does_not_wait_is_found_out(who, monkeypatch):
    """One that overwrites what is still read, or reads what has not come."""
    monkeypatch.setattr(kernel, who, careless(getattr(kernel, who), barrier_wait=lambda barrier: None))
    batch = make_batch([(140, 1)], block_size=64, head_dim=64, num_kv_heads=1, num_heads=1)
    fresh = jax.jit(functools.partial(kernel.paged_attention), static_argnames=STATIC)
    with pytest.raises(Exception, match=r"RACE DETECTED|phase"):
        compare(batch, fresh, pack, unpack, dtype="bfloat16", num_stages=2)
    interpret_pallas_call.reset_gpu_interpret_mode_state()
