"""Penalties, masks, biases, log-probabilities and processors through the engine, in batches of all kinds."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import tiny
from jaxpaged import Engine, RequestOutputKind, SamplingParams
from same_tokens import assert_same, run
from sampling_oracle import adjusted_logits, greedy_tokens, logprobs
from test_engine import BytesTokenizer, generate, greedy, prompt_of

SETTINGS = {"max_num_seqs": 4, "num_device_blocks": 64, "max_model_len": 256}
EOS = tiny.CONFIG.eos_token_ids[0]


@pytest.fixture(scope="module")
def engine():
    """All log-probabilities may be asked for; tokens are bytes."""
    settings = SETTINGS | {"num_decode_steps": 8, "max_logprobs": -1}
    with Engine(tiny.model_directory(), tokenizer=BytesTokenizer(), **settings) as engine:
        yield engine
        engine.check()
        assert engine.stats()["blocks_used"] == 0


def completion(engine, params, prompt=None):
    [output] = generate(engine, [prompt_of(21, seed=77) if prompt is None else prompt], params)
    assert output.error is None
    return output.outputs[0]


# ---- which tokens


KINDS = [
    {},
    {"presence_penalty": 2.0},
    {"frequency_penalty": 2.0, "repetition_penalty": 0.8},
    {"repetition_penalty": 1.8},
    {"frequency_penalty": -2.0},
    {"logit_bias": {65: 4.0, 66: 3.5, 67: -50.0}, "presence_penalty": 1.0},
    {"allowed_token_ids": list(range(100, 160)), "repetition_penalty": 1.3},
    {"min_tokens": 9, "ignore_eos": False, "logit_bias": {EOS: 60.0}, "presence_penalty": 0.5},
    {"stop_token_ids": list(range(3, 130)), "min_tokens": 5},
]


def mixed_params(**rest) -> list[SamplingParams]:
    return [greedy(24, **rest, **kind) if "ignore_eos" not in kind else
            SamplingParams(temperature=0, max_tokens=24, **rest, **kind) for kind in KINDS]  # fmt: skip


def test_greedy_tokens_of_a_mixed_batch_are_those_of_the_formulas(engine):
    prompts = [prompt_of(n, seed=n) for n in (5, 40, 17, 1, 33, 16, 8, 25, 12)]
    outputs = generate(engine, prompts, mixed_params())
    for prompt, params, output in zip(prompts, mixed_params(), outputs, strict=True):
        assert output.outputs[0].token_ids == greedy_tokens(prompt, params), params
    assert len(outputs[7].outputs[0].token_ids) == 10 and 5 < len(outputs[8].outputs[0].token_ids) < 24
    assert outputs[1].outputs[0].token_ids != tiny.naive_greedy(prompts[1], 24)


SEEDED = [
    SamplingParams(temperature=1.0, max_tokens=40, ignore_eos=True, logprobs=2, seed=i, **kind)
    for i, kind in enumerate(kind for kind in KINDS if "ignore_eos" not in kind)
]
PROMPTS = [prompt_of(n, seed=600 + n) for n in (10, 9, 16, 12, 14, 11, 15, 13)]


@pytest.fixture(scope="module")
def each_alone():
    settings = {"max_num_seqs": 1, "enable_prefix_caching": False, "num_device_blocks": 64, "num_decode_steps": 1}
    return run(PROMPTS, SEEDED, **settings).outputs


BATCHES = {
    "preemptions": {"num_device_blocks": 18, "block_size": 4, "max_model_len": 72, "num_decode_steps": 8},
    "chunks in another order": {"max_num_batched_tokens": 7, "block_size": 8, "order": [3, 6, 0, 7, 1, 5, 2, 4]},
}


def pytest_generate_tests(metafunc):
    if "batch_settings" in metafunc.fixturenames:
        names = list(BATCHES) if metafunc.config.getoption("every_mode") else ["preemptions"]
        metafunc.parametrize("batch_settings", [BATCHES[name] for name in names], ids=names)


def test_draws_with_counts_and_masks_are_the_same_alone_and_in_any_batch(each_alone, batch_settings):
    result = run(PROMPTS, SEEDED, max_num_seqs=4, **{"num_device_blocks": 128} | batch_settings)
    if batch_settings.get("num_device_blocks") == 18:
        assert result.stats["num_preemptions"] >= 4
        assert max(output.metrics.num_preemptions for output in result.outputs) >= 2
    assert_same(result.outputs, each_alone)


def test_a_lost_count_after_a_preemption_would_be_noticed(each_alone, monkeypatch):
    from jaxpaged import scheduler

    sound = scheduler._adjusted_row
    monkeypatch.setattr(scheduler, "_adjusted_row", lambda request: replace(sound(request), output_token_ids=()))
    with pytest.raises(AssertionError):
        result = run(PROMPTS, SEEDED, max_num_seqs=4, num_device_blocks=18, block_size=4, max_model_len=72)
        assert_same(result.outputs, each_alone)


def test_a_row_without_changes_is_not_touched_by_one_that_had_its_row_before(engine):
    """All rows are used by requests that forbid nearly everything, then by ordinary ones beside an adjusted one."""
    generate(engine, [[5]] * 8, greedy(3, allowed_token_ids=[7, 8], presence_penalty=2.0))
    prompts = [prompt_of(n, seed=40 + n) for n in (4, 19, 30)]
    outputs = generate(engine, prompts, [greedy(12), greedy(12, presence_penalty=2.0), greedy(12)])
    for i in (0, 2):
        assert outputs[i].outputs[0].token_ids == tiny.naive_greedy(prompts[i], 12)


def test_a_seeded_request_is_not_changed_by_unseeded_neighbours_or_their_order(engine):
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True, seed=5, presence_penalty=1.0)
    others = [replace(params, seed=None, temperature=t, presence_penalty=0.0) for t in (0.5, 1.0, 2.0)]
    alone = completion(engine, params, PROMPTS[0]).token_ids
    for position in range(4):
        all_params = [*others[:position], params, *others[position:]]
        prompts = [*PROMPTS[1 : 1 + position], PROMPTS[0], *PROMPTS[1 + position : 4]]
        assert generate(engine, prompts, all_params)[position].outputs[0].token_ids == alone


def test_plain_batches_take_the_plain_steps_and_nothing_is_allocated_for_them():
    settings = {"num_decode_steps": 1, "max_num_seqs": 2, "num_device_blocks": 8, "max_model_len": 100}
    with Engine(tiny.model_directory(), **settings) as engine:
        for params in (greedy(10), SamplingParams(temperature=1.0, top_p=0.9, seed=1)):
            generate(engine, [5, 6, 7], params)
        assert engine._runner._adjustments is None
        assert not any("adjusted" in step["shape"] for step in engine.stats()["compiled_steps"])
        reserved = engine.memory_report().adjustments
        generate(engine, [5, 6, 7], greedy(10, presence_penalty=1.0))
        held = engine._runner._adjustments
        assert sum(leaf.nbytes for leaf in jax.tree.leaves(held)) == reserved > 3 * 9 * tiny.CONFIG.vocab_size
        generate(engine, [5, 6, 7], greedy(10))
        assert engine._runner._adjustments is held
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(held))


# ---- ends


@pytest.mark.parametrize("min_tokens", [0, 1, 2, 7, 8, 9, 19, 20])
def test_exactly_min_tokens_come_before_the_first_token_that_may_end_a_request(engine, min_tokens):
    """Two tokens end it, both far more probable than all others."""
    params = SamplingParams(
        temperature=0, max_tokens=20, min_tokens=min_tokens, stop_token_ids=[9], logit_bias={EOS: 100.0, 9: 90.0}
    )
    for one, reason in ((params, None), (replace(params, ignore_eos=True, logit_bias={9: 100.0}), 9)):
        result = completion(engine, one)
        if min_tokens == 20:
            assert (len(result.token_ids), result.finish_reason) == (20, "length")
        else:
            assert (len(result.token_ids), result.finish_reason) == (min_tokens + 1, "stop")
            assert result.stop_reason == reason
        assert not {EOS, 9} & set(result.token_ids[:min_tokens])


def test_stop_strings_are_looked_for_after_min_tokens(engine):
    """The letter comes at every token: it ends the request at the first one that may end it."""
    params = SamplingParams(temperature=0, max_tokens=20, logit_bias={97: 1000.0}, stop=["a"])
    for min_tokens in (0, 1, 5, 8):
        result = completion(engine, replace(params, min_tokens=min_tokens))
        assert (len(result.token_ids), result.text) == (min_tokens + 1, "a" * min_tokens)
        assert (result.finish_reason, result.stop_reason) == ("stop", "a")
    # A string may begin in text that could not end the request, and one that lies there whole does not count later.
    result = completion(engine, replace(params, min_tokens=4, stop=["aaa"]))
    assert (len(result.token_ids), result.text) == (5, "aa")
    params = replace(params, logit_bias={97: 1000.0, 98: 999.0}, bad_words=["aa", "bb"], stop=["ab", "babab"])
    whole = completion(engine, replace(params, stop=None))
    assert whole.text == "ababababababababababab"[:20]
    result = completion(engine, replace(params, min_tokens=2))
    assert (len(result.token_ids), result.text) == (4, "ab")


def test_min_tokens_hold_for_every_end_of_sequence_and_penalties_for_ids_that_only_the_model_knows(tmp_path):
    """The model has two end-of-sequence tokens and twice the tokens of its tokenizer."""
    directory = tiny.write_model(tmp_path)
    (directory / "generation_config.json").write_text('{"eos_token_id": [2, 9]}')
    with Engine(directory, tokenizer=tiny.CharsTokenizer(128), **SETTINGS) as engine:
        params = SamplingParams(temperature=0, max_tokens=20, min_tokens=4, logit_bias={9: 100.0, 2: 90.0})
        prompt = [200, 255, 130, 201, 254, 131]
        penalized = greedy(12, repetition_penalty=1.8)
        ended, repeated = generate(engine, [prompt, prompt], [params, penalized])
        assert len(ended.outputs[0].token_ids) == 5 and ended.outputs[0].token_ids[-1] == 9
        assert not {2, 9} & set(ended.outputs[0].token_ids[:4])
        assert ended.outputs[0].finish_reason == "stop" and ended.outputs[0].stop_reason is None
        assert repeated.outputs[0].token_ids == greedy_tokens(prompt, penalized) != tiny.naive_greedy(prompt, 12)


# ---- what is forbidden


def test_bad_words_do_not_come_in_any_completion(engine):
    plain = SamplingParams(temperature=2.0, seed=3, n=3, max_tokens=60, logit_bias=dict.fromkeys(b"abc", 60.0))
    bad = ["ab", "ca", "cbc", "bbbb"]
    [free] = generate(engine, ["hello"], plain)
    assert all(sum(one.text.count(word) for word in bad) > 3 for one in free.outputs)
    [output] = generate(engine, ["hello ab"], replace(plain, bad_words=bad))
    for one in output.outputs:
        assert not any(word in one.text for word in bad)
        assert {"a", "b", "c"} <= set(one.text), "single letters still come"
    assert len({one.text for one in output.outputs}) == 3
    assert "b" not in completion(engine, replace(plain, n=1, bad_words=["b"])).text


def test_a_bad_word_begins_in_the_output_not_in_the_prompt(engine):
    params = SamplingParams(temperature=0, max_tokens=1, logit_bias={98: 1000.0}, bad_words=["ab"])
    assert completion(engine, params, "xa").text == "b"


@pytest.mark.parametrize("temperature", [0.0, 1.0, 1e-5])
@pytest.mark.parametrize("top_p", [1.0, 1e-4])
def test_only_allowed_tokens_are_drawn_next_to_any_neighbour(engine, temperature, top_p):
    allowed = [11, 222]
    params = SamplingParams(temperature=temperature, top_p=top_p, max_tokens=16, seed=1, allowed_token_ids=allowed)
    neighbours = [greedy(16), SamplingParams(temperature=1.0, seed=2, max_tokens=16, top_k=5, ignore_eos=True)]
    outputs = generate(engine, PROMPTS[:4], [params, *neighbours, replace(params, frequency_penalty=2.0)])
    for i in (0, 3):
        assert set(outputs[i].outputs[0].token_ids) <= set(allowed) and outputs[i].outputs[0].finish_reason == "length"
    assert outputs[1].outputs[0].token_ids == tiny.naive_greedy(PROMPTS[1], 16)


def test_a_request_that_has_no_token_left_ends_with_an_error_and_the_others_go_on(engine):
    """ "aa" is forbidden and "a" is all there is: nothing may follow the first one."""
    stuck = SamplingParams(temperature=1.0, max_tokens=10, seed=1, allowed_token_ids=[97], bad_words=["aa"], logprobs=1)
    outputs = generate(engine, [PROMPTS[0], PROMPTS[1]], [stuck, greedy(20)])
    result = outputs[0].outputs[0]
    assert (result.token_ids, result.text, len(result.logprobs)) == ([97], "a", 1)
    assert result.finish_reason == "error" and "no token may be drawn" in result.stop_reason
    assert outputs[1].outputs[0].token_ids == tiny.naive_greedy(PROMPTS[1], 20)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"allowed_token_ids": [97, 98], "bad_words": ["a", "b"]}, r"\[97, 98\] are all forbidden by bad_words"),
        ({"allowed_token_ids": [EOS], "min_tokens": 1}, "min_tokens=1"),
        ({"allowed_token_ids": [3, 256]}, "allowed_token_ids has 256.*0 to 255"),
        ({"logit_bias": {256: 1.0}}, "logit_bias has 256.*0 to 255"),
        ({"logit_bias": {10**9: 1.0}}, "logit_bias has 1000000000"),
        ({"stop_token_ids": [10**9]}, "stop_token_ids has 1000000000"),
        ({"bad_words": ["a" * 17]}, "17 tokens.*room for 16"),
        ({"bad_words": [f"{i:03}" for i in range(129)]}, "258 spellings.*room for 256"),
        ({"prompt_logprobs": 257}, "prompt_logprobs=257.*max_logprobs=256"),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_the_reason(engine, params, message):
    with pytest.raises(ValueError, match=message):
        engine.add_request([5, 6], SamplingParams(**params))
    assert not engine.has_unfinished_requests()


def test_bad_words_need_a_tokenizer():
    with Engine(tiny.model_directory(), **SETTINGS) as engine, pytest.raises(ValueError, match="there is no tokenizer"):
        engine.add_request([5, 6], SamplingParams(bad_words=["a"]))


# ---- log-probabilities


def assert_prompt_logprobs(output, prompt, num_logprobs):
    """Those of naive full attention, the prompt's own token first."""
    theirs_tv = [logprobs(logits_v) for logits_v in tiny.naive_logits(prompt)]
    assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == len(prompt)
    for i, entry in enumerate(output.prompt_logprobs[1:], 1):
        assert next(iter(entry)) == prompt[i]
        best = np.argsort(-theirs_tv[i - 1], kind="stable")[:num_logprobs]
        assert set(entry) == {prompt[i], *best.tolist()}
        for token_id, one in entry.items():
            assert one.logprob == pytest.approx(theirs_tv[i - 1][token_id], abs=1e-3)
            # Exact but for tokens whose probabilities are as good as equal.
            above = theirs_tv[i - 1] - theirs_tv[i - 1][token_id]
            assert (above > 1e-4).sum() < one.rank <= (above >= -1e-4).sum()
            assert one.decoded_token == bytes([token_id]).decode(errors="replace")


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33])
def test_log_probabilities_of_a_prompt_are_all_there_whether_it_is_cached_or_not(engine, length):
    prompt = prompt_of(length, seed=900 + length)
    plain = generate(engine, [prompt], greedy(2))[0].outputs[0]
    for _ in range(2):
        [output] = generate(engine, [prompt], greedy(2, prompt_logprobs=3))
        assert_prompt_logprobs(output, prompt, 3)
        assert output.outputs[0].token_ids == plain.token_ids
    [cached] = generate(engine, [prompt], greedy(2))
    assert cached.num_cached_tokens == (length - 1) // 16 * 16


