"""The engine as its users see it, on the small test model."""

import gc
import itertools
import json

import jax
import numpy as np
import pytest

import tiny
from jaxpaged import LLM, Engine, RequestOutputKind, SamplingParams
from jaxpaged.batch import make_buckets
from jaxpaged.runner import largest_shapes

BLOCK_SIZE = 16
SETTINGS = {"max_num_seqs": 8, "num_device_blocks": 64, "max_model_len": 256, "num_decode_steps": 1}


class BytesTokenizer:
    """A caller's minimal tokenizer: one token a byte."""

    def encode(self, text):
        return list(text.encode())

    def decode(self, token_ids, skip_special_tokens=True):
        return bytes(i for i in token_ids if not (skip_special_tokens and i == 2)).decode(errors="replace")


@pytest.fixture(scope="module")
def engine():
    with Engine(tiny.model_directory(), **SETTINGS) as engine:
        yield engine
        engine.check()
        assert engine.stats()["blocks_used"] == 0


@pytest.fixture(scope="module")
def text_engine():
    with Engine(tiny.model_directory(), tokenizer=BytesTokenizer(), **SETTINGS) as engine:
        yield engine


def greedy(max_tokens=8, **rest):
    return SamplingParams(**{"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True} | rest)


def generate(engine, prompts, params):
    return engine.generate(prompts, params, use_tqdm=False)


def prompt_of(length, seed=0):
    return np.random.default_rng(seed).integers(3, 256, length).tolist()


# ---- prompts


def test_outputs_come_in_the_order_of_the_prompts(engine):
    prompts = [prompt_of(n, seed=n) for n in (40, 3, 70, 1, 16)]
    params = [greedy(n) for n in (2, 9, 4, 12, 1)]
    outputs = generate(engine, prompts, params)
    assert [o.prompt_token_ids for o in outputs] == prompts
    for prompt, param, output in zip(prompts, params, outputs, strict=True):
        assert output.finished and output.error is None
        assert output.outputs[0].token_ids == tiny.naive_greedy(prompt, param.max_tokens)
        assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("num_blocks", [1, 2, 4])
def test_a_prompt_of_exactly_k_blocks_sent_twice_hits_all_but_the_last(engine, num_blocks):
    prompt = prompt_of(num_blocks * BLOCK_SIZE, seed=100 + num_blocks)
    first, second = (generate(engine, prompt, greedy())[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, (num_blocks - 1) * BLOCK_SIZE)
    assert first.outputs[0].token_ids == second.outputs[0].token_ids == tiny.naive_greedy(prompt, 8)


def test_of_two_equal_prompts_that_arrive_at_once_the_second_hits_what_the_first_computes(engine):
    prompt = prompt_of(40, seed=200)
    first, second = generate(engine, [prompt, prompt], greedy())
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 40 // BLOCK_SIZE * BLOCK_SIZE)
    assert first.outputs[0].token_ids == second.outputs[0].token_ids


def test_a_prompt_longer_than_the_budget_is_computed_in_chunks():
    prompt = prompt_of(100, seed=201)
    with Engine(tiny.model_directory(), max_num_batched_tokens=32, **SETTINGS) as engine:
        assert generate(engine, prompt, greedy())[0].outputs[0].token_ids == tiny.naive_greedy(prompt, 8)
        assert engine.stats()["num_steps"] == 4 + 7


def test_a_prompt_of_max_model_len_minus_one_yields_one_token(engine):
    prompt = prompt_of(255, seed=202)
    output = generate(engine, prompt, greedy(10))[0]
    assert output.outputs[0].token_ids == tiny.naive_greedy(prompt, 1)
    assert output.outputs[0].finish_reason == "length"


def test_max_tokens_beyond_the_room_or_none_ends_at_max_model_len(engine):
    for max_tokens in (1000, None):
        output = generate(engine, prompt_of(250, seed=203), greedy(max_tokens))[0]
        assert len(output.outputs[0].token_ids) == 6 and output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "empty"),
        ("", "empty"),
        ("text", "no tokenizer"),
        (prompt_of(256), "256 tokens.*max_model_len=256"),
        ([5, 256], r"\[256\].*0 to 255"),
        ([5, -1], r"\[-1\].*0 to 255"),
        ([5, 1.5], "1.5"),
        ([5, "6"], "whole numbers"),
        (None, "NoneType"),
        (7, "int"),
        ({"prompts": [5]}, "prompts"),
        ({}, "key"),
        ({"prompt": [5, 6]}, "prompt_token_ids"),
        ({"prompt": 5, "prompt_token_ids": [5]}, '"prompt" must be text, not int'),
        ({"messages": [], "prompt": "x"}, "stands alone"),
    ],
)
def test_a_prompt_that_cannot_be_served_is_an_error_in_its_place(engine, prompt, message):
    good = prompt_of(5, seed=204)
    outputs = generate(engine, [good, prompt, good], greedy(3))
    assert [o.error is None for o in outputs] == [True, False, True]
    assert outputs[1].finished and outputs[1].outputs == []
    assert outputs[0].outputs[0].token_ids == outputs[2].outputs[0].token_ids == tiny.naive_greedy(good, 3)
    with pytest.raises(ValueError, match=message):
        engine.add_request(prompt, greedy(3))
    assert not engine.has_unfinished_requests()


