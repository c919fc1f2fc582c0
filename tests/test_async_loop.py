"""The host is one step behind the device, and calls of several decode steps: same outputs, nothing beyond an end."""

import json

import jax
import pytest

import tiny
from jaxpaged import Engine, RequestOutputKind, runner
from jaxpaged.step_data import MAX_STOP_IDS
from test_engine import BytesTokenizer, greedy, prompt_of

SETTINGS = {"max_num_seqs": 8, "num_device_blocks": 64, "max_model_len": 256}
PROMPT = prompt_of(21, seed=77)


@pytest.fixture(scope="module", params=[1, 8], ids=lambda k: f"{k} decode steps a call")
def engine(request):
    with Engine(
        tiny.model_directory(), tokenizer=BytesTokenizer(), num_decode_steps=request.param, **SETTINGS
    ) as engine:
        yield engine


def run(engine, params, prompt=PROMPT):
    [output] = engine.generate([prompt], params, use_tqdm=False)
    return output.outputs[0]


def test_the_next_step_starts_before_the_last_one_is_waited_for(engine, monkeypatch):
    run(engine, greedy(2))  # compiles, which the steps in flight do not wait for
    calls, (launch, wait) = [], (engine._runner.launch, engine._runner.wait)
    monkeypatch.setattr(engine._runner, "launch", lambda inputs: calls.append("launch") or launch(inputs))
    monkeypatch.setattr(engine._runner, "wait", lambda drawn: calls.append("wait") or wait(drawn))
    max_tokens = 1 + 3 * engine.config.num_decode_steps
    assert run(engine, greedy(max_tokens)).token_ids == tiny.naive_greedy(PROMPT, max_tokens)
    assert calls == ["launch", "launch", "wait", "launch", "wait", "launch", "wait", "wait"]


def test_a_step_sends_the_host_one_array(engine, monkeypatch):
    sent, wait = [], engine._runner.wait
    monkeypatch.setattr(engine._runner, "wait", lambda drawn: sent.append(drawn) or wait(drawn))
    run(engine, greedy(20))
    assert [len(jax.tree.leaves(drawn)) for drawn in sent] == [1] * len(sent)
    sent.clear()
    run(engine, greedy(2, logprobs=1))
    assert {len(jax.tree.leaves(drawn)) for drawn in sent} == {5}


@pytest.mark.parametrize("end", [1, 2, 6, 7, 8, 9, 14, 19])
def test_nothing_drawn_after_a_stop_token_is_told_or_counted(engine, end):
    tokens = tiny.naive_greedy(PROMPT, 20)
    end = tokens.index(tokens[end])
    before = engine.stats()
    completion = run(engine, greedy(40, stop_token_ids=[tokens[end]]))
    assert (completion.token_ids, completion.finish_reason) == (tokens[: end + 1], "stop")
    assert completion.stop_reason == tokens[end]
    after = engine.stats()
    assert after["num_generated_tokens"] - before["num_generated_tokens"] == end + 1
    assert after["blocks_used"] == 0
    engine.check()


def test_stop_tokens_that_the_device_has_no_room_for_end_a_request_as_well(engine):
    tokens = tiny.naive_greedy(PROMPT, 20)
    others = sorted(set(range(3, 256)) - set(tokens))[: MAX_STOP_IDS + 3]
    assert (
        run(engine, greedy(40, stop_token_ids=[*others, tokens[12]])).token_ids
        == tokens[: tokens.index(tokens[12]) + 1]
    )


@pytest.mark.parametrize("index", range(5))
def test_a_stop_string_within_a_call_cuts_tokens_text_and_logprobs_there(engine, index):
    whole = run(engine, greedy(40, logprobs=1))
    letters = sorted({t for t in whole.token_ids if t < 128}, key=whole.token_ids.index)
    end, stop = whole.token_ids.index(letters[index]), chr(letters[index])
    cut = run(engine, greedy(40, logprobs=1, stop=[stop], include_stop_str_in_output=True))
    assert cut.token_ids == whole.token_ids[: end + 1]
    assert cut.logprobs == whole.logprobs[: end + 1]
    assert cut.cumulative_logprob == pytest.approx(sum(next(iter(e.values())).logprob for e in cut.logprobs))
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    assert cut.text.endswith(stop) and len(cut.text) < len(whole.text)


def test_an_aborted_request_leaves_its_id_to_another_while_a_step_is_in_flight(engine):
    other = prompt_of(30, seed=78)
    engine.add_request(PROMPT, greedy(60), request_id="id")
    for _ in range(2):
        engine.step()
    engine.abort("id")
    engine.add_request(other, greedy(12), request_id="id")
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert outputs[-1].outputs[0].token_ids == tiny.naive_greedy(other, 12)
    engine.check()


