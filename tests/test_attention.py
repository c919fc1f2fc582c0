"""Paged attention for XLA against the oracle, on ragged batches."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import reference, xla
from pallas_kernels.gpu.layout import pack, unpack
from ragged import make_batch

attend = jax.jit(xla.paged_attention, static_argnames=("scale", "sliding_window", "soft_cap", "is_decode"))


def check(batch, *, tolerance=2e-5, dtype=jnp.float32, is_decode=False, **options):
    kv = jax.tree.map(lambda x: x.astype(dtype), pack(*batch.kv))
    new = [jnp.asarray(x, dtype) for x in (batch.q_tnh, batch.k_tkh, batch.v_tkh)]
    out_tnh, kv = attend(*new, kv, *batch.arguments(), scale=0.3, is_decode=is_decode, **options)
    stored = [x.astype(np.float32) for x in unpack(kv)]
    rounded = [np.asarray(x.astype(jnp.float32)) for x in new]
    old = [np.asarray(jnp.asarray(x, dtype).astype(jnp.float32)) for x in batch.kv]
    expected_tnh, (k_pool, v_pool) = reference.paged_attention(*rounded, old, *batch.arguments(), scale=0.3, **options)
    live = slice(0, batch.query_start_b1[batch.num_requests])
    error = np.abs(np.asarray(out_tnh, np.float32)[live] - expected_tnh[live]).max()
    assert error <= tolerance * np.abs(expected_tnh[live]).max()
    np.testing.assert_array_equal(stored[0], k_pool)
    np.testing.assert_array_equal(stored[1], v_pool)


requests = st.lists(st.tuples(st.integers(0, 70), st.one_of(st.just(1), st.integers(1, 90))), min_size=1, max_size=5)


@settings(max_examples=25, deadline=None)
@given(lengths=requests, block_size=st.sampled_from([1, 3, 8, 16, 32]), seed=st.integers(0, 99))
def test_ragged_batches_match_the_oracle(lengths, block_size, seed):
    check(make_batch(lengths, block_size=block_size, tokens=450, requests=5, seed=seed))


@settings(max_examples=15, deadline=None)
@given(
    before=st.lists(st.integers(0, 150), min_size=1, max_size=6),
    block_size=st.sampled_from([1, 8, 16, 32]),
    seed=st.integers(0, 99),
)
def test_decode_batches_match_the_oracle(before, block_size, seed):
    check(make_batch([(n, 1) for n in before], block_size=block_size, tokens=6, requests=6, seed=seed), is_decode=True)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (4, 1), (9, 3)])
def test_multi_head_multi_query_and_grouped_query_match_the_oracle(num_heads, num_kv_heads):
    check(make_batch([(20, 1), (0, 70), (33, 5)], block_size=16, num_heads=num_heads, num_kv_heads=num_kv_heads))


@pytest.mark.parametrize("options", [{"sliding_window": 7}, {"soft_cap": 1.5}, {"sliding_window": 40, "soft_cap": 3.0}])
def test_a_window_and_a_soft_cap_match_the_oracle(options):
    check(make_batch([(60, 1), (0, 90), (50, 30)], block_size=16), **options)
    check(make_batch([(60, 1), (130, 1)], block_size=16), is_decode=True, **options)


def test_bfloat16_matches_the_oracle_on_the_same_values():
    check(make_batch([(60, 1), (0, 90), (50, 30)], block_size=16), dtype=jnp.bfloat16, tolerance=2e-2)


def decoded(batch, **options):
    out_tnh, _ = attend(
        batch.q_tnh, batch.k_tkh, batch.v_tkh, pack(*batch.kv), *batch.arguments(), scale=0.3, is_decode=True, **options
    )
    return np.asarray(out_tnh)


def test_a_decode_beside_any_neighbours_yields_the_same_output():
    """Bit for bit: its chunks are merged in order, however the neighbours' lengths fill the rounds."""
    batch = make_batch([(150, 1), (9, 1), (120, 1), (70, 1), (0, 1), (159, 1), (64, 1), (33, 1)], block_size=16)
    together = decoded(batch)
    for i in range(8):
        alone = dataclasses.replace(batch, context_len_b=np.where(np.arange(8) == i, batch.context_len_b, 0))
        np.testing.assert_array_equal(decoded(alone)[i], together[i])