def test_a_request_larger_than_the_pool_is_refused_at_once():
    with Engine(tiny.model_directory(), max_num_seqs=2, num_device_blocks=4, max_model_len=64) as engine:
        # 64 tokens fit 4 blocks, so only a pool smaller than max_model_len could refuse: it does not start.
        assert generate(engine, prompt_of(60), greedy(100))[0].error is None
    with pytest.raises(ValueError, match="max_model_len=65 needs 5 blocks"):
        Engine(tiny.model_directory(), max_num_seqs=2, num_device_blocks=4, max_model_len=65)


def test_what_does_not_fit_is_refused_before_weights_are_read(monkeypatch):
    monkeypatch.setattr("jaxpaged.engine.load_weights", lambda *_, **__: pytest.fail("weights are read"))
    with pytest.raises(ValueError, match="max_model_len=100 needs 7 blocks"):
        Engine(tiny.model_directory(), max_model_len=100, num_device_blocks=2)


def test_a_pool_too_small_for_the_models_length_lowers_max_model_len_and_says_so(caplog):
    with Engine(tiny.model_directory(), max_num_seqs=2, num_device_blocks=4) as engine:
        assert engine.config.max_model_len == 64
        assert "lowered from 512 to 64" in caplog.text
        assert "max_model_len=64" in generate(engine, prompt_of(64), greedy())[0].error


def test_a_pool_far_larger_than_one_request_still_refuses_what_exceeds_it():
    """n completions run side by side but are preempted one by one; one of them must fit alone."""
    with Engine(tiny.model_directory(), max_num_seqs=4, num_device_blocks=4, max_model_len=64) as engine:
        params = SamplingParams(n=4, temperature=1.0, max_tokens=40, ignore_eos=True, seed=1)
        output = generate(engine, prompt_of(20), params)[0]
        assert [len(c.token_ids) for c in output.outputs] == [40] * 4
        assert engine.stats()["num_preemptions"] > 0


@pytest.mark.parametrize("form", [list, tuple, np.asarray])
def test_token_ids_may_be_any_sequence_and_are_not_changed(engine, form):
    prompt = form([5, 6, 7])
    output = generate(engine, {"prompt_token_ids": prompt}, greedy(2))[0]
    assert output.prompt_token_ids == [5, 6, 7] and list(prompt) == [5, 6, 7]
    assert output.outputs[0].token_ids == tiny.naive_greedy([5, 6, 7], 2)


def test_no_prompts_give_no_outputs(engine):
    assert generate(engine, [], greedy()) == []


# ---- parameters


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (SamplingParams(stop_token_ids=[5, 256]), "256.*0 to 255"),
        (SamplingParams(logprobs=21), "logprobs=21.*max_logprobs=20"),
        (SamplingParams(logprobs=-1), "logprobs=-1.*max_logprobs=20"),
        (SamplingParams(stop="x"), "no tokenizer"),
        (SamplingParams(n=9), "n=9.*max_num_seqs=8"),
        ({"temperature": 0}, "temperature"),
        ([SamplingParams()] * 3, "3 sampling_params for 2 prompts"),
    ],
)
def test_wrong_parameters_are_refused_before_anything_is_queued(engine, params, message):
    before = engine.stats()["num_prompt_tokens"]
    with pytest.raises(ValueError, match=message):
        generate(engine, [[5], [6]], params)
    assert engine.stats()["num_prompt_tokens"] == before and not engine.has_unfinished_requests()


