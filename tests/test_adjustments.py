"""Penalties, biases and masks against the formulas, and what is drawn after them."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import SamplingParams, adjustments, sampler
from jaxpaged.step_data import MAX_BAD_WORD_TOKENS, AdjustedRow
from sampling_oracle import adjusted_logits, logprobs
from test_sampler import BATCH, LOGITS, VOCAB, assert_distributed, kept_by_the_formulas, make_rows, sample

adjust = jax.jit(adjustments.adjust)
count_tokens = jax.jit(adjustments.count_tokens)
start_row = jax.jit(adjustments.start_row, donate_argnums=0)
processed_logits = jax.jit(sampler.processed_logits)

EOS = (2, 400)


def adjusted_row(row, prompt, output, params: SamplingParams, bad_words=()) -> AdjustedRow:
    return AdjustedRow(
        row=row,
        prompt_token_ids=tuple(prompt),
        output_token_ids=tuple(output),
        stop_ids=(*(() if params.ignore_eos else EOS), *params.stop_token_ids),
        min_tokens=params.min_tokens,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=dict(params.logit_bias),
        allowed_token_ids=params.allowed_token_ids,
        bad_words=tuple(map(tuple, bad_words)),
    )


def state_of(rows: list[AdjustedRow], num_rows: int) -> adjustments.Adjustments:
    state = adjustments.make_adjustments(num_rows, VOCAB)
    for row in rows:
        state = start_row(state, row.row, adjustments.row_values(row, VOCAB))
    return state


def random_case(rng) -> tuple[list[int], list[int], SamplingParams, list[list[int]]]:
    """Prompt, output, parameters and bad words; outputs repeat tokens and end in the beginnings of bad words."""
    few = rng.integers(0, VOCAB, 12)
    prompt, output = rng.choice(few, rng.integers(1, 40)).tolist(), rng.choice(few, rng.integers(0, 40)).tolist()
    bad_words = [rng.choice(few, rng.integers(1, 4)).tolist() for _ in range(rng.integers(0, 6))]
    for length in (1, 2, MAX_BAD_WORD_TOKENS - 1):
        bad_words += [[*output[-length:], int(rng.integers(VOCAB))]] if output[-length:] else []
    allowed = rng.choice(VOCAB, 300, replace=False).tolist() if rng.random() < 0.3 else None
    params = SamplingParams(
        presence_penalty=float(rng.choice([0, 1.5, -2])),
        frequency_penalty=float(rng.choice([0, 0.3, -1, 2])),
        repetition_penalty=float(rng.choice([1, 1.3, 0.5, 10])),
        logit_bias={int(t): float(rng.normal() * 10) for t in rng.integers(0, VOCAB, rng.integers(0, 5))},
        min_tokens=int(rng.choice([0, 20])),
        max_tokens=50,
        stop_token_ids=rng.integers(0, VOCAB, rng.integers(0, 20)).tolist(),
        ignore_eos=bool(rng.random() < 0.5),
        allowed_token_ids=allowed,
    )
    return prompt, output, params, bad_words


def test_logits_become_those_of_the_formulas_and_rows_do_not_touch_each_other():
    rng = np.random.default_rng(0)
    cases = [random_case(rng) for _ in range(60)]
    row_b = rng.permutation(64)[:60].astype(np.int32)
    state = state_of([adjusted_row(int(row), *case) for row, case in zip(row_b, cases, strict=True)], 64)
    logits_bv = (rng.normal(size=(60, VOCAB)) * 4).astype(np.float32)
    output_len_b = np.array([len(output) for _, output, _, _ in cases], np.int32)
    ours_bv = np.asarray(adjust(logits_bv, state, row_b, output_len_b))
    num_forbidden = 0
    for ours_v, logits_v, (prompt, output, params, bad_words) in zip(ours_bv, logits_bv, cases, strict=True):
        theirs_v = adjusted_logits(logits_v, prompt, output, params, eos=EOS, bad_words=bad_words)
        assert np.array_equal(ours_v == -np.inf, theirs_v == -np.inf)
        np.testing.assert_allclose(ours_v, theirs_v, rtol=2e-6, atol=2e-5)
        num_forbidden += (theirs_v == -np.inf).sum()
    assert num_forbidden > 1000


def test_counts_kept_by_the_device_are_those_that_a_row_starts_with_later():
    """A row that is told its tokens one by one equals one that is started with all of them, as after a preemption."""
    rng = np.random.default_rng(1)
    prompt, output, params, bad_words = random_case(rng)
    output = (output * 3)[:40]
    state = state_of([adjusted_row(3, prompt, [], params, bad_words), adjusted_row(5, prompt, [], params)], 8)
    untouched = jax.tree.map(lambda x: np.asarray(x[5]), state)
    for token_id in output:
        state = count_tokens(state, np.array([8, 3], np.int32), np.array([7, token_id], np.int32))
    restarted = state_of([adjusted_row(6, prompt, output, params, bad_words)], 8)
    for drawn, started in zip(jax.tree.leaves(state), jax.tree.leaves(restarted), strict=True):
        assert np.array_equal(drawn[3], started[6])
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(lambda x: x[5], state), untouched)


def test_a_row_that_changes_nothing_leaves_logits_as_they_are_to_the_bit():
    state = state_of([adjusted_row(0, [1, 2], [3], SamplingParams())], 2)
    logits_bv = np.stack([LOGITS, -LOGITS])
    assert np.array_equal(adjust(logits_bv, state, np.array([0, 1]), np.array([1, 0])), logits_bv)


PROMPT, OUTPUT = [5, 6, 7, 7, 300], [10, 11, 10, 10, 6, 20, 21]


@pytest.mark.parametrize(
    ("changes", "truncation"),
    [
        ({"presence_penalty": 2.0, "frequency_penalty": -1.0}, {}),
        ({"frequency_penalty": 1.5}, {"temperature": 0.7}),
        ({"repetition_penalty": 3.0}, {"top_p": 0.9}),
        ({"repetition_penalty": 0.4, "presence_penalty": -2.0}, {"top_k": 30}),
        ({"logit_bias": {3: 6.0, 10: 5.0, 500: 5.5, 77: -100.0}}, {"min_p": 0.01}),
        ({"allowed_token_ids": [*range(0, 601, 3), 10, 20]}, {"temperature": 1.5, "top_k": 300}),
        (
            {"presence_penalty": 1.0, "repetition_penalty": 1.2, "logit_bias": {10: 4.0}, "min_tokens": 9},
            {"temperature": 0.8, "top_k": 100, "top_p": 0.95, "min_p": 0.001},
        ),
    ],
)
def test_draws_have_the_distribution_of_the_formulas(changes, truncation):
    # The tokens that are penalized are made probable.
    logits_v = LOGITS.copy()
    logits_v[[*PROMPT, *OUTPUT, 2]] += 3
    params, bad_words = SamplingParams(**changes), [[77], [20, 21, 10], [21, 20]]
    new_v = adjusted_logits(logits_v, PROMPT, OUTPUT, params, eos=EOS, bad_words=bad_words)
    is_kept_v, _ = kept_by_the_formulas(new_v.astype(np.float32), **truncation)
    p_v = np.where(is_kept_v, np.exp((new_v - new_v.max()) / truncation.get("temperature", 1.0)), 0)
    state = state_of([adjusted_row(0, PROMPT, OUTPUT, params, bad_words)], 1)
    row_b, output_len_b = np.zeros(BATCH, np.int32), np.full(BATCH, len(OUTPUT), np.int32)
    logits_bv = adjust(np.broadcast_to(logits_v, (BATCH, VOCAB)), state, row_b, output_len_b)
    rows = make_rows(seed=np.arange(BATCH) + 10_000, **truncation)
    tokens = [np.asarray(sample(logits_bv, rows, jnp.full(BATCH, position, jnp.int32))) for position in range(20)]
    assert_distributed(np.concatenate(tokens), p_v / p_v.sum())


def test_processed_logprobs_are_those_of_what_was_drawn_from():
    rng = np.random.default_rng(2)
    truncations = [
        {"temperature": 0.0, "top_k": 3},
        {"temperature": 0.7},
        {"temperature": 1.0, "top_k": 400},
        {"temperature": 1.3, "top_p": 0.7, "top_k": 50},
        {"temperature": 2.0, "min_p": 0.05, "top_p": 0.99},
    ] * 8
    settings = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    columns = {name: [case.get(name, off) for case in truncations] for name, off in settings.items()}
    rows = make_rows(40, seed=np.arange(40), **columns)
    logits_bv = (rng.normal(size=(40, VOCAB)) * 3).astype(np.float32)
    logits_bv[:, 100:130] = -np.inf
    token_b = sample(jnp.asarray(logits_bv), rows, jnp.arange(40))
    ours_bv = np.asarray(jax.nn.log_softmax(processed_logits(logits_bv, rows, token_b)))
    for ours_v, logits_v, token_id, case in zip(ours_bv, logits_bv, np.asarray(token_b), truncations, strict=True):
        is_greedy = case["temperature"] == 0
        is_kept_v, margin = (np.ones(VOCAB, bool), 1) if is_greedy else kept_by_the_formulas(logits_v, **case)
        assert np.isfinite(ours_v[token_id])
        if margin > 1e-5:
            scaled_v = logits_v if is_greedy else logits_v / np.float32(case["temperature"])
            np.testing.assert_allclose(ours_v, logprobs(np.where(is_kept_v, scaled_v, -np.inf)), atol=2e-5)


def test_the_token_that_was_drawn_has_a_probability_even_where_rounding_puts_it_beyond_the_cut():
    rows = replace(make_rows(2, top_k=2))
    logits_bv = np.tile(np.array([3.0, 2.0, 1.0, 0.0] + [-9.0] * (VOCAB - 4), np.float32), (2, 1))
    ours_bv = np.asarray(processed_logits(logits_bv, rows, np.array([1, 2], np.int32)))
    assert (ours_bv > -np.inf).sum(-1).tolist() == [2, 3]
