"""The sampler against the formulas: which tokens are kept, with which probabilities, whoever the neighbours are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxpaged import sampler
from jaxpaged.sampler import SamplingRows

BATCH, VOCAB = 512, 601
"""One shape for nearly all tests, compiled once; an odd vocabulary larger than the sampler's number of candidates."""

sample = jax.jit(sampler.sample)
cut_candidates = jax.jit(sampler._cut_candidates)
cut_vocabulary = jax.jit(sampler._cut_vocabulary)
draw_keys = jax.jit(sampler.draw_keys)
gumbel = jax.jit(sampler._gumbel, static_argnums=1)
gumbel_of = jax.jit(sampler._gumbel_of)
token_logprobs = jax.jit(sampler.token_logprobs, static_argnums=2)


def make_rows(batch=BATCH, *, seed=0, child=0, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> SamplingRows:
    """Rows from numbers or arrays [batch]; a seed is split in its two 32-bit words."""
    seed_b = np.broadcast_to(np.asarray(seed, np.uint64), batch)
    return SamplingRows(
        seed_b2=jnp.asarray(np.stack([seed_b >> 32, seed_b & 0xFFFFFFFF], axis=-1).astype(np.uint32)),
        child_b=jnp.asarray(np.broadcast_to(child, batch), jnp.int32),
        temperature_b=jnp.asarray(np.broadcast_to(temperature, batch), jnp.float32),
        top_k_b=jnp.asarray(np.broadcast_to(top_k, batch), jnp.int32),
        top_p_b=jnp.asarray(np.broadcast_to(top_p, batch), jnp.float32),
        min_p_b=jnp.asarray(np.broadcast_to(min_p, batch), jnp.float32),
    )


def draw(logits, position=0, **parameters) -> np.ndarray:
    """Tokens [batch] of logits [v] or [batch, v]."""
    logits_bv = jnp.asarray(np.broadcast_to(logits, (BATCH, VOCAB)), jnp.float32)
    position_b = jnp.asarray(np.broadcast_to(position, BATCH), jnp.int32)
    return np.asarray(sample(logits_bv, make_rows(**parameters), position_b))


def draw_many(logits, num_calls=20, **parameters) -> np.ndarray:
    """BATCH × num_calls draws of one distribution, all of different seeds and positions."""
    seeds = np.arange(BATCH) + 1000
    return np.concatenate([draw(logits, position, **{"seed": seeds, **parameters}) for position in range(num_calls)])


def kept_by_the_formulas(logits_v, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> tuple[np.ndarray, float]:
    """(is_kept [v], how close a token's fate was to a rounding error), in float64 with a sort."""
    scaled_v = (logits_v.astype(np.float64) - logits_v.max()) / np.float32(temperature)
    min_p, top_p = np.float64(np.float32(min_p)), np.float64(np.float32(top_p))
    is_kept_v, margin = np.ones(len(scaled_v), bool), np.inf
    if 0 < min_p < 1:
        is_kept_v &= scaled_v >= np.log(min_p)
        margin = min(margin, np.abs(scaled_v - np.log(min_p)).min())
    elif min_p == 1:
        is_kept_v &= scaled_v == 0
    left = np.sort(scaled_v[is_kept_v])[::-1]
    if 0 < top_k <= len(left):
        is_kept_v &= scaled_v >= left[top_k - 1]
    if top_p < 1:
        left = np.sort(scaled_v[is_kept_v])[::-1]
        reached = np.cumsum(np.exp(left)) / np.exp(left).sum()
        is_kept_v &= scaled_v >= left[np.argmax(reached >= top_p)]
        margin = min(margin, np.abs(reached - top_p).min())
    return is_kept_v, margin


def probabilities(logits_v, temperature=1.0, **truncation) -> np.ndarray:
    is_kept_v, _ = kept_by_the_formulas(logits_v, temperature, **truncation)
    p_v = np.where(is_kept_v, np.exp((logits_v.astype(np.float64) - logits_v.max()) / temperature), 0)
    return p_v / p_v.sum()


def assert_distributed(tokens, p_v):
    """Chi-square at 1e-3; tokens expected fewer than 10 times are put together."""
    count_v, expected_v = np.bincount(tokens, minlength=len(p_v)), p_v * len(tokens)
    assert count_v[p_v == 0].sum() == 0
    is_rare_v = expected_v < 10
    counts = np.append(count_v[~is_rare_v], count_v[is_rare_v].sum())
    expected = np.append(expected_v[~is_rare_v], expected_v[is_rare_v].sum())
    assert expected[expected > 1].size > 1, "nothing to test: one token has all the probability"
    used = expected > 1
    assert stats.chisquare(counts[used], expected[used] * counts[used].sum() / expected[used].sum()).pvalue > 1e-3


def random_cases(num_cases: int) -> tuple[np.ndarray, list[dict]]:
    """Logits [cases, v], peaked and flat, every third with many ties, and truncations of all kinds."""
    rng = np.random.default_rng(1)
    logits_bv = rng.normal(size=(num_cases, VOCAB)) * rng.choice([0.1, 1, 3, 8], size=(num_cases, 1))
    logits_bv[::3] = np.round(logits_bv[::3] * 2) / 2
    logits_bv[::7, 100:] = -np.inf
    cases = [
        {
            "temperature": float(rng.uniform(0.2, 2)),
            "top_k": int(rng.choice([0, 1, 2, 7, 50, 255, 256, 257, 400, VOCAB, 100_000])),
            "top_p": float(rng.choice([1, 1, 0.99, 0.95, 0.9, 0.5, 0.1, 1e-4])),
            "min_p": float(rng.choice([0, 0, 0.01, 0.1, 0.5, 1])),
        }
        for _ in range(num_cases)
    ]
    return logits_bv.astype(np.float32), cases


LOGITS = (np.random.default_rng(0).normal(size=VOCAB) * 2).astype(np.float32)
FLAT = (np.random.default_rng(2).normal(size=VOCAB) * 0.2).astype(np.float32)


# Which tokens are kept


def test_the_cut_keeps_the_tokens_of_the_formulas_whether_from_candidates_or_from_the_vocabulary():
    logits_bv, cases = random_cases(BATCH)
    rows = make_rows(**{name: [case[name] for case in cases] for name in cases[0]})
    scaled_bv = (logits_bv - logits_bv.max(-1, keepdims=True)) / np.asarray(rows.temperature_b)[:, None]
    top_bc, _ = jax.lax.top_k(jnp.asarray(scaled_bv), sampler._NUM_CANDIDATES)
    shown_cut_b, is_covered_b = map(np.asarray, cut_candidates(top_bc, scaled_bv, rows))
    all_cut_b = np.asarray(cut_vocabulary(scaled_bv, rows, jnp.ones(BATCH, bool)))
    num_close = 0
    for b, case in enumerate(cases):
        expected_v, margin = kept_by_the_formulas(logits_bv[b], **case)
        if margin < 2e-6:
            num_close += 1
            continue
        # A token of logit −inf is never drawn, kept or not.
        expected_v &= logits_bv[b] > -np.inf
        assert np.array_equal((scaled_bv[b] >= all_cut_b[b]) & (logits_bv[b] > -np.inf), expected_v), case
        if is_covered_b[b]:
            assert np.array_equal((scaled_bv[b] >= shown_cut_b[b]) & (logits_bv[b] > -np.inf), expected_v), case
        else:
            assert expected_v.sum() > 200 or case["top_k"] >= 256, f"{expected_v.sum()} kept, none found: {case}"
    assert num_close < 0.05 * BATCH
    assert 0.3 < is_covered_b.mean() < 0.95


def test_every_kept_token_is_drawn_and_no_other():
    for truncation in ({"top_k": 8}, {"top_p": 0.3}, {"min_p": 0.3}, {"top_k": 20, "top_p": 0.6, "min_p": 0.01}):
        expected_v, _ = kept_by_the_formulas(LOGITS, 1.5, **truncation)
        tokens = draw_many(LOGITS, 10, temperature=1.5, **truncation)
        assert set(tokens) == set(np.flatnonzero(expected_v)), truncation


def test_ties_with_the_last_kept_token_are_kept():
    logits = np.full(VOCAB, -5.0)
    logits[[3, 500]], logits[[10, 20, 300, 600]] = 1.0, 0.0
    kept = {3, 500, 10, 20, 300, 600}
    assert set(draw_many(logits, 4, top_k=3)) == kept
    assert set(draw_many(logits, 4, top_p=0.6)) == kept
    assert set(draw_many(logits, 4, min_p=0.3)) == kept
    assert set(draw_many(logits, 4, top_k=2)) == {3, 500}


def test_top_p_counts_only_what_top_k_and_min_p_leave():
    p = np.full(VOCAB, 1e-6)
    p[:5] = 0.3, 0.2, 0.15, 0.1, 0.05
    logits = np.log(p)
    # Of the whole, 0.55 needs three tokens; of the best three (0.46, 0.31, 0.23), two.
    assert set(draw_many(logits, 4, top_p=0.63)) == {0, 1, 2}
    assert set(draw_many(logits, 4, top_p=0.63, top_k=3)) == {0, 1}
    assert set(draw_many(logits, 4, top_p=0.63, min_p=0.45)) == {0, 1}


# With which probabilities


@pytest.mark.parametrize(
    ("logits", "parameters"),
    [
        (LOGITS, {}),
        (FLAT, {}),
        (LOGITS, {"temperature": 0.5}),
        (LOGITS, {"temperature": 2.0}),
        (LOGITS, {"top_k": 10}),
        (FLAT, {"top_k": 300}),
        (LOGITS, {"top_p": 0.8}),
        (FLAT, {"top_p": 0.9}),
        (LOGITS, {"min_p": 0.05}),
        (LOGITS, {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.02}),
        (FLAT, {"temperature": 1.3, "top_k": 500, "top_p": 0.95, "min_p": 0.1}),
    ],
)
def test_draws_have_the_distribution_of_the_formulas(logits, parameters):
    assert_distributed(draw_many(logits, **parameters), probabilities(logits, **parameters))


def test_a_greedy_row_takes_the_largest_logit_and_of_equals_the_lowest_id():
    rng = np.random.default_rng(3)
    logits_bv = np.round(rng.normal(size=(BATCH, VOCAB)) * 3).astype(np.float32)
    expected = logits_bv.argmax(-1)
    assert np.array_equal(draw(logits_bv, temperature=0.0), expected)
    assert np.array_equal(draw(logits_bv, temperature=0.0, top_k=5, top_p=0.5, min_p=0.5), expected)
    temperature = np.where(np.arange(BATCH) % 2, 1.0, 0.0)
    mixed = draw(logits_bv, temperature=temperature, top_p=0.99)
    assert np.array_equal(mixed[::2], expected[::2]) and not np.array_equal(mixed, expected)


@pytest.mark.parametrize("neighbour", [{}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.97}])
@pytest.mark.parametrize(
    "parameters",
    [
        {"temperature": 1e-6},
        {"temperature": 1e-40},
        {"temperature": 1e-6, "top_p": 0.9},
        {"top_k": 1},
        {"min_p": 1.0},
        {"top_p": 1e-4},
        {"top_p": 1e-40},
        {"top_p": 1e-60},
        {"temperature": 2.0, "top_p": 1e-4, "top_k": 100_000},
    ],
)
def test_a_truncation_to_one_token_is_greedy_whatever_the_neighbour(parameters, neighbour):
    """The neighbours make the batch take each of its paths; FLAT's best two logits are a hundredth apart."""
    settings = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    both = {
        name: np.where(np.arange(BATCH) % 2, {**settings, **neighbour}[name], {**settings, **parameters}[name])
        for name in settings
    }
    assert np.all(draw(FLAT, seed=np.arange(BATCH), **both)[::2] == FLAT.argmax())


def test_truncations_that_keep_everything_change_nothing():
    seeds = np.arange(BATCH)
    for logits in (LOGITS, FLAT):
        plain = draw(logits, seed=seeds)
        assert len(set(plain)) > 20
        for same in ({"top_k": VOCAB}, {"top_k": 2**31 - 1}, {"top_p": 1 - 1e-9}, {"min_p": 1e-30}):
            assert np.array_equal(draw(logits, seed=seeds, **same), plain), same
        # Nothing is left out but tokens whose probabilities sum to about 1e-7.
        assert np.array_equal(draw(logits, seed=seeds, top_p=1 - 1e-7), plain)


@pytest.mark.parametrize("parameters", [{}, {"top_k": 5}, {"top_k": 400}, {"top_p": 0.95}, {"min_p": 0.1}])
def test_extreme_logits_yield_tokens_that_may_be_drawn(parameters):
    masked = np.full(VOCAB, -np.inf)
    masked[[7, 300, 599]] = 0.0, 1.0, 2.0
    assert set(draw_many(masked, 4, temperature=2.0, **parameters)) <= {7, 300, 599}
    one = np.full(VOCAB, -np.inf)
    one[600] = -3.0
    assert set(draw(one, seed=np.arange(BATCH), **parameters)) == {600}
    huge = np.where(np.arange(VOCAB) == 44, 3e38, -3e38)
    assert set(draw(huge, seed=np.arange(BATCH), **parameters)) == {44}
    equal = draw_many(np.full(VOCAB, -1e30), 20, **parameters)
    assert_distributed(equal, np.full(VOCAB, 1 / VOCAB))


# Whoever the neighbours are


def test_a_rows_token_depends_on_its_own_parameters_alone():
    logits_bv, cases = random_cases(BATCH)
    columns = {name: np.array([case[name] for case in cases]) for name in cases[0]}
    columns["temperature"][::5] = 0
    columns |= {"seed": np.arange(BATCH) * 2**30, "child": np.arange(BATCH) % 3}
    position = np.arange(BATCH) + 5
    together = draw(logits_bv, position, **columns)
    order = np.random.default_rng(4).permutation(BATCH)
    shuffled = draw(logits_bv[order], position[order], **{name: value[order] for name, value in columns.items()})
    assert np.array_equal(shuffled, together[order])
    for b in range(40):
        alone = draw(logits_bv[b], position[b], **{name: value[b] for name, value in columns.items()})
        assert np.all(alone == together[b]), cases[b]


def test_a_row_alone_draws_the_token_that_it_draws_in_a_large_batch():
    seeds = np.arange(BATCH)
    for parameters in ({}, {"top_k": 5}, {"top_p": 0.9}):
        together = draw(LOGITS, 9, seed=seeds, **parameters)
        for b in range(20):
            row = make_rows(1, seed=b, **parameters)
            assert sample(jnp.asarray(LOGITS)[None], row, jnp.array([9]))[0] == together[b]


def test_all_paths_draw_the_same_token():
    """Half of the rows are watched; the others make the batch use candidates, the vocabulary, or the bisection."""
    is_watched = np.arange(BATCH) < BATCH // 2
    logits_bv = np.where(is_watched[:, None], LOGITS, FLAT)
    seeds = np.arange(BATCH)

    def watched(truncation, **neighbour):
        columns = {
            name: np.where(is_watched, truncation.get(name, off), neighbour.get(name, off))
            for name, off in {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}.items()
        }
        return draw(logits_bv, seed=seeds, **columns)[is_watched]

    for truncation in ({"top_k": 50}, {"top_p": 0.7}, {"min_p": 0.02}, {"top_k": 90, "top_p": 0.8, "temperature": 1.2}):
        candidates = watched(truncation, temperature=0.0)
        assert np.array_equal(candidates, watched(truncation, top_k=2))
        assert np.array_equal(candidates, watched(truncation))
        assert np.array_equal(candidates, watched(truncation, top_p=0.95))
        assert np.array_equal(candidates, watched(truncation, top_k=400))
        assert len(set(candidates)) > 10


def test_of_equal_sums_of_logit_and_noise_the_lowest_id_is_drawn_on_all_paths(monkeypatch):
    """Whole numbers for noise and logits make best tokens of different logits. (A shape of its own: JAX remembers
    what it traced.)"""
    monkeypatch.setattr(sampler, "_to_gumbel", lambda bits: (bits % 8).astype(jnp.float32))
    batch, num_tokens = 64, 2 * sampler._NUM_CANDIDATES
    logits_bv = -(np.arange(batch * num_tokens).reshape(batch, num_tokens) * 7919 % 101).astype(np.float32)
    position_b = jnp.zeros(batch, jnp.int32)
    for parameters in ({"top_k": 100}, {}):
        rows = make_rows(batch, seed=np.arange(batch), **parameters)
        sums_bv = logits_bv + np.asarray(gumbel(draw_keys(rows, position_b, sampler.PURPOSE_SAMPLE), num_tokens))
        assert ((sums_bv == sums_bv.max(-1, keepdims=True)).sum(-1) > 1).mean() > 0.3
        assert np.array_equal(sample(jnp.asarray(logits_bv), rows, position_b), sums_bv.argmax(-1))


# Streams


def test_the_key_of_a_draw_folds_child_position_and_purpose_into_the_seeds_two_words():
    seed = np.array([0, 2**64 - 1, 12345678901234, 2**32], np.uint64)
    child, position = np.array([0, 3, 1, 0]), np.array([0, 2047, 17, 1])
    rows, fold_in = make_rows(4, seed=seed, child=child), jax.jit(jax.random.fold_in)
    for purpose in range(3):
        key_b = draw_keys(rows, jnp.asarray(position, jnp.int32), purpose)
        for b in range(4):
            key = jax.random.wrap_key_data(rows.seed_b2[b], impl="threefry2x32")
            for number in (child[b], position[b], purpose):
                key = fold_in(key, int(number))
            assert np.array_equal(jax.random.key_data(key_b[b]), jax.random.key_data(key))


def test_a_sample_is_the_largest_of_scaled_logit_and_noise_of_the_key_of_purpose_sample():
    rows = make_rows(seed=np.arange(BATCH))
    position_b = jnp.full(BATCH, 6, jnp.int32)
    noise_bv = np.asarray(gumbel(draw_keys(rows, position_b, 0), VOCAB))
    expected = ((LOGITS - LOGITS.max()) / np.float32(0.5) + noise_bv).argmax(-1)
    assert np.array_equal(draw(LOGITS, 6, seed=np.arange(BATCH), temperature=0.5), expected)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({}, {"position": 1}),
        ({}, {"seed": 1}),
        ({}, {"seed": 2**32}),
        ({}, {"child": 1}),
        ({"child": 1}, {"seed": 1}),
        ({"child": 1}, {"position": 1}),
    ],
)
@pytest.mark.parametrize("truncation", [{}, {"top_k": 8}])
def test_draws_of_neighbouring_positions_seeds_and_children_are_independent(one, other, truncation):
    """Chi-square of independence over 8 × 8 tokens; the two streams differ by what `one` and `other` add."""
    logits = np.where(np.arange(VOCAB) % 80 == 0, 0.0, -100.0)

    def stream(position=0, seed=0, child=0):
        seeds = np.arange(BATCH, dtype=np.uint64) * 1000 + seed
        tokens = [draw(logits, 10 * call + position, seed=seeds, child=child, **truncation) for call in range(10)]
        return np.concatenate(tokens) // 80

    table = np.zeros((8, 8))
    np.add.at(table, (stream(**one), stream(**other)), 1)
    assert stats.chi2_contingency(table).pvalue > 1e-3
    assert 0.05 < np.trace(table) / table.sum() < 0.2


