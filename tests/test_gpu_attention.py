"""The GPU kernel, interpreted, against the oracle.

The interpreter of the Triton lowering runs programs one after another as XLA for the CPU would: it shows numbers, not
races (no two programs write the same place) nor what a GPU reads out of bounds (indices are masked, and NaN stands in
all slots that no token has reached).
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import same_tokens
import tiny
from pallas_kernels.gpu import paged_attention as kernel
from pallas_kernels.gpu import triton
from pallas_kernels.gpu.layout import pack, unpack
from ragged import SCALE, compare, make_batch, scales_of

pytestmark = pytest.mark.interpret

STATIC = ("scale", "sliding_window", "soft_cap", "is_decode", "num_rows", "chunk", "num_splits")
attend = jax.jit(kernel.paged_attention, static_argnames=STATIC)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setattr(triton.pl, "pallas_call", functools.partial(triton.pl.pallas_call, interpret=True))


def check(batch, **options):
    compare(batch, attend, pack, unpack, **options)


EDGES = [0, 1, 14, 15, 16, 17, 30, 31, 32, 33, 47, 63, 64, 65, 95, 96, 128]
"""Lengths around the edges of blocks and chunks of 16 and 32 tokens."""


@settings(max_examples=25, deadline=None)
@given(
    before=st.lists(st.sampled_from(EDGES), min_size=1, max_size=6),
    gone=st.sets(st.integers(0, 5), max_size=3),
    num_shared=st.integers(0, 2),
    num_splits=st.sampled_from([1, 4]),
    seed=st.integers(0, 99),
)
def test_decodes_match_the_oracle(before, gone, num_shared, num_splits, seed):
    """With rows between them that are not there, and prefixes of shared blocks; more splits than chunks, and fewer."""
    lengths = [(max(n, 16 * num_shared), 1) for n in before]
    batch = make_batch(
        lengths, block_size=16, head_dim=64, tokens=7, requests=7, num_shared=num_shared, seed=seed, num_heads=4
    )
    batch.context_len_b[[i for i in gone if i < len(before) - 1]] = 0
    check(batch, is_decode=True, chunk=32, num_splits=num_splits)


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(
        st.tuples(st.sampled_from(EDGES[:10]), st.sampled_from([1, 1, 2, 3, 4, 5, 6, 15, 16, 17, 31, 33, 50])),
        min_size=1,
        max_size=4,
    ),
    seed=st.integers(0, 99),
)
def test_prompt_chunks_and_decodes_together_match_the_oracle(lengths, seed):
    """Tiles of five tokens: 16 rows of three query heads each."""
    check(make_batch(lengths, block_size=16, head_dim=64, tokens=208, requests=5, seed=seed), chunk=32, num_rows=16)


@settings(max_examples=10, deadline=None)
@given(
    context=st.sampled_from([n for n in EDGES if n > 0]),
    window=st.sampled_from([1, 15, 33]),
    seed=st.integers(0, 9),
)
def test_a_window_is_split_like_all_keys(context, window, seed):
    batch = make_batch([(context, 1), (5, 1)], block_size=16, head_dim=64, tokens=3, requests=3, seed=seed)
    check(batch, is_decode=True, chunk=16, num_splits=4, sliding_window=window)


AXES = {
    "heads": [(8, 4), (4, 1), (3, 3), (9, 3)],
    "head_dim": [128, 64, 80, 256, 96],
    "block_size": [64, 16, 32, 48],
    "dtype": ["float32", "bfloat16", "float16"],
    "kv_dtype": ["int8", None, "float8_e4m3fn"],
    "mask": [{"sliding_window": 40}, {}, {"soft_cap": 1.5}, {"sliding_window": 21, "soft_cap": 3.0}],
}
NUM_CASES = max(map(len, AXES.values()))


@pytest.mark.parametrize("number", range(NUM_CASES))
def test_each_kind_of_heads_block_dtype_and_mask_matches_the_oracle(number):
    """Each value of each axis at least once; several tiles and chunks, with the sizes that are chosen by default."""
    case = {name: values[number % len(values)] for name, values in AXES.items()}
    (n, k), kv_dtype = case["heads"], case["kv_dtype"]
    options = {"dtype": case["dtype"], "kv_dtype": kv_dtype, **scales_of(kv_dtype, k), **case["mask"]}
    sizes = {"block_size": case["block_size"], "num_heads": n, "num_kv_heads": k, "head_dim": case["head_dim"]}
    check(make_batch([(100, 1), (0, 70), (37, 5), (140, 18)], tokens=100, requests=5, seed=number, **sizes), **options)
    check(make_batch([(100, 1), (0, 1), (150, 1)], tokens=4, requests=4, **sizes), is_decode=True, **options)


def test_what_is_padding_or_not_there_yields_zero_and_writes_nothing():
    """Also where starts beyond the last request mean nothing."""
    batch = make_batch([(20, 3), (0, 40), (33, 5)], block_size=16, head_dim=64, tokens=64, requests=6)
    batch.context_len_b[1] = 0
    batch.context_len_b[4] = 9
    check(batch, num_rows=16)
    out_tnh, _ = attend(
        batch.q_tnh, batch.k_tkh, batch.v_tkh, pack(*batch.kv), *batch.arguments(), scale=SCALE, num_rows=16
    )
    assert not np.asarray(out_tnh)[3:43].any() and not np.asarray(out_tnh)[48:].any()


def test_a_request_yields_the_same_output_beside_any_neighbours():
    """Bit for bit, in a launch of given sizes."""
    lengths = [(100, 1), (0, 30), (37, 5), (140, 1)]
    together = make_batch(lengths, block_size=16, head_dim=64, tokens=64, requests=4)
    arguments = (together.q_tnh, together.k_tkh, together.v_tkh, pack(*together.kv))
    out_tnh, _ = attend(*arguments, *together.arguments(), scale=SCALE)
    for i in range(4):
        alone = dataclasses.replace(together, context_len_b=np.where(np.arange(4) == i, together.context_len_b, 0))
        part = slice(*together.query_start_b1[i : i + 2])
        alone_tnh, _ = attend(*arguments, *alone.arguments(), scale=SCALE)
        np.testing.assert_array_equal(alone_tnh[part], out_tnh[part])


def test_splits_fill_a_gpu_and_are_no_more_than_there_is_to_split():
    choose = functools.partial(kernel.choose_splits, num_to_fill=512)
    assert [choose(b * 8, 128) for b in (1, 2, 8, 16, 32, 64, 256)] == [32, 32, 8, 4, 2, 1, 1]
    assert [choose(8, most) for most in (0, 1, 5, 31)] == [1, 1, 4, 16]
    assert [kernel.choose_splits(b * 4, 128, num_to_fill=132) for b in (1, 2, 8, 16, 24, 32, 64)] == [
        32,
        16,
        4,
        2,
        1,
        1,
        1,
    ]


def test_tiles_cover_all_tokens_once_and_none_of_two_requests():
    """As many tiles as there can be at most are there, whatever the lengths."""
    for lengths in ([1] * 7, [64], [20, 1, 1, 20], [5, 0, 6, 4]):
        t, b = 64, 8
        starts = np.cumsum([0, *lengths, *[0] * (b - len(lengths))]).astype(np.int32)
        contexts = np.array([*(n + 10 for n in lengths), *[0] * (b - len(lengths))], np.int32)
        _, start_i, stop_i, num_keys_i = np.asarray(kernel._plan_tiles(starts, contexts, np.int32(len(lengths)), t, 5))
        covered = [range(*pair) for pair in zip(start_i, stop_i, strict=True) if pair[0] < pair[1]]
        assert sorted(token for tokens in covered for token in tokens) == list(range(t))
        for start, stop, num_keys in zip(start_i, stop_i, num_keys_i, strict=True):
            if start < stop:
                request = np.searchsorted(starts, start, side="right") - 1
                is_token = start < sum(lengths)
                assert not is_token or stop <= starts[request + 1]
                assert num_keys == (contexts[request] - (starts[request + 1] - stop) if is_token else 0)


def test_a_pool_whose_offsets_would_overflow_is_refused():
    def shapes(num_blocks, dtype):
        pool = jax.ShapeDtypeStruct((num_blocks, 8, 16, 128), dtype)
        return kernel.HeadMajorKV(pool, pool)

    kernel._check_offsets(shapes(2**17, np.int8))
    kernel._check_offsets(shapes(2**18 + 1, np.int8))
    kernel._check_offsets(shapes(2**18, np.float16))
    with pytest.raises(ValueError, match=r"2,147,500,032 elements in 8 bits.*change num_device_blocks"):
        kernel._check_offsets(shapes(2**17 + 1, np.int8))


@pytest.fixture
def model_of_one_layer(tmp_path, monkeypatch):
    """The small model with a layer less: interpreted kernels take XLA long to compile."""
    monkeypatch.setattr(tiny, "CONFIG", dataclasses.replace(tiny.CONFIG, num_layers=1))
    monkeypatch.setitem(tiny.HF_CONFIG, "num_hidden_layers", 1)
    monkeypatch.setattr(tiny, "tensors", tiny.tensors.__wrapped__)
    return str(tiny.write_model(tmp_path / "model"))


def test_the_engine_on_the_interpreted_kernel_yields_the_same_tokens(model_of_one_layer, monkeypatch):
    facts = {"platform": "gpu", "has_native_bf16": True}
    same_tokens.check_kernel_in_engine(model_of_one_layer, "pallas_gpu", facts, monkeypatch)
