"""What comes back, on a model whose tokens spell what a test says: text, ends, deltas, order, what can be stored."""

import ast
import functools
import json
from dataclasses import asdict, fields
from pathlib import Path

import pytest

import tiny
from jaxpaged import CompletionOutput, Engine, Logprob, RequestOutput, RequestOutputKind, SamplingParams
from jaxpaged.outputs import RequestMetrics
from test_engine import generate, greedy, prompt_of

DELTA = RequestOutputKind.DELTA


class Script:
    """A tokenizer whose `pieces` are what the tokens stand for; other tokens are single bytes."""

    def __init__(self):
        self.pieces, self.all_special_ids = {}, []

    def encode(self, text):
        return list(text.encode())

    def decode(self, token_ids, skip_special_tokens=True):
        shown = [i for i in token_ids if not (skip_special_tokens and i in self.all_special_ids)]
        return b"".join(self.pieces.get(i, bytes([i])) for i in shown).decode(errors="replace")


@functools.cache
def distinct_tokens():
    """A prompt and its greedy continuation by 12 tokens, no two alike."""
    for seed in range(900, 1000):
        prompt = prompt_of(9, seed=seed)
        tokens = tiny.naive_greedy(prompt, 12)
        if len({*tokens, 2}) == 13:
            return prompt, tokens
    raise AssertionError("the small model repeats itself after every prompt")


SCRIPT = Script()


@pytest.fixture(scope="module", params=[1, 8], ids=lambda k: f"{k} decode steps a call")
def engine(request):
    settings = {"max_num_seqs": 4, "num_device_blocks": 64, "max_model_len": 64, "max_num_batched_tokens": 64}
    with Engine(tiny.model_directory(), tokenizer=SCRIPT, num_decode_steps=request.param, **settings) as engine:
        yield engine


@pytest.fixture(autouse=True)
def clean(engine):
    SCRIPT.pieces, SCRIPT.all_special_ids = {}, []
    yield
    engine.check()
    assert not engine.has_unfinished_requests() and engine.stats()["blocks_used"] == 0


def spell(*pieces):
    """Has the greedy continuation of the prompt that is returned spell these pieces."""
    prompt, tokens = distinct_tokens()
    as_bytes = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]
    SCRIPT.pieces = dict(zip(tokens, as_bytes, strict=False))
    return prompt, tokens


def completion_of(engine, prompt, **params):
    return generate(engine, prompt, greedy(**{"max_tokens": 8} | params))[0].outputs[0]


def streamed(engine, prompt, **params):
    """The parts of the text, as told by deltas."""
    deltas = list(engine.stream(prompt, greedy(**{"max_tokens": 8, "output_kind": DELTA} | params)))
    return [delta.outputs[0].text for delta in deltas]


# ---- ends


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "ab\n")])
def test_a_newline_as_stop_string_ends_the_text_inside_a_token_of_two(engine, include, text):
    prompt, tokens = spell("a", "b", "\n\n", "c", "\n")
    options = {"stop": "\n", "include_stop_str_in_output": include}
    completion = completion_of(engine, prompt, **options)
    assert (completion.text, completion.token_ids) == (text, tokens[:3])
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "\n")
    assert "".join(streamed(engine, prompt, **options)) == text


@pytest.mark.parametrize(("include", "text"), [(False, "one tw"), (True, "one two thr")])
def test_a_stop_string_over_three_tokens_ends_the_text(engine, include, text):
    prompt, tokens = spell("one t", "wo", " t", "hree", " four", "o thr")
    options = {"stop": ["o thr", "never"], "include_stop_str_in_output": include}
    completion = completion_of(engine, prompt, **options)
    assert (completion.text, completion.token_ids) == (text, tokens[:4])
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "o thr")
    parts = streamed(engine, prompt, **options)
    assert "".join(parts) == text


def test_an_end_without_a_token_is_told_by_a_delta_with_the_text_held_back(engine):
    options = {"allowed_token_ids": [ord("a")], "bad_words": ["aaa"], "stop": "never"}
    completion = completion_of(engine, [5, 6, 7], **options)
    assert (completion.text, completion.finish_reason) == ("aa", "error")
    outputs = list(engine.stream([5, 6, 7], greedy(8, output_kind=DELTA, **options)))
    [last] = outputs[-1].outputs
    assert outputs[-1].finished and (last.finish_reason, last.stop_reason) == ("error", completion.stop_reason)
    assert "".join(output.outputs[0].text for output in outputs) == "aa"


def test_a_stop_string_that_begins_twice_ends_the_text_once(engine):
    prompt, tokens = spell("ab", "ab", "ab", "c", "abc")
    completion = completion_of(engine, prompt, stop="abc")
    assert (completion.text, completion.token_ids) == ("abab", tokens[:4])
    assert "".join(streamed(engine, prompt, stop="abc")) == "abab"


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("include", [True, False])
def test_a_special_token_is_a_stop_string_like_any_other(engine, skip, include):
    prompt, tokens = spell("a", "b", "<end>", "c")
    SCRIPT.all_special_ids = [tokens[2]]
    options = {"stop": "<end>", "skip_special_tokens": skip, "include_stop_str_in_output": include}
    completion = completion_of(engine, prompt, **options)
    assert completion.text == ("ab<end>" if include and not skip else "ab")
    assert (completion.token_ids, completion.stop_reason) == (tokens[:3], "<end>")