def test_the_same_seed_child_and_position_yield_the_same_token_again():
    assert np.array_equal(draw(LOGITS, 3, seed=7, child=2), np.full(BATCH, draw(LOGITS, 3, seed=7, child=2)[0]))


# Noise


@pytest.mark.parametrize("num_tokens", [VOCAB, 49152])
def test_the_noise_of_some_tokens_is_the_noise_of_all_to_the_bit(num_tokens):
    key_b = draw_keys(make_rows(4, seed=np.arange(4)), jnp.arange(4), 0)
    all_bv = np.asarray(gumbel(key_b, num_tokens))
    id_bc = np.random.default_rng(5).integers(0, num_tokens, (4, 256))
    id_bc[:, 0], id_bc[:, 1] = 0, num_tokens - 1
    some_bc = np.asarray(gumbel_of(key_b, jnp.asarray(id_bc, jnp.int32)))
    assert np.array_equal(some_bc.view(np.int32), np.take_along_axis(all_bv, id_bc, -1).view(np.int32))
    words = jax.random.key_data(jax.random.fold_in(key_b[2], 150))
    assert np.array_equal(np.asarray(sampler._to_gumbel(words)), all_bv[2, 300:302])


def test_the_noise_has_the_gumbel_distribution_within_rows_and_across_them():
    key_b = draw_keys(make_rows(4, seed=np.arange(4)), jnp.arange(4), 0)
    noise_bv = np.asarray(gumbel(key_b, 49152))
    assert np.isfinite(noise_bv).all()
    for noise_v in noise_bv:
        assert stats.kstest(noise_v, stats.gumbel_r.cdf).pvalue > 1e-3
    assert np.abs(np.corrcoef(noise_bv) - np.eye(4)).max() < 0.02
    assert abs(np.corrcoef(noise_bv[:, ::2].ravel(), noise_bv[:, 1::2].ravel())[0, 1]) < 0.01


