"""Beam search against its definition, computed with naive attention; as forks, whatever the pool and the batch."""

import functools

import numpy as np
import pytest

import tiny
from jaxpaged import Engine, SamplingParams
from test_engine import BytesTokenizer, generate, greedy, prompt_of

SETTINGS = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "num_device_blocks": 64,
    "block_size": 8,
    "max_model_len": 64,
    "num_decode_steps": 1,
}
PROMPTS = [prompt_of(n, seed=700 + n) for n in (1, 7, 8, 9, 33)]
ENDS = tuple(sorted({2, *(tokens[at] for p in PROMPTS for tokens in [tiny.naive_greedy(p, 4)] for at in (1, 3))}))
"""End-of-sequence tokens of a model in which completions end early: some of the most probable ones."""


@pytest.fixture(scope="module")
def engine():
    with Engine(tiny.model_directory(), tokenizer=BytesTokenizer(), **SETTINGS) as engine:
        yield engine


@functools.cache
def ending_model(directory):
    tiny.write_model(directory)
    (directory / "generation_config.json").write_text(f'{{"eos_token_id": {list(ENDS)}}}')
    return directory


@pytest.fixture(scope="module")
def model_with_ends(tmp_path_factory):
    return ending_model(tmp_path_factory.getbasetemp() / "ends")


@functools.cache
def logprobs_after(token_ids):
    """Naive log-probabilities [v] of the token that follows."""
    logits = tiny.naive_logits(list(token_ids))[-1]
    logits = logits - logits.max()
    return logits - np.log(np.exp(logits).sum())


@functools.cache
def naive_beam_search(prompt, width, max_tokens, length_penalty=1.0, ends=(2,)):
    """[(token ids, sum of log-probabilities)] of the best, by the definition; never stopped early."""
    live, ended = [((), 0.0)], []
    for length in range(1, max_tokens + 1):
        extensions = [
            ((*tokens, t), total + logprob)
            for tokens, total in live
            for t, logprob in enumerate(logprobs_after(prompt + tokens).tolist())
        ]
        extensions.sort(key=lambda extension: -extension[1])
        live = []
        for tokens, total in extensions:
            if len(live) == width:
                break
            (ended if tokens[-1] in ends else live).append((tokens, total))
        if length == max_tokens:
            ended += live
    ended.sort(key=lambda e: -e[1] / len(e[0]) ** length_penalty)
    return ended[:width]


def search(engine, prompts, width, max_tokens=7, **options):
    """The outputs, with the books checked after each step."""
    step = engine._step

    def checked():
        step()
        engine.check()

    engine._step = checked
    try:
        outputs = engine.beam_search(prompts, width, max_tokens=max_tokens, use_tqdm=False, **options)
    finally:
        engine._step = step
    assert not engine.has_unfinished_requests() and engine.stats()["blocks_used"] == 0
    return outputs


def assert_found(output, expected):
    assert output.error is None and output.finished
    assert [c.token_ids for c in output.outputs] == [list(tokens) for tokens, _ in expected]
    assert [c.cumulative_logprob for c in output.outputs] == pytest.approx([total for _, total in expected], abs=1e-3)
    assert [c.index for c in output.outputs] == list(range(len(expected)))


@pytest.mark.parametrize("width", [1, 2, 4])
def test_the_completions_are_those_of_the_definition(engine, width):
    for prompt, output in zip(PROMPTS, search(engine, PROMPTS, width), strict=True):
        assert_found(output, naive_beam_search(tuple(prompt), width, 7))
        for completion in output.outputs:
            assert completion.finish_reason == ("stop" if completion.token_ids[-1] == 2 else "length")