@pytest.mark.parametrize("include", [True, False])
def test_token_ids_keep_the_stop_token_and_text_on_demand_only(engine, include):
    prompt, tokens = spell("a", "b", "c", "d")
    completion = completion_of(engine, prompt, stop_token_ids=[tokens[2]], include_stop_str_in_output=include)
    assert (completion.text, completion.token_ids) == ("abc" if include else "ab", tokens[:3])
    assert (completion.finish_reason, completion.stop_reason) == ("stop", tokens[2])


def test_a_stop_string_before_a_stop_token_of_the_same_call_counts(engine):
    prompt, tokens = spell("a", "b", "c", "d", "e")
    completion = completion_of(engine, prompt, stop="b", stop_token_ids=[tokens[4]], logprobs=0)
    assert (completion.text, completion.token_ids, completion.stop_reason) == ("a", tokens[:2], "b")
    assert len(completion.logprobs) == 2


# ---- text


@pytest.mark.parametrize("text", ["我想在", "a😀é한", "👨‍👩‍👧"])
def test_characters_whose_bytes_span_tokens_are_whole_or_not_there(engine, text):
    data = text.encode()[:12]
    prompt, _ = spell(*(data[i : i + 1] for i in range(len(data))))
    for max_tokens in range(1, len(data) + 1):
        completion = completion_of(engine, prompt, max_tokens=max_tokens)
        assert completion.text == data[:max_tokens].decode(errors="ignore")
        assert SCRIPT.decode(completion.token_ids).rstrip("\ufffd") == completion.text
        parts = streamed(engine, prompt, max_tokens=max_tokens)
        assert "".join(parts) == completion.text


def test_a_prompt_that_ends_inside_a_character_does_not_leak_into_the_output(engine):
    prompt, tokens = spell("b", "c")
    half = "我".encode()[:2]
    SCRIPT.pieces |= {prompt[-1]: half}
    assert completion_of(engine, prompt, max_tokens=2).text == "bc"
    SCRIPT.pieces[tokens[0]] = "我".encode()[2:]
    assert completion_of(engine, prompt, max_tokens=2).text in ("c", "\ufffdc")


def test_without_detokenizing_there_is_no_text_at_all(engine):
    prompt, tokens = spell("a", "b")
    completion = completion_of(engine, prompt, detokenize=False, logprobs=2, max_tokens=4)
    assert (completion.text, completion.token_ids) == ("", tokens[:4])
    assert {p.decoded_token for entry in completion.logprobs for p in entry.values()} == {None}


# ---- several prompts, several completions


def test_a_prompt_too_long_costs_no_other(engine):
    first, wrong, last = generate(engine, ["short", "long " * 20, "short"], greedy(4))
    assert "100 tokens" in wrong.error and (wrong.prompt, wrong.outputs) == ("long " * 20, [])
    assert first.error is last.error is None
    assert first.outputs[0].token_ids == last.outputs[0].token_ids == tiny.naive_greedy(list(b"short"), 4)


MANY = {"n": 4, "temperature": 1.5, "seed": 5, "max_tokens": 20, "stop_token_ids": list(range(3, 250, 12))}


def test_completions_come_in_the_order_of_their_index(engine):
    output = generate(engine, [5, 6, 7], SamplingParams(**MANY))[0]
    assert [c.index for c in output.outputs] == [0, 1, 2, 3]
    assert len({tuple(c.token_ids) for c in output.outputs}) == 4
    assert len({len(c.token_ids) for c in output.outputs}) > 1, "they end at different times"


def test_each_completions_deltas_add_up_and_its_end_is_told_once(engine):
    final = generate(engine, [5, 6, 7], SamplingParams(**MANY))[0]
    deltas = [
        d for output in engine.stream([5, 6, 7], SamplingParams(**MANY, output_kind=DELTA)) for d in output.outputs
    ]
    for completion in final.outputs:
        own = [delta for delta in deltas if delta.index == completion.index]
        assert "".join(d.text for d in own) == completion.text
        assert [t for d in own for t in d.token_ids] == completion.token_ids
        assert [d.finish_reason for d in own if d.finished()] == [completion.finish_reason] and own[-1].finished()


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_an_id_can_be_added_aborted_and_added_again_in_one_step(engine, num_steps):
    """While steps of the first request of that id are in flight, with children of the same ids."""
    several = SamplingParams(**MANY)
    expected = generate(engine, [8, 9], several)[0]
    engine.add_request([5, 6, 7], several, request_id="id")
    for _ in range(num_steps):
        engine.step()
    engine.abort("id")
    engine.add_request([6, 7], greedy(3), request_id="id")
    engine.abort("id")
    engine.add_request([8, 9], several, request_id="id")
    while engine.has_unfinished_requests():
        outputs = engine.step()
        assert {output.request_id for output in outputs} <= {"id"}
    assert [c.token_ids for c in outputs[-1].outputs] == [c.token_ids for c in expected.outputs]


# ---- what the outputs hold


def test_an_output_can_be_stored_as_json(engine):
    [output] = generate(engine, "abc", greedy(3, logprobs=2))
    assert output.prompt_logprobs is None
    stored = json.loads(json.dumps(asdict(output)))
    assert stored["outputs"][0]["token_ids"] == output.outputs[0].token_ids
    assert [list(entry) for entry in stored["outputs"][0]["logprobs"]] == [
        [str(token_id) for token_id in entry] for entry in output.outputs[0].logprobs
    ]


@pytest.mark.parametrize("output_class", [RequestOutput, CompletionOutput, Logprob, RequestMetrics])
def test_every_field_of_the_outputs_is_looked_at_by_a_test(output_class):
    tests = Path(__file__).parent.glob("test_*.py")
    trees = [ast.parse(test.read_text(encoding="utf-8")) for test in tests]
    read = {node.attr for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert [f.name for f in fields(output_class) if f.name not in read] == []