def test_unknown_and_unsupported_settings_are_refused():
    for settings, message in [
        ({"max_seqs": 3}, "unknown settings max_seqs"),
        ({"quantization": "int4"}, "quantization='int4' is not known"),
        ({"kv_cache_dtype": "fp8"}, "not supported yet"),
        ({"attention_backend": "mosaic_gpu"}, r"needs a GPU .*9.x.*, but this is cpu \(cpu\); use 'auto'"),
        ({"attention_backend": "pallas_gpu"}, r"needs a GPU .*, but this is cpu \(cpu\); use 'auto'"),
        ({"attention_backend": "pallas_tpu"}, r"needs a TPU, but this is cpu \(cpu\); use 'auto'"),
        ({"native_kernels": True}, "not supported yet"),
        ({"num_device_blocks": 0}, "num_device_blocks"),
        ({"max_model_len": 513}, "max_model_len=513"),
        ({"swap_space": 10**6}, "swap_space"),
        ({"tokenizer": "/no/such/folder"}, "/no/such/folder"),
    ]:
        with pytest.raises(ValueError, match=message):
            Engine(tiny.model_directory(), **settings)


def test_eos_and_stop_ids_end_a_request_and_stay_in_its_token_ids(engine):
    prompt = prompt_of(9, seed=205)
    tokens = tiny.naive_greedy(prompt, 20)
    stop = tokens[5]
    first = tokens.index(stop)
    completion = generate(engine, prompt, greedy(20, stop_token_ids=[stop]))[0].outputs[0]
    assert completion.token_ids == tokens[: first + 1]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)


def test_several_eos_ids_end_a_request_unless_ignored(tmp_path):
    prompt = prompt_of(9, seed=205)
    tokens = tiny.naive_greedy(prompt, 20)
    directory = tiny.write_model(tmp_path / "model")
    (directory / "generation_config.json").write_text(f'{{"eos_token_id": [2, {tokens[4]}]}}')
    with Engine(directory, **SETTINGS) as engine:
        first = tokens.index(tokens[4])
        completion = generate(engine, prompt, greedy(20, ignore_eos=False))[0].outputs[0]
        assert completion.token_ids == tokens[: first + 1]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
        assert generate(engine, prompt, greedy(20))[0].outputs[0].token_ids == tokens


def test_log_probabilities_are_those_of_naive_attention(engine):
    prompt = prompt_of(12, seed=206)
    completion = generate(engine, prompt, greedy(5, logprobs=3))[0].outputs[0]
    logits = tiny.naive_logits(prompt + completion.token_ids)[len(prompt) - 1 : -1]
    expected = (
        logits
        - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
        - logits.max(-1, keepdims=True)
    )
    for row, entry, token_id in zip(expected, completion.logprobs, completion.token_ids, strict=True):
        assert list(entry) == np.argsort(-row)[:3].tolist() and next(iter(entry)) == token_id
        assert [p.rank for p in entry.values()] == [1, 2, 3]
        assert [p.logprob for p in entry.values()] == pytest.approx(np.sort(row)[::-1][:3], abs=1e-4)
    total = sum(row[i] for row, i in zip(expected, completion.token_ids, strict=True))
    assert completion.cumulative_logprob == pytest.approx(total, abs=1e-3)


def test_a_sampled_token_outside_the_top_comes_first_with_its_rank(engine):
    params = SamplingParams(temperature=2.0, seed=3, max_tokens=20, ignore_eos=True, logprobs=1)
    completion = generate(engine, prompt_of(12, seed=206), params)[0].outputs[0]
    assert all(next(iter(e)) == t for e, t in zip(completion.logprobs, completion.token_ids, strict=True))
    ranks = [e[t].rank for e, t in zip(completion.logprobs, completion.token_ids, strict=True)]
    assert max(ranks) > 1 and {len(e) for e in completion.logprobs} == {1, 2}


# ---- text