def test_a_beam_of_one_is_greedy(engine):
    [beam] = search(engine, PROMPTS[2], 1, max_tokens=20, ignore_eos=True)
    assert beam.outputs[0].token_ids == generate(engine, PROMPTS[2], greedy(20))[0].outputs[0].token_ids


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 3.0, -1.0])
def test_ended_completions_compete_by_their_score(model_with_ends, length_penalty):
    with Engine(model_with_ends, **SETTINGS) as engine:
        outputs = search(engine, PROMPTS, 3, length_penalty=length_penalty)
        lengths = set()
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            expected = naive_beam_search(tuple(prompt), 3, 7, length_penalty, ENDS)
            assert_found(output, expected)
            for completion in output.outputs:
                is_ended = completion.token_ids[-1] in ENDS
                assert completion.finish_reason == ("stop" if is_ended else "length")
                assert completion.stop_reason is None
                lengths.add(len(completion.token_ids))
        assert len(lengths) > 1 or length_penalty > 1, "some end early, some do not"
        ignoring = search(engine, PROMPTS[:1], 3, length_penalty=length_penalty, ignore_eos=True)
        assert_found(ignoring[0], naive_beam_search(tuple(PROMPTS[0]), 3, 7, length_penalty, ()))


def test_a_search_whose_outcome_is_certain_is_over(model_with_ends):
    """Without a length penalty nothing that goes on can pass what is more probable already."""
    with Engine(model_with_ends, **SETTINGS) as engine:
        [output] = search(engine, PROMPTS[1], 2, max_tokens=50, length_penalty=0.0)
        assert {c.finish_reason for c in output.outputs} == {"stop"}
        assert engine.stats()["num_steps"] < 30


@pytest.mark.parametrize(
    "settings",
    [
        {"num_decode_steps": 8},
        {"max_num_batched_tokens": 5},
        {"enable_prefix_caching": False},
        {"num_device_blocks": 8},
        {"num_device_blocks": 8, "enable_prefix_caching": False},
    ],
    ids=lambda settings: "-".join(f"{name}={value}" for name, value in settings.items()),
)
def test_pool_and_batch_and_neighbours_change_nothing(settings):
    """Where hypotheses find no row or block, they are drawn for one after another."""
    with Engine(tiny.model_directory(), **SETTINGS | settings) as engine:
        other = engine.add_request(prompt_of(9, seed=720), greedy(30))
        for prompt, output in zip(PROMPTS, search_beside(engine, PROMPTS, 4), strict=True):
            assert_found(output, naive_beam_search(tuple(prompt), 4, 7))
        while engine.has_unfinished_requests():
            for output in engine.step():
                assert output.request_id == other
        assert output.outputs[0].token_ids == tiny.naive_greedy(prompt_of(9, seed=720), 30)
        if "num_device_blocks" in settings:
            assert engine.stats()["num_preemptions"] > 0


def search_beside(engine, prompts, width):
    return engine.beam_search(prompts, width, max_tokens=7, use_tqdm=False)


def test_hypotheses_share_blocks_and_compute_only_their_own_tokens():
    """A prompt of 50 tokens, 4 hypotheses, 10 tokens: 50 + 9 × 4 computed; 6 blocks and 2 more for each at most."""
    with Engine(tiny.model_directory(), **SETTINGS | {"enable_prefix_caching": False}) as engine:
        search(engine, prompt_of(50, seed=721), 4, max_tokens=10)
        stats = engine.stats()
        assert stats["num_scheduled_tokens"] == 50 + 9 * 4
        assert 8 < stats["peak_blocks_used"] <= 6 + 4 * 2
        assert stats["num_preemptions"] == 0 and stats["num_steps"] == 4 + 9


def test_text_and_logprobs_are_those_of_the_tokens(engine):
    [output] = search(engine, "abc", 3)
    assert output.prompt == "abc" and output.prompt_token_ids == list(b"abc")
    for completion in output.outputs:
        expected = bytes(completion.token_ids).decode(errors="replace").rstrip("\ufffd")
        assert completion.text == expected
        assert [list(entry) for entry in completion.logprobs] == [[t] for t in completion.token_ids]
        entries = [entry[t] for entry, t in zip(completion.logprobs, completion.token_ids, strict=True)]
        assert sum(p.logprob for p in entries) == pytest.approx(completion.cumulative_logprob)
        texts = [bytes([t]).decode(errors="replace") for t in completion.token_ids]
        assert [p.decoded_token for p in entries] == texts
    m = output.metrics
    assert m.arrival_time <= m.first_scheduled_time <= m.first_token_time <= m.finished_time