@settings(max_examples=25, deadline=None)
@given(
    num_shared=st.integers(0, 9),
    beyond=st.lists(st.integers(0, 60), min_size=1, max_size=10),
    gaps=st.sets(st.integers(0, 9), max_size=8),
    options=st.sampled_from([{}, {"sliding_window": 40}, {"soft_cap": 2.0}]),
    seed=st.integers(0, 99),
)
def test_decodes_that_share_their_first_blocks_match_the_oracle(num_shared, beyond, gaps, options, seed):
    """Whatever they have beyond, and with rows between them that are not there."""
    lengths = [(16 * num_shared + n, 1) for n in beyond if 16 * num_shared + n < 160]
    lengths = lengths or [(16 * num_shared, 1)]
    batch = make_batch(lengths, block_size=16, num_shared=num_shared, tokens=12, requests=12, seed=seed)
    gone = [i for i in gaps if i < len(lengths) - 1]
    batch.context_len_b[gone] = 0
    check(batch, is_decode=True, **options)


def test_a_block_that_only_some_begin_with_is_not_taken_for_all():
    batch = make_batch([(100, 1)] * 9, block_size=16, num_shared=5)
    other = make_batch([(100, 1)] * 9, block_size=16, num_shared=2)
    for i, part in enumerate((batch, other)):
        counted = xla._num_shared_blocks(jnp.asarray(part.page_table_bp), jnp.asarray(part.context_len_b), 16)
        assert counted == (5, 2)[i]
        check(part, is_decode=True)
    batch.page_table_bp[8, 1] = 0 if batch.page_table_bp[8, 1] else 1
    counted = xla._num_shared_blocks(jnp.asarray(batch.page_table_bp), jnp.asarray(batch.context_len_b), 16)
    assert counted == 1
    alone = jnp.where(jnp.arange(9) == 3, 101, 0)
    assert xla._num_shared_blocks(jnp.asarray(batch.page_table_bp), alone, 16) == 0


@settings(max_examples=15, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 70), st.integers(1, 24)), min_size=1, max_size=12), seed=st.integers(0, 9)
)
def test_many_short_requests_match_the_oracle(lengths, seed):
    check(make_batch(lengths, block_size=16, tokens=12 * 24, requests=20, seed=seed))


@settings(max_examples=15, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 138)), min_size=1, max_size=2), seed=st.integers(0, 9)
)
def test_few_long_requests_match_the_oracle(lengths, seed):
    check(make_batch(lengths, block_size=16, tokens=4 * xla._LONG_TILE, requests=2, seed=seed))


def test_a_row_of_context_length_zero_yields_zero_and_writes_nothing():
    batch = make_batch([(150, 1), (40, 1), (70, 1)], block_size=16, tokens=4, requests=4)
    batch.context_len_b[1] = 0
    out_tnh = decoded(batch)
    assert not out_tnh[[1, 3]].any()
    check(batch, is_decode=True)


def test_a_wrong_block_is_noticed():
    batch = make_batch([(40, 2)], block_size=16)
    batch.page_table_bp[0, [0, 1]] = batch.page_table_bp[0, [1, 0]]
    attended, _ = reference.paged_attention(
        batch.q_tnh, batch.k_tkh, batch.v_tkh, batch.kv, *batch.arguments(), scale=0.3
    )
    batch.page_table_bp[0, [0, 1]] = batch.page_table_bp[0, [1, 0]]
    expected, _ = reference.paged_attention(
        batch.q_tnh, batch.k_tkh, batch.v_tkh, batch.kv, *batch.arguments(), scale=0.3
    )
    assert np.allclose(attended, expected), "attention without positions does not see the order of whole blocks"
    batch.page_table_bp[0, 0] = batch.page_table_bp[0, 2]
    wrong, _ = reference.paged_attention(batch.q_tnh, batch.k_tkh, batch.v_tkh, batch.kv, *batch.arguments(), scale=0.3)
    assert not np.allclose(wrong, expected)