def test_text_is_the_decoded_tokens_and_prompts_come_back(text_engine):
    output = generate(text_engine, ["hello there"], greedy(8))[0]
    assert output.prompt == "hello there" and output.prompt_token_ids == list(b"hello there")
    expected = bytes(output.outputs[0].token_ids).decode(errors="replace")
    assert expected.startswith(output.outputs[0].text)
    assert generate(text_engine, ["hello there"], greedy(8, detokenize=False))[0].outputs[0].text == ""


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_over_several_tokens_ends_the_text(text_engine, include):
    params = greedy(30)
    text = generate(text_engine, ["stop"], params)[0].outputs[0].text
    at = next(i for i in range(2, len(text) - 4) if "\ufffd" not in text[i : i + 3])
    stop = text[at : at + 3]
    at = text.index(stop)
    completion = generate(text_engine, ["stop"], greedy(30, stop=stop, include_stop_str_in_output=include))[0].outputs[
        0
    ]
    assert completion.text == text[:at] + stop * include
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert len(completion.token_ids) < 30 and text_engine.stats()["blocks_used"] == 0


@pytest.mark.parametrize("messages", [None, "hello", {"role": "user", "content": "hello"}])
def test_what_is_no_conversation_is_refused(text_engine, messages):
    with pytest.raises(ValueError, match="must be a conversation, or a list of them"):
        text_engine.chat(messages)


def test_a_prompts_ids_in_outputs_are_the_users(engine):
    outputs = list(engine.stream([5, 6, 7], greedy(1)))
    stream = engine.stream([5, 6, 7], greedy(6, repetition_penalty=1.5))
    next(stream).prompt_token_ids.append(99)
    requests = [request.prompt_token_ids for request in engine._scheduler.requests.values()]
    assert requests == [[5, 6, 7]] and outputs[-1].prompt_token_ids == [5, 6, 7]
    stream.close()


def test_a_chat_without_a_template_is_a_clear_error(text_engine):
    output = text_engine.chat([{"role": "user", "content": "hi"}], use_tqdm=False)[0]
    assert "chat template" in output.error and output.outputs == []
    with pytest.raises(ValueError, match="chat template"):
        text_engine.encode_chat([{"role": "user", "content": "hi"}])


# ---- step by step


def test_steps_yield_cumulative_outputs_for_requests_that_got_tokens(engine):
    prompts = [prompt_of(5, seed=207), prompt_of(30, seed=208)]
    ids = [engine.add_request(prompt, greedy(4)) for prompt in prompts]
    seen = {request_id: [] for request_id in ids}
    while engine.has_unfinished_requests():
        for output in engine.step():
            seen[output.request_id].append(output)
    for request_id, prompt in zip(ids, prompts, strict=True):
        tokens = tiny.naive_greedy(prompt, 4)
        assert [o.outputs[0].token_ids for o in seen[request_id]] == [tokens[: i + 1] for i in range(4)]
        assert [o.finished for o in seen[request_id]] == [False, False, False, True]
    assert engine.step() == []


def test_delta_outputs_add_up_and_final_only_comes_once(engine):
    prompt = prompt_of(5, seed=207)
    deltas = list(engine.stream(prompt, greedy(4, output_kind=RequestOutputKind.DELTA)))
    assert [o.outputs[0].token_ids for o in deltas] == [[t] for t in tiny.naive_greedy(prompt, 4)]
    final = list(engine.stream(prompt, greedy(4, output_kind=RequestOutputKind.FINAL_ONLY)))
    assert [o.outputs[0].token_ids for o in final] == [tiny.naive_greedy(prompt, 4)]


def test_streamed_text_grows_to_the_final_text(text_engine):
    outputs = list(text_engine.stream("abc", greedy(20)))
    texts = [o.outputs[0].text for o in outputs]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    assert texts[-1] == generate(text_engine, "abc", greedy(20))[0].outputs[0].text
    deltas = text_engine.stream("abc", greedy(20, output_kind=RequestOutputKind.DELTA))
    assert "".join(o.outputs[0].text for o in deltas) == texts[-1]


def test_a_closed_stream_is_aborted_and_other_requests_lose_nothing(engine):
    prompt = prompt_of(5, seed=209)
    other = engine.add_request(prompt, greedy(6))
    stream = engine.stream(prompt_of(6, seed=210), greedy(50))
    next(stream)
    next(stream)
    stream.close()
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert {o.request_id for o in outputs} == {other}
    # Outputs are cumulative: of those that nobody asked for meanwhile the last one is kept.
    assert [len(o.outputs[0].token_ids) for o in outputs] == [3, 4, 5, 6]
    assert engine.stats()["blocks_used"] == 0