def test_log_probabilities_of_prompts_longer_than_the_budget_come_in_chunks_and_survive_preemptions():
    settings = {"max_num_batched_tokens": 24, "max_logprobs": -1, "num_device_blocks": 16, "block_size": 8}
    settings |= {"max_num_seqs": 4, "num_decode_steps": 1}
    prompts, nums = [prompt_of(n, seed=n) for n in (70, 24, 25, 3, 60)], (2, -1, 0, 5, -1)
    params = [greedy(30, prompt_logprobs=num) for num in nums]
    with Engine(tiny.model_directory(), tokenizer=BytesTokenizer(), max_model_len=128, **settings) as engine:
        outputs = generate(engine, prompts, params)
        assert engine.stats()["num_preemptions"] > 0
    for prompt, num_logprobs, output in zip(prompts, nums, outputs, strict=True):
        assert_prompt_logprobs(output, prompt, 256 if num_logprobs == -1 else num_logprobs)
        assert output.outputs[0].token_ids == tiny.naive_greedy(prompt, 30)


def test_a_step_takes_few_prompt_tokens_whose_log_probabilities_are_wanted_of_the_whole_vocabulary(engine):
    prompts = [prompt_of(100, seed=n) for n in (1, 2)]
    ids = [engine.add_request(prompt, greedy(1, prompt_logprobs=-1)) for prompt in prompts]
    outputs, tokens = {}, []
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in engine.step()}
        tokens.append(engine.last_step_stats()["num_prefill_tokens"])
    assert max(tokens) == 128 and sum(tokens) == 200
    for request_id, prompt in zip(ids, prompts, strict=True):
        assert_prompt_logprobs(outputs[request_id], prompt, 256)


