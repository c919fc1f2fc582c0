"""Structured output through the engine: what is drawn goes on towards what was asked for, in batches of all kinds."""

import asyncio
import json
import re

import numpy as np
import pytest

import tiny
from jaxpaged import Engine, SamplingParams, StructuredOutputsParams
from jaxpaged.runner import Runner
from jaxpaged.structured_output import GrammarCompiler
from test_engine import BytesTokenizer, generate, greedy, prompt_of

VOCAB_SIZE, EOS = tiny.CONFIG.vocab_size, tiny.CONFIG.eos_token_ids[0]
SETTINGS = {"max_num_seqs": 4, "num_device_blocks": 64, "max_model_len": 128, "num_decode_steps": 8}


TOKENIZER = tiny.CharsTokenizer()
KINDS = [
    {"regex": r"[a-z]{3,30}( [0-9]{2})?"},
    {"choice": ["yes", "no", "not sure"]},
    {"json": {"type": "object", "properties": {"a": {"type": "string", "maxLength": 8}}, "required": ["a"]}},
    None,
    {"grammar": 'start: "(" start ")" | /[x-z]{2,9}/'},
    {"regex": r"(?s:.{40,})"},
]
PROMPTS = [prompt_of(n, seed=900 + n) for n in (5, 40, 17, 16, 33, 8)]


def structured(kind, **rest) -> SamplingParams:
    params = {"temperature": 0, "max_tokens": 24, "ignore_eos": kind is None, "structured_outputs": kind}
    return SamplingParams(**params | rest)


@pytest.fixture(scope="module")
def compiler():
    return GrammarCompiler(TOKENIZER, VOCAB_SIZE, [EOS])


@pytest.fixture(scope="module")
def engine():
    with Engine(tiny.model_directory(), tokenizer=TOKENIZER, **SETTINGS) as engine:
        yield engine
        engine.check()
        assert engine.stats()["blocks_used"] == 0


@pytest.fixture(scope="module")
def expected(compiler):
    """Token ids of each prompt with each kind: naive logits, and a mask filled from the start for every token."""
    return [naive(compiler, prompt, structured(kind)) for prompt, kind in zip(PROMPTS, KINDS, strict=True)]


def naive(compiler, prompt, params) -> list[int]:
    token_ids = []
    while len(token_ids) < params.max_tokens and (params.ignore_eos or EOS not in token_ids):
        logits_v = tiny.naive_logits(prompt + token_ids)[-1]
        if params.structured_outputs is not None:
            grammar = compiler.compile(params.structured_outputs)
            grammar.follow(token_ids)
            mask_1w = np.zeros((1, compiler.num_words), np.int32)
            compiler.fill([(0, grammar)], mask_1w)
            is_allowed_v = np.unpackbits(mask_1w.view(np.uint8), bitorder="little")[:VOCAB_SIZE]
            logits_v = np.where(is_allowed_v, logits_v, -np.inf)
        token_ids.append(int(logits_v.argmax()))
    return token_ids


def assert_expected(outputs, expected):
    for output, token_ids, kind in zip(outputs, expected, KINDS, strict=True):
        assert output.error is None and output.outputs[0].token_ids == token_ids, kind
        assert output.outputs[0].finish_reason == ("stop" if token_ids[-1] == EOS else "length")


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 7, "num_device_blocks": 18, "block_size": 4, "max_model_len": 72},
    ],
    ids=["a batch", "chunks and preemptions"],
)
def test_greedy_tokens_are_those_of_masked_logits_whatever_the_batch(expected, settings):
    with Engine(tiny.model_directory(), tokenizer=TOKENIZER, **SETTINGS | settings) as engine:
        outputs = generate(engine, PROMPTS, [structured(kind) for kind in KINDS])
        assert_expected(outputs, expected)
        assert outputs[1].outputs[0].text in KINDS[1]["choice"]
        if "num_device_blocks" in settings:
            assert engine.stats()["num_preemptions"] > 0
        engine.check()