def test_generate_leaves_other_requests_outputs_for_step(engine):
    other = engine.add_request(prompt_of(5, seed=211), greedy(3))
    generate(engine, prompt_of(6, seed=212), greedy(5))
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert [o.request_id for o in outputs] == [other] and outputs[0].finished
    assert outputs[0].outputs[0].token_ids == tiny.naive_greedy(prompt_of(5, seed=211), 3)


def test_an_id_is_in_use_until_its_last_output_is_taken(engine):
    prompt = prompt_of(5, seed=211)
    engine.add_request(prompt, greedy(2), request_id="kept")
    generate(engine, prompt_of(6, seed=212), greedy(5))
    with pytest.raises(ValueError, match="'kept' is in use"):
        engine.add_request(prompt, greedy(2), request_id="kept")
    assert [o.outputs[0].token_ids for o in engine.step()] == [tiny.naive_greedy(prompt, 2)]
    engine.add_request(prompt, greedy(2), request_id="kept")
    engine.abort("kept")


def test_an_aborted_request_gives_what_it_had_and_frees_its_blocks(engine):
    request_id = engine.add_request(prompt_of(40, seed=213), greedy(50))
    waiting = engine.add_request(prompt_of(40, seed=214), greedy(50))
    engine.step()
    engine.step()
    output = engine.abort(request_id)
    assert output.finished and output.outputs[0].finish_reason == "abort" and len(output.outputs[0].token_ids) == 2
    assert engine.abort(request_id) is None and engine.abort("nobody") is None
    ended = engine.add_request(prompt_of(5, seed=215), greedy(2))
    while ended in engine._groups:
        engine._step()
    output = engine.abort(ended)
    assert len(output.outputs[0].token_ids) == 2 and output.outputs[0].finish_reason == "length"
    assert engine.abort(ended) is None
    engine.abort(waiting)
    assert not engine.has_unfinished_requests() and engine.stats()["blocks_used"] == 0
    engine.check()


def test_the_same_id_can_be_added_aborted_and_added_again(engine):
    for _ in range(2):
        assert engine.add_request([5, 6], greedy(2), request_id="mine") == "mine"
        with pytest.raises(ValueError, match="'mine' is in use"):
            engine.add_request([5, 6], greedy(2), request_id="mine")
        engine.abort("mine")
    engine.add_request([5, 6], greedy(2), request_id="mine")
    while engine.has_unfinished_requests():
        outputs = engine.step()
    assert outputs[0].outputs[0].token_ids == tiny.naive_greedy([5, 6], 2)


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_aborting_n_completions_frees_all_of_them(engine, steps):
    params = SamplingParams(n=4, temperature=1.0, max_tokens=20, ignore_eos=True)
    request_id = engine.add_request(prompt_of(33, seed=215), params)
    for _ in range(steps):
        engine.step()
    output = engine.abort(request_id)
    assert [c.finish_reason for c in output.outputs] == ["abort"] * 4
    assert not engine.has_unfinished_requests() and engine.stats()["blocks_used"] == 0
    engine.check()