def test_n_completions_share_the_log_probabilities_of_their_prompt(engine):
    for length in (2, 16, 40):
        prompt = prompt_of(length, seed=length)
        params = SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=10, ignore_eos=True)
        [output] = generate(engine, [prompt], replace(params, prompt_logprobs=2))
        assert_prompt_logprobs(output, prompt, 2)
        [plain] = generate(engine, [prompt], params)
        assert [one.token_ids for one in output.outputs] == [one.token_ids for one in plain.outputs]


def test_deltas_hold_the_log_probabilities_of_the_prompt_once_and_all_outputs_are_json(engine):
    params = greedy(20, prompt_logprobs=1, logprobs=1, output_kind=RequestOutputKind.DELTA)
    outputs = list(engine.stream(prompt_of(20), params))
    assert [output.prompt_logprobs is not None for output in outputs] == [True] + [False] * (len(outputs) - 1)
    outputs = list(engine.stream(prompt_of(20), replace(params, output_kind=RequestOutputKind.CUMULATIVE)))
    assert all(len(output.prompt_logprobs) == 20 for output in outputs)
    json.dumps(asdict(outputs[-1]), allow_nan=False)


@pytest.mark.parametrize("name", ["gqa_tied", "untied_biases"])
def test_log_probabilities_of_a_prompt_agree_with_hugging_faces(name):
    directory = Path(__file__).parent / "data" / "models" / name
    goldens = np.load(directory / "goldens.npz")
    with Engine(directory, max_num_batched_tokens=20, max_logprobs=-1, max_num_seqs=1, num_device_blocks=8) as engine:
        [output] = generate(engine, [goldens["prompt_token_ids"].tolist()], greedy(1, prompt_logprobs=-1))
    for entry, logits_v in zip(output.prompt_logprobs[1:], goldens["logits"], strict=False):
        ours_v = np.array([entry[token_id].logprob for token_id in range(len(logits_v))])
        np.testing.assert_allclose(ours_v, logprobs(logits_v), atol=1e-3)


