"""Text to token ids and back: a model's own tokenizer, or the caller's, and text that grows with the tokens.

`Detokenizer` rests on three facts. A token decoded after a word keeps its leading space, whatever the tokenizer does
to the start of a text. A character has at most four UTF-8 bytes, so at most four tokens. Unfinished bytes
decode to U+FFFD, so only U+FFFD at the end can still change.
"""

import functools
import inspect
import io
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

REPLACEMENT = "\ufffd"
"""What decoders write for bytes that are no UTF-8 character, or not yet."""

_VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")

_GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PRE_SPLITS = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2_SPLIT, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2_SPLIT,),
    "llama-bpe": (_LLAMA3_SPLIT,),
    "smollm": (r"\p{N}", _GPT2_SPLIT),
}
"""`tokenizer.ggml.pre` → regular expressions that cut text, one after another, before byte-level BPE (llama.cpp)."""

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
"""Values of `tokenizer.ggml.token_type`."""


class Tokenizer(Protocol):
    """What a caller's tokenizer must offer; any Hugging Face tokenizer does.

    `decode` may take the keyword `skip_special_tokens`; without it, the tokenizer itself decides whether special
    tokens show. For chats it must have `apply_chat_template` with Hugging Face's signature.
    """

    def encode(self, text: str, /) -> list[int]: ...

    def decode(self, token_ids: list[int], /) -> str: ...


def load_tokenizer(directory: str | Path) -> Tokenizer | None:
    """The tokenizer of a Hugging Face model directory, None where it has no tokenizer files. Local files only.

    It is what transformers makes of the files: whether `encode` adds BOS is up to `tokenizer_config.json`.
    Raises ValueError when there are files that cannot be read.
    """
    directory = Path(directory)
    if not any((directory / name).is_file() for name in _VOCABULARY_FILES):
        return None
    try:
        return _transformers().AutoTokenizer.from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # the readers of the various formats raise whatever they like
        raise ValueError(
            f"the tokenizer files in {directory} cannot be read ({type(error).__name__}: {error}); "
            "repair them or give Engine(..., tokenizer=...)"
        ) from error


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer | None:
    """The tokenizer that the key/value metadata of a GGUF file describe, None where they describe none.

    Raises ValueError for a kind or a pre-tokenizer that is not known.
    """
    kind = metadata.get("tokenizer.ggml.model", "none")
    if kind in ("none", "no_vocab"):
        return None
    if kind == "gpt2":
        backend = _byte_level_backend(metadata)
    elif kind == "llama":
        backend = _sentencepiece_backend(metadata)
    else:
        raise ValueError(
            f"tokenizer.ggml.model={kind!r} is not known (known: 'gpt2', 'llama'); give Engine(..., tokenizer=...)"
        )
    tokens = metadata["tokenizer.ggml.tokens"]
    types = metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    control = [token for token, type_ in zip(tokens, types, strict=True) if type_ == _CONTROL]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    user_defined = [token for token, type_ in zip(tokens, types, strict=True) if type_ == _USER_DEFINED]
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in user_defined])

    special = _special_tokens(metadata, kind)
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special.values()])
    _add_bos_and_eos(backend, metadata, special)
    return GGUFTokenizer(backend, control, special, metadata.get("tokenizer.chat_template"))


class GGUFTokenizer:
    """The tokenizer of a GGUF file: the `tokenizers` package encodes and decodes.

    `hugging_face` is the same as a Hugging Face tokenizer, made when it is first asked for: for chat templates and
    whatever else such a tokenizer can do. Importing transformers is a good part of the time that a start takes.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, control: list[str], special: dict[str, str], chat_template: str | None
    ):
        self.chat_template = chat_template
        self.all_special_ids = [i for i, token in backend.get_added_tokens_decoder().items() if token.special]
        self._backend, self._control, self._special = backend, control, special

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids, with BOS and EOS where the file says so, unless told otherwise."""
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        """The text of token ids."""
        return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> Any:
        """As Hugging Face's: a conversation as text or token ids, by the file's chat template."""
        return self.hugging_face.apply_chat_template(messages, **options)

    @functools.cached_property
    def hugging_face(self) -> Any:
        """This tokenizer as a `transformers.PreTrainedTokenizerFast`."""
        return _transformers().PreTrainedTokenizerFast(
            tokenizer_object=self._backend,
            extra_special_tokens=[token for token in self._control if token not in self._special.values()],
            chat_template=self.chat_template,
            clean_up_tokenization_spaces=False,
            **self._special,
        )