def test_interrupting_generate_leaves_nothing_behind(engine, monkeypatch):
    calls = 0
    launch = engine._runner.launch

    def interrupted(inputs):
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return launch(inputs)

    monkeypatch.setattr(engine._runner, "launch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        generate(engine, [prompt_of(20, seed=216)] * 3, greedy(10))
    monkeypatch.undo()
    engine.check()
    assert not engine.has_unfinished_requests() and engine.stats()["blocks_used"] == 0


def test_metrics_and_step_records_say_what_happened(engine):
    output = generate(engine, prompt_of(20, seed=217), greedy(3))[0]
    m = output.metrics
    assert m.arrival_time <= m.first_scheduled_time <= m.first_token_time <= m.finished_time
    record = engine.last_step_stats()
    assert record["num_decode_requests"] == 1 and record["num_prefill_tokens"] == 0 and record["num_finished"] == 1
    assert record["blocks_used"] + record["blocks_cached"] + record["blocks_free"] == 64
    assert record["duration_s"] >= record["wait_s"] + record["update_s"] + record["detokenize_s"] > 0
    assert record["schedule_s"] > 0 and record["launch_s"] > 0


@pytest.mark.parametrize("name", ["launch", "wait"])
@pytest.mark.parametrize("after", [False, True])
def test_a_step_that_fails_costs_no_token(engine, monkeypatch, name, after):
    """Interrupted before the device did anything, or after, while another step is in flight: all is computed again."""
    prompts = [prompt_of(n, seed=400 + n) for n in (40, 20, 33)]
    ids = [engine.add_request(prompt, greedy(12)) for prompt in prompts]
    sound, calls, finals = getattr(engine._runner, name), 0, {}

    def fails_often(argument):
        nonlocal calls
        calls += 1
        output = sound(argument) if after or calls % 3 else None
        if calls % 3 == 0:
            raise KeyboardInterrupt
        return output

    monkeypatch.setattr(engine._runner, name, fails_often)
    while engine.has_unfinished_requests():
        try:
            finals |= {output.request_id: output for output in engine.step()}
        except KeyboardInterrupt:
            engine.check()
    assert calls > 12
    for request_id, prompt in zip(ids, prompts, strict=True):
        assert finals[request_id].outputs[0].token_ids == tiny.naive_greedy(prompt, 12)


def test_a_stream_ends_when_its_request_ends_elsewhere(engine):
    seen = []
    for output in engine.stream(prompt_of(5, seed=219), greedy(50)):
        seen.append(output)
        engine.abort(output.request_id)
    assert len(seen) == 1
    stream = engine.stream(prompt_of(5, seed=219), greedy(3))
    while engine.has_unfinished_requests():
        engine.step()
    assert list(stream) == []


def test_a_stream_closed_before_its_first_output_is_aborted(engine):
    engine.stream(prompt_of(5, seed=220), greedy(50)).close()
    assert not engine.has_unfinished_requests()


def test_ids_of_children_and_the_users_do_not_meet(engine):
    params = SamplingParams(n=2, temperature=1.0, max_tokens=3, ignore_eos=True)
    for request_id in ("a", ""):
        engine.add_request([5, 6], params, request_id=request_id)
    with pytest.raises(ValueError, match=r"a/0.*in use"):
        engine.add_request([5, 6], greedy(3), request_id="a/0")
    engine.add_request([5, 6], greedy(3), request_id="b/1")
    engine.add_request([5, 6], params, request_id="b")
    finals = {}
    while engine.has_unfinished_requests():
        finals |= {output.request_id: output for output in engine.step()}
    assert finals.keys() == {"a", "", "b/1", "b"}
    assert all(len(output.outputs) == (1 if name == "b/1" else 2) for name, output in finals.items())


class FragileTokenizer(BytesTokenizer):
    """Cannot encode "bad", and cannot decode one token."""

    def __init__(self, undecodable=-1):
        self.undecodable = undecodable

    def encode(self, text):
        if text == "bad":
            raise TypeError("no such text")
        return super().encode(text)

    def decode(self, token_ids, skip_special_tokens=True):
        if self.undecodable in token_ids:
            raise KeyError(self.undecodable)
        return super().decode(token_ids, skip_special_tokens)


def test_a_tokenizer_that_fails_on_one_prompt_costs_no_other():
    good, fragile = list(b"good prompt"), list(b"fragile")
    token = next(t for t in tiny.naive_greedy(fragile, 6) if t not in tiny.naive_greedy(good, 6) + good + fragile)
    with Engine(tiny.model_directory(), tokenizer=FragileTokenizer(token), **SETTINGS) as engine:
        outputs = generate(engine, ["good prompt", "bad", "fragile", [5, token], {"prompt": "good prompt"}], greedy(6))
        assert [o.error is None for o in outputs] == [True, False, False, False, True]
        assert "no such text" in outputs[1].error and str(token) in outputs[2].error
        assert outputs[0].outputs[0].token_ids == outputs[4].outputs[0].token_ids == tiny.naive_greedy(good, 6)
        engine.check()
        assert not engine.has_unfinished_requests() and engine.stats()["blocks_used"] == 0


def test_what_is_no_prompt_and_no_tokenizer_is_refused(engine):
    assert "bytes" in generate(engine, b"hi", greedy())[0].error
    assert "bytes" in generate(engine, [b"hi"], greedy())[0].error
    with pytest.raises(ValueError, match="prompts=None"):
        generate(engine, None, greedy())
    with pytest.raises(ValueError, match="tokenizer=5"):
        Engine(tiny.model_directory(), tokenizer=5)


def test_log_probabilities_come_with_the_text_of_their_tokens(text_engine):
    completion = generate(text_engine, "abc", greedy(6, logprobs=2))[0].outputs[0]
    for entry in completion.logprobs:
        for token_id, logprob in entry.items():
            assert logprob.decoded_token == bytes([token_id]).decode(errors="replace")


# ---- long runs and memory


def test_random_requests_with_random_aborts_in_a_tiny_pool_leave_every_block_free(request):
    """300 of them, a thousand with `--every-mode`."""
    rng, num_requests = np.random.default_rng(11), 1000 if request.config.getoption("every_mode") else 300
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "num_device_blocks": 8, "max_model_len": 128}
    with Engine(tiny.model_directory(), **settings) as engine:
        live, added, finished, aborted = [], 0, 0, 0
        while added < num_requests or engine.has_unfinished_requests():
            while added < num_requests and len(live) < 20:
                room = int(rng.integers(1, 60))
                params = greedy(int(rng.integers(1, 12))) if rng.random() < 0.7 else SamplingParams(max_tokens=5)
                live.append(engine.add_request(prompt_of(room, seed=added % 4), params))
                added += 1
            for output in engine.step():
                if output.finished:
                    live.remove(output.request_id)
                    finished += 1
            if live and rng.random() < 0.1:
                engine.abort(live.pop(int(rng.integers(len(live)))))
                aborted += 1
            engine.check()
        assert finished + aborted == num_requests and aborted > num_requests / 20
        stats = engine.stats()
        assert stats["num_preemptions"] > 0 and stats["num_prefix_hit_tokens"] > 0
        assert stats["blocks_used"] == 0 and stats["blocks_free"] + stats["blocks_cached"] == 8