def test_raw_log_probabilities_of_all_tokens_are_the_models_own_whatever_changes_the_draw(engine):
    prompt = prompt_of(9)
    params = greedy(6, logprobs=-1, presence_penalty=2.0, logit_bias={200: 25.0})
    result = completion(engine, params, prompt)
    for i, entry in enumerate(result.logprobs):
        theirs_v = logprobs(tiny.naive_logits(prompt + result.token_ids[:i])[-1])
        assert len(entry) == 256 and next(iter(entry)) == result.token_ids[i]
        ours_v = np.array([entry[token_id].logprob for token_id in range(256)])
        np.testing.assert_allclose(ours_v, theirs_v, atol=1e-3)


def test_processed_log_probabilities_are_those_of_what_was_drawn_from():
    prompt = prompt_of(9)
    changes = {"presence_penalty": 1.5, "allowed_token_ids": list(range(3, 100)), "logit_bias": {50: 3.0}}
    drawn = SamplingParams(temperature=0.7, top_k=5, seed=1, max_tokens=10, logprobs=-1, ignore_eos=True, **changes)
    settings = SETTINGS | {"logprobs_mode": "processed_logprobs", "max_logprobs": -1}
    with Engine(tiny.model_directory(), **settings) as engine:
        outputs = generate(engine, [prompt, prompt], [drawn, greedy(10, logprobs=-1, **changes)])
    for params, output in zip((drawn, greedy(10, **changes)), outputs, strict=True):
        result = output.outputs[0]
        for i, entry in enumerate(result.logprobs):
            before = result.token_ids[:i]
            new_v = adjusted_logits(tiny.naive_logits(prompt + before)[-1], prompt, before, params)
            if params.temperature:
                new_v = np.where(new_v >= np.sort(new_v)[-5], new_v / params.temperature, -np.inf)
            theirs_v = logprobs(new_v)
            # Tokens that could not be drawn are left out, so that entries are JSON.
            assert set(entry) == set(np.flatnonzero(theirs_v > -np.inf).tolist())
            for token_id, one in entry.items():
                assert one.logprob == pytest.approx(theirs_v[token_id], abs=1e-3)