def test_deltas_of_a_call_hold_all_its_tokens(engine):
    params = greedy(25, output_kind=RequestOutputKind.DELTA)
    deltas = [output.outputs[0].token_ids for output in engine.stream(PROMPT, params)]
    assert [token_id for delta in deltas for token_id in delta] == tiny.naive_greedy(PROMPT, 25)
    assert max(map(len, deltas)) == engine.config.num_decode_steps


def test_a_request_that_comes_is_admitted_while_steps_of_others_are_in_flight(engine):
    prompts = [prompt_of(n, seed=500 + n) for n in (9, 30, 17)]
    finals, index = {}, 0
    while engine.has_unfinished_requests() or index < 3:
        if index < 3:
            engine.add_request(prompts[index], greedy(20), request_id=str(index))
            index += 1
        finals |= {output.request_id: output for output in engine.step()}
    for i, prompt in enumerate(prompts):
        assert finals[str(i)].outputs[0].token_ids == tiny.naive_greedy(prompt, 20)


def test_the_engine_takes_several_decode_steps_a_call_where_the_device_waits_for_the_host(engine):
    pace = {"schedule_s": 1.0, "launch_s": 0.0, "update_s": 0.0, "detokenize_s": 1.0}
    with Engine(tiny.model_directory(), **SETTINGS) as auto:
        assert auto.config.num_decode_steps == "auto"
        seen = []
        for wait_s in (0, 0.1, 0, 0, 1.0, 5.0, 9.0, 9.0, 9.0, 9.0):
            auto._pace(pace | {"wait_s": wait_s})
            seen.append(auto._num_draws)
        assert seen == [2, 4, 8, 8, 8, 8, 4, 2, 1, 1]


def test_no_step_is_compiled_after_the_warm_up_over_all_workloads(workloads, tmp_path):
    """Counted by JAX's own events: nothing at all is compiled, in steps or around them."""
    (tmp_path / "model").mkdir()
    directory = tiny.write_model(tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1024}))
    settings = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "num_device_blocks": 400, "warmup": "strict"}
    compiled = []
    with Engine(directory, **settings) as engine:
        jax.monitoring.register_event_duration_secs_listener(
            lambda event, *_, **__: compiled.append(event) if "backend_compile" in event else None
        )
        jax.jit(lambda x: x + 7)(jax.numpy.arange(3))
        assert compiled, "the events are heard"
        compiled.clear()
        for prompts, max_tokens in workloads:
            params = [greedy(min(n, 20)) for n in max_tokens]
            engine.generate([[3 + t % 250 for t in prompt] for prompt in prompts], params, use_tqdm=False)
        assert not compiled
        assert engine.stats()["num_prefix_hit_tokens"] > 1000


@pytest.fixture
def workloads(request):
    directory = request.config.rootpath / "scripts" / "workloads"
    records = [json.loads((directory / f"W{i}.json").read_text()) for i in (1, 2, 3, 4)]
    return [(record["prompt_token_ids"], record["max_tokens"]) for record in records]


@pytest.fixture
def new_engine():
    with Engine(tiny.model_directory(), tokenizer=BytesTokenizer(), num_decode_steps=1, **SETTINGS) as engine:
        yield engine


def steps_compiled(engine):
    return [step["shape"] for step in engine.stats()["compiled_steps"] if "Updates" not in step["shape"]]


def test_the_first_token_does_not_wait_for_the_decode_step_to_be_compiled(new_engine):
    new_engine.add_request(PROMPT, greedy(4, output_kind=RequestOutputKind.CUMULATIVE))
    [first] = new_engine.step()
    assert first.outputs[0].token_ids == tiny.naive_greedy(PROMPT, 1)
    assert [shape.split(" of")[0] for shape in steps_compiled(new_engine)] == ["prefill", "draw"]
    while new_engine.has_unfinished_requests():
        [last] = new_engine.step()
    assert last.outputs[0].token_ids == tiny.naive_greedy(PROMPT, 4)
    assert [shape.split(" of")[0] for shape in steps_compiled(new_engine)] == ["prefill", "draw", "decode"]


def test_requests_may_go_and_come_while_a_step_waits_to_be_compiled(new_engine):
    gone = new_engine.add_request(PROMPT, greedy(30))
    new_engine.step()
    assert new_engine.abort(gone).outputs[0].token_ids == tiny.naive_greedy(PROMPT, 1)
    prompts = [prompt_of(20, seed=5), PROMPT]
    outputs = new_engine.generate(prompts, greedy(9), use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == [tiny.naive_greedy(p, 9) for p in prompts]
    new_engine.check()
    assert new_engine.stats()["blocks_used"] == 0


def test_a_compilation_that_fails_loses_no_request(new_engine, monkeypatch):
    new_engine.add_request(PROMPT, greedy(6))
    new_engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(runner, "_compile", lambda lowered: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            new_engine.step()
    while new_engine.has_unfinished_requests():
        outputs = new_engine.step()
    assert outputs[0].outputs[0].token_ids == tiny.naive_greedy(PROMPT, 6)
    new_engine.check()