def test_close_gives_the_devices_memory_back():
    gc.collect()
    before = sum(a.nbytes for a in jax.live_arrays())
    for _ in range(10):
        engine = Engine(tiny.model_directory(), **SETTINGS)
        generate(engine, [5, 6, 7], greedy(2))
        assert sum(a.nbytes for a in jax.live_arrays()) > before
        engine.close()
        engine.close()
        gc.collect()
        assert sum(a.nbytes for a in jax.live_arrays()) == before
        with pytest.raises(RuntimeError, match="closed"):
            generate(engine, [5], greedy())
        with pytest.raises(RuntimeError, match="closed"):
            engine.add_request([5])


def test_an_engine_that_is_forgotten_gives_the_devices_memory_back():
    gc.collect()
    before = sum(a.nbytes for a in jax.live_arrays())
    for _ in range(3):
        generate(Engine(tiny.model_directory(), **SETTINGS), [5, 6, 7], greedy(2))
        gc.collect()
        assert sum(a.nbytes for a in jax.live_arrays()) == before


def test_two_engines_side_by_side_serve_what_each_serves_alone():
    prompts = [prompt_of(20, seed=310), prompt_of(33, seed=311)]
    with Engine(tiny.model_directory(), **SETTINGS) as one, Engine(tiny.model_directory(), **SETTINGS) as other:
        engines = {one: prompts[0], other: prompts[1]}
        for engine, prompt in engines.items():
            engine.add_request(prompt, greedy(12))
        outputs = {}
        while len(outputs) < 2:
            for engine in engines:
                outputs.update((engine, output) for output in engine.step() if output.finished)
        for engine, prompt in engines.items():
            assert outputs[engine].outputs[0].token_ids == tiny.naive_greedy(prompt, 12)


def test_the_memory_report_adds_up():
    with Engine(tiny.model_directory(), kv_cache_memory_bytes=1_000_000, max_num_seqs=8) as engine:
        generate(engine, [5, 6, 7], greedy(2))
        report = engine.memory_report()
        per_block = 2 * 16 * 2 * 16 * 4 * 2
        assert report.bytes_per_block == per_block and report.num_device_blocks == 1_000_000 // per_block
        assert report.kv_pool == (report.num_device_blocks + 1) * per_block
        assert report.weights == sum(t.nbytes for t in tiny.tensors().values())
        assert report.num_host_blocks == 8 * 512 // 16, "all requests at full length, for which 4 GiB are enough"
        assert report.staging == 3 * 4 * 32 * per_block
        assert report.temporaries > 0
        parts = report.weights + report.kv_pool + report.temporaries + report.state + report.adjustments
        assert parts + report.staging + report.other + report.free == report.limit
        for text in ("weights", "KV pool", f"{per_block:,} bytes", "host blocks: 256"):
            assert text in str(report)