# ---- logits processors


def no_even_tokens(logits_bv, state):
    return jnp.where(jnp.arange(logits_bv.shape[1]) % 2 == 0, -jnp.inf, logits_bv)


def by_state(logits_bv, state):
    """Favours a token that depends on all that a processor is told but counts."""
    wanted_b = (
        state.prompt_len_b + 3 * state.output_len_b + 5 * state.last_token_b + state.seed_b2[:, 1].astype(jnp.int32)
    ) % logits_bv.shape[1]
    return logits_bv + 1000.0 * jax.nn.one_hot(wanted_b, logits_bv.shape[1])


def never_twice(logits_bv, state):
    return jnp.where(state.output_counts_bv > 0, -jnp.inf, logits_bv)


def test_processors_see_lengths_last_token_and_seed_and_are_applied_in_order():
    with Engine(tiny.model_directory(), logits_processors=(by_state, no_even_tokens), **SETTINGS) as engine:
        prompts = PROMPTS[:5]
        params = [greedy(20, seed=i, presence_penalty=float(i % 2)) for i in range(5)]
        outputs = generate(engine, prompts, params)
        shuffled = generate(engine, prompts[::-1], params[::-1])
    for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        token_ids = output.outputs[0].token_ids
        assert token_ids == shuffled[4 - i].outputs[0].token_ids, "a processor works on each row alone"
        assert all(token_id % 2 for token_id in token_ids)
        for n, last in enumerate([prompt[-1], *token_ids[:-1]]):
            wanted = (len(prompt) + 3 * n + 5 * last + i) % 256
            assert token_ids[n] == wanted or wanted % 2 == 0