def test_drawn_completions_have_the_form_and_are_the_same_alone_and_beside_others(engine):
    pattern = r"[a-z]+ = -?[0-9]{1,3}"
    params = structured({"regex": pattern}, temperature=1.5, seed=3, n=3, max_tokens=60, presence_penalty=0.5)
    alone = generate(engine, PROMPTS[0], params)[0].outputs
    assert all(re.fullmatch(pattern, c.text) for c in alone) and len({c.text for c in alone}) == 3
    others = [structured(None, temperature=1.0), structured(KINDS[0], temperature=1.0), params]
    beside = generate(engine, [PROMPTS[1], PROMPTS[2], PROMPTS[0]], others)[2].outputs
    assert [c.token_ids for c in beside] == [c.token_ids for c in alone]


def test_log_probabilities_are_of_the_model_and_those_of_the_prompt_come_too(engine):
    params = structured({"choice": ["yes", "no"]}, logprobs=2, prompt_logprobs=1)
    output = generate(engine, PROMPTS[2], params)[0]
    logits_tv = tiny.naive_logits(PROMPTS[2] + output.outputs[0].token_ids)
    total_t = np.log(np.exp(logits_tv).sum(-1))
    for i, (token_id, entry) in enumerate(zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True)):
        at = len(PROMPTS[2]) - 1 + i
        assert next(iter(entry)) == token_id
        assert entry[token_id].logprob == pytest.approx(logits_tv[at, token_id] - total_t[at], abs=1e-4)
    for at, entry in enumerate(output.prompt_logprobs[1:]):
        token_id = PROMPTS[2][at + 1]
        assert entry[token_id].logprob == pytest.approx(logits_tv[at, token_id] - total_t[at], abs=1e-4)


def test_a_step_is_computed_while_the_tokens_before_it_are_on_their_way(engine, monkeypatch):
    events = []

    def noted(name):
        method = getattr(Runner, name)

        def call(self, *arguments):
            events.append(name)
            return method(self, *arguments)

        return call

    generate(engine, PROMPTS[0], structured(KINDS[5], max_tokens=5))  # nothing is left to compile or in flight
    for name in ("launch", "draw", "wait"):
        monkeypatch.setattr(Runner, name, noted(name))
    generate(engine, PROMPTS[0], structured(KINDS[5], max_tokens=5))
    assert events == ["launch", "draw", *["launch", "wait", "draw"] * 4, "wait"]


def test_what_waits_to_be_drawn_for_may_be_aborted_and_its_id_given_again(engine, expected):
    engine.add_request(PROMPTS[0], structured(KINDS[0]), request_id="a")
    engine.add_request(PROMPTS[1], structured(KINDS[1]), request_id="b")
    engine.step()
    assert engine.abort("a").outputs[0].finish_reason == "abort"
    engine.add_request(PROMPTS[3], structured(None), request_id="a")
    outputs = {}
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in engine.step()}
    assert outputs["a"].outputs[0].token_ids == expected[3]
    assert outputs["b"].outputs[0].token_ids == expected[1]


def test_a_failure_between_computing_and_drawing_loses_nothing(engine, expected, monkeypatch):
    draw, calls = Runner.draw, []

    def failing(self, *arguments):
        calls.append(1)
        if len(calls) == 4:
            raise RuntimeError("out of order")
        return draw(self, *arguments)

    monkeypatch.setattr(Runner, "draw", failing)
    engine.add_request(PROMPTS[0], structured(KINDS[0]))
    with pytest.raises(RuntimeError, match="out of order"):
        while engine.has_unfinished_requests():
            engine.step()
    while engine.has_unfinished_requests():
        [output] = engine.step()
    assert output.outputs[0].token_ids == expected[0]