def test_on_a_cpu_the_pool_is_as_large_as_all_requests_could_need_or_memory_allows():
    with Engine(tiny.model_directory(), max_num_seqs=3) as engine:
        assert engine.memory_report().num_device_blocks == 3 * 512 // 16


def test_the_prefix_cache_can_be_reset_when_idle(engine):
    prompt = prompt_of(40, seed=218)
    generate(engine, prompt, greedy())
    request_id = engine.add_request(prompt, greedy(5))
    engine.step()
    assert not engine.reset_prefix_cache()
    engine.abort(request_id)
    assert engine.reset_prefix_cache()
    assert generate(engine, prompt, greedy())[0].num_cached_tokens == 0


def test_random_weights_of_the_right_shapes_run(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny.HF_CONFIG))
    with Engine(tmp_path, load_format="dummy", seed=2**64 - 1, **SETTINGS) as engine:
        assert len(generate(engine, [5, 6, 7], greedy(4))[0].outputs[0].token_ids) == 4


def test_llm_is_the_engine_under_the_name_that_vllms_users_type():
    assert LLM is Engine


def test_a_full_warm_up_compiles_every_step_ahead_and_strict_refuses_any_other(monkeypatch):
    settings = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "num_device_blocks": 32, "max_model_len": 128}
    params = SamplingParams(n=2, max_tokens=20, logprobs=3, temperature=1.0, seed=1)
    tokenizer = tiny.CharsTokenizer()
    with Engine(tiny.model_directory(), tokenizer=tokenizer, warmup="strict", **settings) as engine:
        ahead = [step["shape"] for step in engine.stats()["compiled_steps"]]
        assert {"32 SwapOut", "32 SwapIn"} < set(map(str, largest_shapes(make_buckets(engine.config)))) < set(ahead)
        sizes = [f"{kind} of {b}, up to 20 logprobs" for kind in ("decode", "draw") for b in (1, 2)]
        steps = ["prefill of 16×1", "prefill of 16×2", *sizes, *(f"{size}, adjusted" for size in sizes)]
        steps += [f"{size}, {kind}" for size in sizes[2:] for kind in ("masked", "adjusted, masked")]
        updates = ["8 RowUpdates", "8 BlockUpdates", "8 BlockCopies", "3 Adjustments", "1 AdjustedRow"]
        updates += [f"{n} {kind}" for n in (4, 32) for kind in ("SwapOut", "SwapIn")]
        assert sorted(ahead) == sorted([*steps, "up to 20 prompt logprobs in a prefill of 16", *updates])
        more = greedy(20, presence_penalty=1.0, prompt_logprobs=3)
        generate(engine, [prompt_of(40), prompt_of(3), prompt_of(17)], [greedy(20), greedy(20), params])
        structured = SamplingParams(max_tokens=9, structured_outputs={"regex": "[a-z]{9}"})
        generate(engine, [prompt_of(40), prompt_of(3), prompt_of(17)], [more, greedy(20), params])
        for others in (greedy(20), more):
            generate(engine, [prompt_of(40), prompt_of(3)], [structured, others])
        assert [step["shape"] for step in engine.stats()["compiled_steps"]] == ahead
        monkeypatch.setattr(engine._runner.compiler, "_compiled", {})
        engine.add_request(prompt_of(40), greedy(2))
        with pytest.raises(RuntimeError, match=r"prefill of 16×1 was not compiled ahead, and warmup='strict' forbids"):
            engine.step()


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.5), ("float16", 0.06)])
def test_16_bit_log_probabilities_stay_near_those_of_float32(dtype, tolerance):
    """Logits reach 30 here, and three more decimal digits are lost per layer: the bound is 2 or 3 of their steps."""
    prompts = [prompt_of(n, seed=300 + n) for n in (5, 20, 40)]
    with Engine(tiny.model_directory(), dtype=dtype, **SETTINGS) as engine:
        outputs = generate(engine, prompts, greedy(1, logprobs=5))
    for prompt, output in zip(prompts, outputs, strict=True):
        logits = tiny.naive_logits(prompt)[-1]
        expected = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        for token_id, logprob in output.outputs[0].logprobs[0].items():
            assert logprob.logprob == pytest.approx(expected[token_id], abs=tolerance)