def test_the_noise_is_finite_and_its_upper_tail_exact_to_32_bits():
    bits = np.concatenate([np.arange(100), 2 ** np.arange(7, 32), 2**32 - 2 ** np.arange(31, -1, -1)]).astype(np.uint32)
    noise = np.asarray(sampler._to_gumbel(jnp.asarray(bits)))
    assert np.isfinite(noise).all() and np.all(np.diff(noise) <= 0)
    w = (bits.astype(np.float64) + 0.5) / 2**32
    is_upper = w < 0.9
    np.testing.assert_allclose(noise[is_upper], -np.log(-np.log1p(-w[is_upper])), rtol=1e-6, atol=1e-6)
    assert noise[0] > 22 and np.all(np.diff(noise[:100]) < 0)


# Log-probabilities


def test_token_logprobs_are_those_of_the_raw_logits_with_ranks_that_count_ties():
    rng = np.random.default_rng(6)
    logits_bv = (np.round(rng.normal(size=(16, VOCAB)) * 8) / 4).astype(np.float32)
    logits_bv[::2, ::3] = -np.inf
    token_b = rng.integers(0, VOCAB, 16)
    token_b[0], token_b[1] = 0, logits_bv[1].argmax()
    exact_bv = logits_bv - np.log(np.exp(logits_bv.astype(np.float64)).sum(-1, keepdims=True))
    logprob_b, rank_b, id_bk, top_bk = token_logprobs(jnp.asarray(logits_bv), jnp.asarray(token_b, jnp.int32), 20)
    np.testing.assert_allclose(logprob_b, exact_bv[np.arange(16), token_b], rtol=0, atol=2e-6)
    assert logprob_b[0] == -np.inf and rank_b[0] == VOCAB
    assert np.array_equal(rank_b, (logits_bv >= logits_bv[np.arange(16), token_b][:, None]).sum(-1))
    assert np.array_equal(id_bk, np.argsort(-logits_bv, axis=-1, kind="stable")[:, :20])
    np.testing.assert_allclose(top_bk, np.take_along_axis(exact_bv, np.asarray(id_bk), -1), rtol=0, atol=2e-6)
    assert rank_b.dtype == id_bk.dtype == jnp.int32


def test_no_top_logprobs_are_no_top_logprobs():
    logprob_b, rank_b, id_bk, top_bk = token_logprobs(jnp.zeros((2, 4)), jnp.array([0, 3]), 0)
    np.testing.assert_allclose(logprob_b, -np.log(4), rtol=1e-6)
    assert np.array_equal(rank_b, [4, 4]) and id_bk.shape == top_bk.shape == (2, 0)