def test_a_processor_that_asks_for_counts_gets_them_through_preemptions_and_calls_of_several_draws():
    settings = {"num_device_blocks": 14, "block_size": 4, "max_model_len": 56, "max_num_seqs": 2}
    settings |= {"logits_processors": (never_twice,), "logits_processor_counts": True, "num_decode_steps": 8}
    result = run(PROMPTS[:3], SamplingParams(temperature=2.0, seed=1, max_tokens=30, ignore_eos=True), **settings)
    assert result.stats["num_preemptions"] > 0
    assert all(len(set(output.outputs[0].token_ids)) == 30 for output in result.outputs)


def test_what_is_forbidden_stays_so_whatever_a_processor_makes_of_it():
    def favours_all(logits_bv, state):
        return jnp.where(jnp.isfinite(logits_bv), logits_bv, 1e6)

    with Engine(tiny.model_directory(), logits_processors=(favours_all,), **SETTINGS) as engine:
        result = completion(engine, greedy(10, allowed_token_ids=[50, 60]))
    assert set(result.token_ids) <= {50, 60}


def test_a_processor_that_forbids_everything_or_yields_no_number_ends_the_request():
    def sometimes_nan(logits_bv, state):
        bad_b = jnp.where(state.output_len_b == 4, jnp.nan, 0.0)
        return jnp.where((state.prompt_len_b == 3)[:, None], -jnp.inf, logits_bv) + bad_b[:, None]

    with Engine(tiny.model_directory(), logits_processors=(sometimes_nan,), **SETTINGS) as engine:
        outputs = [generate(engine, prompt, greedy(n))[0] for prompt, n in (([5, 6, 7], 9), ([5, 6], 9), ([5, 6], 4))]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [0, 4, 4]
    assert [output.outputs[0].finish_reason for output in outputs] == ["error", "error", "length"]


def test_a_model_whose_logits_are_no_numbers_ends_the_request(tmp_path):
    tiny.write_model(tmp_path)
    broken = tiny.tensors()["model.norm.weight"] * np.float32(np.nan)
    save_file(tiny.tensors() | {"model.norm.weight": broken}, tmp_path / "model.safetensors")
    with Engine(tmp_path, **SETTINGS) as engine:
        results = [completion(engine, params) for params in (greedy(3), SamplingParams(seed=1), greedy(3, logprobs=1))]
    assert [(r.token_ids, r.finish_reason) for r in results] == [([], "error")] * 3


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        (lambda logits_bv, state: logits_bv[:1], r"logits_processors\[0\] made .* must return logits"),
        (lambda logits_bv, state: None, "made None"),
        (lambda logits_bv, state: logits_bv + state.nothing, "cannot be traced: AttributeError"),
        (lambda logits_bv: logits_bv, "cannot be traced: TypeError"),
        (never_twice, "cannot be traced: TypeError"),
    ],
)
def test_a_processor_that_does_not_fit_is_refused_at_the_start(processor, message):
    with pytest.raises(ValueError, match=message):
        Engine(tiny.model_directory(), logits_processors=(processor,), **SETTINGS)