def test_streams_for_asyncio_are_structured_too(engine, expected):
    async def last(prompt, kind):
        return [output async for output in engine.stream_async(prompt, structured(kind))][-1]

    async def all_of_them():
        return await asyncio.gather(*(last(*each) for each in zip(PROMPTS, KINDS, strict=True)))

    assert_expected(asyncio.run(all_of_them()), expected)


def test_a_complete_text_is_followed_by_the_end_of_sequence_alone(engine):
    params = structured({"regex": "a"}, ignore_eos=True, max_tokens=4)
    [completion] = generate(engine, PROMPTS[0], params)[0].outputs
    assert completion.token_ids == [ord("a"), EOS, EOS, EOS]
    assert (completion.text, completion.finish_reason) == ("a", "length")
    [completion] = generate(engine, PROMPTS[0], structured({"regex": "a"}, stop=["a"]))[0].outputs
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("", "stop", "a")


@pytest.mark.parametrize(
    "others", [{"allowed_token_ids": [ord("a"), ord("z")]}, {"bad_words": ["b"]}, {"min_tokens": 3}]
)
def test_where_nothing_is_left_that_goes_on_towards_it_the_completion_ends_with_an_error(engine, others):
    params = structured({"regex": "ab"}, **others)
    bad, good = generate(engine, PROMPTS[:2], [params, greedy(5)])
    assert bad.outputs[0].finish_reason == "error" and "no token may be drawn" in bad.outputs[0].stop_reason
    assert bad.outputs[0].text == ("ab" if "min_tokens" in others else "a")
    assert good.outputs[0].token_ids == tiny.naive_greedy(PROMPTS[1], 5)


def test_what_cannot_be_satisfied_is_refused_before_anything_is_queued(engine):
    for kind in ({"regex": "(?=a)b"}, {"json": {"type": "strin"}}, {"grammar": "start: nobody"}):
        with pytest.raises(ValueError, match=r"structured_outputs: .* cannot be used"):
            generate(engine, PROMPTS[:2], [greedy(3), structured(kind)])
        assert not engine.has_unfinished_requests()


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [(None, "there is no tokenizer"), (BytesTokenizer(), "BytesTokenizer is not made with the tokenizers package")],
)
def test_without_a_tokenizer_whose_tokens_are_known_it_is_refused(tokenizer, message):
    with (
        Engine(tiny.model_directory(), tokenizer=tokenizer, **SETTINGS) as engine,
        pytest.raises(ValueError, match=message),
    ):
        engine.add_request(PROMPTS[0], structured({"regex": "a"}))


def test_a_model_that_knows_no_end_is_refused_in_words(tmp_path):
    tiny.write_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(tiny.HF_CONFIG | {"eos_token_id": None}))
    with (
        Engine(tmp_path, tokenizer=tiny.CharsTokenizer(), **SETTINGS) as engine,
        pytest.raises(ValueError, match=r"but the model has none; give eos_token_id in its config\.json"),
    ):
        engine.add_request(PROMPTS[0], structured({"regex": "a"}))


def test_decodes_without_structure_take_the_fused_step(engine, monkeypatch):
    engine.add_request(PROMPTS[0], greedy(9))
    engine.step()
    monkeypatch.setattr(Runner, "draw", lambda *_: pytest.fail("two calls"))
    while engine.has_unfinished_requests():
        [output] = engine.step()
    assert output.outputs[0].token_ids == tiny.naive_greedy(PROMPTS[0], 9)


def test_the_same_structure_is_compiled_once(monkeypatch):
    calls = []
    compile_new = GrammarCompiler._compile
    monkeypatch.setattr(GrammarCompiler, "_compile", lambda *a: calls.append(1) or compile_new(*a))
    kind = {"json": {"type": "object", "properties": {"once": {"type": "integer"}}}}
    params = StructuredOutputsParams(**kind)
    compiler = GrammarCompiler(TOKENIZER, VOCAB_SIZE, [EOS])
    assert compiler.compile(params) is not compiler.compile(StructuredOutputsParams(**kind))
    assert len(calls) == 1