def test_a_prompt_that_cannot_be_served_costs_no_other(engine):
    outputs = search(engine, ["short", prompt_of(64), "short"], 2)
    assert "max_model_len=64" in outputs[1].error and outputs[1].outputs == []
    for output in (outputs[0], outputs[2]):
        assert_found(output, naive_beam_search(tuple(b"short"), 2, 7))


def test_a_search_ends_at_max_model_len(engine):
    [output] = search(engine, prompt_of(61, seed=722), 2, max_tokens=None)
    assert_found(output, naive_beam_search(tuple(prompt_of(61, seed=722)), 2, 3))


@pytest.mark.parametrize("num_steps", [0, 1, 4])
def test_an_interrupted_search_leaves_nothing_behind(engine, monkeypatch, num_steps):
    step, calls = engine._step, []

    def interrupted():
        calls.append(1)
        if len(calls) > num_steps:
            raise KeyboardInterrupt
        step()

    monkeypatch.setattr(engine, "_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.beam_search(PROMPTS, 3, use_tqdm=False)
    monkeypatch.undo()
    engine.check()
    assert not engine.has_unfinished_requests() and engine.stats()["blocks_used"] == 0


def test_a_step_that_fails_costs_no_hypothesis(engine, monkeypatch):
    wait, calls = engine._runner.wait, []

    def fails_often(drawn):
        calls.append(1)
        if len(calls) % 4 == 0:
            raise RuntimeError("lost")
        return wait(drawn)

    monkeypatch.setattr(engine._runner, "wait", fails_often)
    params = engine._beam_params(3, 7, 1.0, False)
    for i, prompt in enumerate(PROMPTS):
        engine._add_beam_search(str(i), prompt, params, 3, 1.0)
    outputs = {}
    while engine.has_unfinished_requests():
        try:
            outputs |= {output.request_id: output for output in engine.step()}
        except RuntimeError:
            engine.check()
    assert len(calls) > 8
    for i, prompt in enumerate(PROMPTS):
        assert_found(outputs[str(i)], naive_beam_search(tuple(prompt), 3, 7))


@pytest.mark.parametrize(
    ("width", "options", "message"),
    [
        (0, {}, r"width=0 must be a whole number in \[1, max_num_seqs=4\]"),
        (5, {}, "width=5"),
        (2.0, {}, "width=2.0"),
        (True, {}, "width=True"),
        (2, {"max_tokens": 0}, "max_tokens=0"),
        (2, {"length_penalty": float("nan")}, "length_penalty=nan"),
        (2, {"length_penalty": "1"}, "length_penalty='1'"),
        (2, {"ignore_eos": 1}, "ignore_eos=1"),
    ],
)
def test_wrong_parameters_are_refused_before_anything_is_queued(engine, width, options, message):
    with pytest.raises(ValueError, match=message):
        engine.beam_search([[5]], width, **options)
    assert not engine.has_unfinished_requests()


def test_a_beam_wider_than_the_log_probabilities_allow_is_refused():
    with Engine(tiny.model_directory(), **SETTINGS | {"max_logprobs": 4}) as engine:
        with pytest.raises(ValueError, match=r"width=4 takes the 5 most probable .* \(1 may end it\).*max_logprobs=4"):
            engine.beam_search([[5]], 4)
        assert engine._beam_params(3, 7, 1.0, False).logprobs == engine._beam_params(4, 7, 1.0, True).logprobs == 4


def test_ids_of_hypotheses_and_the_users_do_not_meet(engine):
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    number = int(engine._new_id()) + 2
    mine = engine.add_request(prompt_of(9, seed=723), params, request_id=f"{number - 1}/1")
    [output] = search_beside(engine, [PROMPTS[1]], 3)
    assert output.request_id == str(number - 1)
    assert_found(output, naive_beam_search(tuple(PROMPTS[1]), 3, 7))
    while engine.has_unfinished_requests():
        [output] = engine.step()
    assert output.request_id == mine and output.outputs[0].token_ids == tiny.naive_greedy(prompt_of(9, seed=723), 30)