def _byte_level_backend(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in _PRE_SPLITS:
        raise ValueError(
            f"tokenizer.ggml.pre={pre!r} is not known (known: {', '.join(map(repr, _PRE_SPLITS))}); "
            "give the model's tokenizer with Engine(..., tokenizer=...)"
        )
    vocab = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    # Llama 3's vocabulary has words that its merges do not reach.
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    splits = [pre_tokenizers.Split(Regex(split), behavior="isolated") for split in _PRE_SPLITS[pre]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece_backend(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """BPE with byte fallback. A piece's score says how early it is merged, whichever two pieces make it."""
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    types = metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = [
        (-score, token[:cut], token[cut:])
        for token, score, type_ in zip(tokens, scores, types, strict=True)
        if type_ == _NORMAL
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    merges.sort(key=lambda merge: merge[0])
    unknown = tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=[(left, right) for _, left, right in merges],
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = normalizers.Replace(" ", "▁")
    decoder = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        spaces = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
        decoder.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = spaces
    backend.decoder = decoders.Sequence(decoder)
    return backend


def _special_tokens(metadata: Mapping[str, Any], kind: str) -> dict[str, str]:
    """Hugging Face's name of each special token → the token. Sentencepiece-type files may leave out the usual ids."""
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = {"unknown": 0, "bos": 1, "eos": 2} if kind == "llama" else {}
    for name in ("unknown", "bos", "eos", "padding"):
        if f"tokenizer.ggml.{name}_token_id" in metadata:
            ids[name] = metadata[f"tokenizer.ggml.{name}_token_id"]
    hf_names = {"unknown": "unk_token", "bos": "bos_token", "eos": "eos_token", "padding": "pad_token"}
    return {hf_names[name]: tokens[token_id] for name, token_id in ids.items()}


def _add_bos_and_eos(backend: tokenizers.Tokenizer, metadata: Mapping[str, Any], special: dict[str, str]):
    """Makes `encode` put BOS before a text and EOS after it where the file, or llama.cpp's default for it, says so."""
    adds_bos = metadata["tokenizer.ggml.model"] == "llama" or metadata.get("tokenizer.ggml.pre") == "llama-bpe"
    template = ["$A"]
    if metadata.get("tokenizer.ggml.add_bos_token", adds_bos) and "bos_token" in special:
        template.insert(0, special["bos_token"])
    if metadata.get("tokenizer.ggml.add_eos_token", False) and "eos_token" in special:
        template.append(special["eos_token"])
    added = [token for token in template if token != "$A"]
    if added:
        ids = [(token, backend.token_to_id(token)) for token in dict.fromkeys(added)]
        backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=ids)


def _transformers() -> Any:
    """The transformers package, imported without its advice to install PyTorch: only its tokenizers are used."""

    def is_wanted(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("PyTorch was not found")

    logger = logging.getLogger("transformers")
    logger.addFilter(is_wanted)
    try:
        import transformers
    finally:
        logger.removeFilter(is_wanted)
    return transformers


def encode(tokenizer: Tokenizer, text: str, **options: bool) -> list[int]:
    """Token ids of a text, with the BOS token in front if the tokenizer adds one. ValueError for text it refuses."""
    name = f"{type(tokenizer).__name__}.encode"
    try:
        token_ids = tokenizer.encode(text, **options)
    except Exception as error:  # a lone surrogate, for one: each tokenizer has an exception of its own
        raise ValueError(f"{name} cannot take the text {text[:40]!r}: {error}") from error
    return _token_ids(token_ids, name)


def spellings(tokenizer: Tokenizer, word: str) -> list[tuple[int, ...]]:
    """The token ids of a word at the beginning of a text and after a space, without special tokens."""
    options = {}
    if "add_special_tokens" in inspect.signature(tokenizer.encode).parameters:
        options["add_special_tokens"] = False
    texts = word.lstrip(), f" {word.lstrip()}"
    return list(dict.fromkeys(tuple(encode(tokenizer, text, **options)) for text in texts))


def encode_chat(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
) -> list[int]:
    """Token ids of a conversation, written out by the tokenizer's chat template, which alone decides about BOS.

    Each message has a "role" and a "content", both strings. Raises ValueError for messages of another form, for
    those that the template refuses, and where there is no template.
    """
    apply_chat_template = getattr(tokenizer, "apply_chat_template", None)
    if apply_chat_template is None or getattr(tokenizer, "chat_template", "the tokenizer's own affair") is None:
        raise ValueError(
            f"{type(tokenizer).__name__} has no chat template: this model was not made for chats, or its template "
            "is missing; write the conversation out as one prompt, or give Engine(..., tokenizer=...) with a template"
        )
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise ValueError(f"messages={messages!r} must be a list of one or more messages")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ValueError(f'message {index} is {message!r}; give {{"role": ..., "content": ...}}')
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise ValueError(f"message {index} has {key}={message.get(key)!r}; give a string")
    from jinja2 import TemplateError

    try:
        result = apply_chat_template(list(messages), add_generation_prompt=add_generation_prompt, tokenize=True)
    except TemplateError as error:
        raise ValueError(f"the model's chat template refuses these messages: {error}") from error
    if isinstance(result, Mapping):
        result = result["input_ids"]
    return _token_ids(result, f"{type(tokenizer).__name__}.apply_chat_template")


def _token_ids(result: Any, source: str) -> list[int]:
    try:
        return [int(token_id) for token_id in result]
    except (TypeError, ValueError):
        raise ValueError(f"{source} returned {type(result).__name__}; it must return a list of token ids") from None


def backend_of(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    """What encodes and decodes behind a tokenizer. ValueError for one that is not made with the tokenizers package."""
    name = "_backend" if isinstance(tokenizer, GGUFTokenizer) else "backend_tokenizer"
    backend = getattr(tokenizer, name, tokenizer)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ValueError(
            f"{type(tokenizer).__name__} is not made with the tokenizers package; its tokens are not known"
        )
    return backend


def decode_token(tokenizer: Tokenizer, token_id: int) -> str:
    """The text of one token on its own: special tokens show, part of a character is U+FFFD."""
    return _decoder(tokenizer, skip_special_tokens=False)([token_id])


def _decoder(tokenizer: Tokenizer, skip_special_tokens: bool) -> Callable[[list[int]], str]:
    """`tokenizer.decode` with the keywords that this tokenizer takes."""
    decode: Callable[..., str] = tokenizer.decode
    if hasattr(tokenizer, "clean_up_tokenization_spaces"):  # Hugging Face: it would take back spaces already shown
        return partial(decode, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
    if "skip_special_tokens" in inspect.signature(decode).parameters:
        return partial(decode, skip_special_tokens=skip_special_tokens)
    return decode


class Detokenizer:
    """The text of one request, kept up to date token by token.

    Text only ever grows, does not depend on how the ids were divided among calls, and never ends in U+FFFD, which
    may be half a character: such an end shows once text follows it, and is dropped if none does. For a byte-level
    tokenizer, the finished text is `decode(token_ids).rstrip("\\ufffd")`, cut at the first stop string.
    Each token costs two decodes of a few tokens, however long the text is.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        min_tokens: int = 0,
    ):
        special_ids = frozenset(getattr(tokenizer, "all_special_ids", ()))
        self._tokenizer = tokenizer
        self._decode = _decoder(tokenizer, skip_special_tokens)
        self._invisible_ids = special_ids if skip_special_tokens else frozenset()
        self._joined_ids = frozenset() if spaces_between_special_tokens else special_ids - self._invisible_ids
        self._last_id = prompt_token_ids[-1] if len(prompt_token_ids) else None
        self._num_tokens, self._min_tokens = 0, min_tokens
        self._stop = tuple(stop)
        self._include_stop_str = include_stop_str_in_output
        self._num_before_match = max(map(len, self._stop), default=1) - 1
        self._matched: str | None = None

        self._context, self._context_text = self._last_word(prompt_token_ids)
        self._pending: list[int] = []  # tokens after those whose text is settled
        self._text = io.StringIO()  # settled text, then that of the pending tokens
        self._num_settled = 0
        self._num_visible = 0  # characters of _text up to the last that is not U+FFFD

    def append(self, token_ids: Sequence[int], *, ended_by_token: bool = False) -> str | None:
        """Takes newly generated ids; returns the stop string that completed, if one did, else None.

        The first `min_tokens` ids complete none. Ids after the one that completes a stop string have no text. A special
        token that is a stop string completes it, be it visible or not. `ended_by_token`: the last id is the token
        that ended the request; it shows only with `include_stop_str_in_output`, and completes no stop string.
        """
        for token_id in token_ids[:-1] if ended_by_token else token_ids:
            if self._matched is None:
                num_visible = self._num_visible
                self._add(token_id)
                self._num_tokens += 1
                if self._stop and self._num_tokens > self._min_tokens:
                    self._matched = self._find_stop(num_visible, token_id)
        if ended_by_token and self._include_stop_str and self._matched is None:
            self._add(token_ids[-1])
        return self._matched

    def text(self, finished: bool, start: int = 0) -> str:
        """The visible text from character `start` on.

        Until finished it lacks the characters that may turn out to begin a stop string.
        """
        num_held_back = 0 if finished or self._matched or self._include_stop_str else self._num_before_match
        self._text.seek(start)
        return self._text.read(max(0, self._num_visible - num_held_back - start))

    def _last_word(self, prompt_token_ids: Sequence[int]) -> tuple[list[int], str]:
        """Tokens near the prompt's end with whole characters, and their text; nothing where there are none.

        Such tokens before generated ones make the tokenizer keep their leading space, and do not mix with them
        as half a character would. One token will do, unless every character there is in pieces.
        """
        last = list(prompt_token_ids[-16:])
        for token_ids in [*([token_id] for token_id in reversed(last)), *(last[i:] for i in range(len(last)))]:
            text = self._decode(token_ids)
            if text and REPLACEMENT not in text:
                return token_ids, text
        return [], ""

    def _pending_text(self, token_ids: list[int]) -> str:
        return self._decode(self._context + token_ids)[len(self._context_text) :]

    def _add(self, token_id: int):
        if token_id in self._invisible_ids:
            return
        follows_special, self._last_id = self._last_id in self._joined_ids, token_id
        self._pending.append(token_id)
        text = self._pending_text(self._pending)
        if follows_special and token_id in self._joined_ids and len(self._pending) == 1:
            text = self._decode(self._pending)
        if text and not text.endswith(REPLACEMENT):
            self._write(text)
            self._settle(len(text))
            if len(self._pending) == 1 or not self._context:
                # Tokens that share a character are bad context: byte-fallback decoders read a run of bytes as one.
                self._context, self._context_text = self._pending, self._decode(self._pending)
            self._pending = []
            return
        if len(self._pending) >= 4:
            text = self._settle_garbage(text)
        self._write(text)

    def _settle_garbage(self, text: str) -> str:
        """Settles pending tokens that share no character with those after them; returns the text of the others.

        Four tokens hold a whole character if they hold any, so there is nothing to wait for in the first. Where two
        parts share a character, their texts together have more characters than the text of both.
        """
        for cut in range(1, len(self._pending)):
            head, tail = self._pending_text(self._pending[:cut]), self._pending_text(self._pending[cut:])
            if head + tail == text:
                self._write(head)
                self._settle(len(head))
                self._pending = self._pending[cut:]
                return tail
        return text

    def _write(self, text: str):
        """Replaces all after the settled text."""
        self._text.seek(self._num_settled)
        self._text.truncate()
        self._text.write(text)
        num_whole = len(text.rstrip(REPLACEMENT))
        if num_whole:
            self._num_visible = self._num_settled + num_whole

    def _settle(self, num_characters: int):
        self._num_settled += num_characters

    def _find_stop(self, num_visible_before: int, last_id: int) -> str | None:
        """The stop string that completes first in the text that became visible; the text is cut there."""
        if last_id in self._invisible_ids:
            text = decode_token(self._tokenizer, last_id)
            return text if text in self._stop else None
        if self._num_visible == num_visible_before:
            return None
        start = max(0, num_visible_before - self._num_before_match)
        self._text.seek(start)
        text, num_old = self._text.read(self._num_visible - start), num_visible_before - start
        found = [(text.find(stop, max(0, num_old - len(stop) + 1)), stop) for stop in self._stop]
        ends = [(at + len(stop), stop) for at, stop in found if at >= 0]
        if not ends:
            return None
        end, stop = min(ends, key=lambda match: match[0])
        self._num_visible = start + end - (0 if self._include_stop_str else len(stop))
        return stop
