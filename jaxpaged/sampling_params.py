"""What a user asks of one request: how tokens are drawn, when they end, what is returned."""

import json
import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

_SEED_MIN, _SEED_MAX = -(2**63), 2**64 - 1


class RequestOutputKind(Enum):
    """What each output of a step holds: all so far, only what is new, or nothing until the request is finished."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """What the whole text must be, with vLLM's names: exactly one of these. Checked when made (ValueError)."""

    json: str | Mapping[str, Any] | None = None
    """JSON of this schema, which is given as text or as what `json.loads` makes of it. Kept as text."""
    json_object: bool | None = None
    """True: any JSON object."""
    regex: str | None = None
    """Text that this regular expression matches from its start to its end; without look-around."""
    choice: Sequence[str] | None = None
    """One of these strings. Kept as a tuple."""
    grammar: str | None = None
    """A sentence of this grammar, in Lark's form or in GBNF (llama.cpp's)."""

    def __post_init__(self):
        given = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}
        if len(given) != 1:
            names = ", ".join(f.name for f in fields(self))
            raise ValueError(f"structured_outputs need exactly one of {names}, not {sorted(given) or 'none'}")
        [(name, value)] = given.items()
        if name == "choice":
            is_right = not isinstance(value, str) and isinstance(value, Sequence) and value
            if not is_right or not all(isinstance(item, str) and item for item in value):
                raise ValueError(f"choice={value!r} must be a list of one or more strings, none of them empty")
            object.__setattr__(self, "choice", tuple(value))
        elif name == "json_object":
            if value is not True:
                raise ValueError(f"json_object={value!r} must be True, or be left out")
        elif name == "json" and isinstance(value, Mapping):
            object.__setattr__(self, "json", _json_text(value))
        elif not isinstance(value, str) or not value.strip():
            raise ValueError(f"{name}={value!r} must be a text that is not empty")
        elif name == "json":
            _check_json(value)

    def __str__(self) -> str:
        [(name, value)] = [(f.name, v) for f in fields(self) if (v := getattr(self, f.name)) is not None]
        return f"{name}={value!r}"


def _unsupported(default: Any = None):
    return field(default=default, metadata={"unsupported": True})


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of a request, with vLLM's names and defaults. Checked when made (ValueError).

    Before a draw, logits are changed in this order: tokens that are not in `allowed_token_ids`, those that would
    complete one of `bad_words`, and stop tokens before `min_tokens` get a logit of −inf; `logit_bias` is added; the
    repetition, frequency and presence penalties are applied; then come temperature, min_p, top_k and top_p. Where
    that leaves no token, the completion ends with finish_reason "error".

    Differences from vLLM, on purpose: a temperature between 0 and 0.01 is used as given instead of being raised
    to 0.01; bad words are refused as spelled with and without a space before them, however many tokens either takes;
    repetition_penalty and logit_bias have bounds beyond which float32 would overflow; a stop string that is a special
    token ends the text also where special tokens are left out of it, instead of never; a parameter that is not
    supported yet is refused instead of ignored.
    """

    n: int = 1
    """Number of completions; each has its own random stream. More than 1 needs temperature > 0."""
    temperature: float = 1.0
    """0 takes the most probable token; in [0, 2]."""
    top_p: float = 1.0
    """Keep the most probable tokens whose probabilities first reach top_p; in (0, 1]."""
    top_k: int = 0
    """Keep the k most probable tokens and those tied with the k-th; 0 or -1 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least min_p times as probable as the most probable one; in [0, 1]."""
    seed: int | None = None
    """Makes the request repeatable. None (or -1) draws one from the engine's seed."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that the output has already; in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit as often as the output has it; in [-2, 2]."""
    repetition_penalty: float = 1.0
    """Divides the logits, where negative multiplies those, of tokens that prompt or output have (arXiv:1909.05858);
    in [0.001, 1000]."""
    logit_bias: dict[int, float] | tuple[tuple[int, float], ...] | None = None
    """Token id → number added to its logit; in [-1000000, 1000000]. Kept as a tuple of pairs."""
    allowed_token_ids: list[int] | tuple[int, ...] | None = None
    """The only tokens that may be drawn. Kept as a tuple."""
    bad_words: list[str] | tuple[str, ...] | None = None
    """Texts that the output does not have: the last token of their spelling is not drawn after the others. Kept as a
    tuple."""
    stop: str | list[str] | tuple[str, ...] | None = None
    """Strings that end the text at the token that completes them; `text` ends before. Kept as a tuple."""
    stop_token_ids: list[int] | tuple[int, ...] | None = None
    """Token ids that end the request; kept in token_ids, not in text. Kept as a tuple."""
    include_stop_str_in_output: bool = False
    """Whether text keeps the stop string that ended it (or the text of the token that did)."""
    ignore_eos: bool = False
    """Go on after the model's end-of-sequence tokens."""
    max_tokens: int | None = 16
    """Most tokens to generate; None: up to max_model_len."""
    min_tokens: int = 0
    """So many tokens are generated before one that ends the request may be drawn, or a stop string is looked for."""
    logprobs: int | None = None
    """Return this many log-probabilities a token and the sampled token's own; 0: the sampled token's only, -1: those
    of the whole vocabulary."""
    prompt_logprobs: int | None = None
    """The same for each token of the prompt but the first, which nothing comes before."""
    structured_outputs: StructuredOutputsParams | dict[str, Any] | None = None
    """What the whole text must be: a JSON schema, a regular expression, a choice, a grammar. Tokens that do not go on
    towards it are not drawn; a complete text is followed by the end of sequence alone."""
    detokenize: bool = True
    """False leaves text empty."""
    skip_special_tokens: bool = True
    """Leave special tokens out of text."""
    spaces_between_special_tokens: bool = True
    """False: no space between special tokens that follow each other, where they show and the tokenizer puts one."""
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    """What the outputs of `Engine.step` hold."""

    flat_logprobs: bool = _unsupported(False)
    logprob_token_ids: list[int] | None = _unsupported()
    prompt_logprob_token_ids: Any = _unsupported()
    prompt_logprob_start: int | None = _unsupported()
    stream_interval: int | None = _unsupported()
    extra_args: dict[str, Any] | None = _unsupported()
    skip_reading_prefix_cache: bool | None = _unsupported()
    thinking_token_budget: int | None = _unsupported()
    repetition_detection: Any = _unsupported()
    routed_experts_prompt_start: int | None = _unsupported()
    trace_decode_token_ids: Any = _unsupported()
    watermarking: Any = _unsupported()

    def __post_init__(self):
        for f in fields(self):
            if f.metadata.get("unsupported"):
                value = getattr(self, f.name)
                if value is not f.default and not (type(value) in (int, float) and value == f.default):
                    raise ValueError(f"{f.name}={value!r} is not supported yet; leave it at its default, {f.default!r}")
        self._normalise()
        self._check_numbers()
        self._check_flags()
        self._check_stop()
        self._check_tokens()
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            raise ValueError(
                f"structured_outputs={self.structured_outputs!r} must be StructuredOutputsParams, or a dictionary of "
                f"one of {', '.join(f.name for f in fields(StructuredOutputsParams))}"
            )
        if self.n > 1 and self.temperature == 0:
            raise ValueError(f"n must be 1 when sampling greedily (temperature=0), got n={self.n}; all would be equal")

    def _normalise(self):
        def put(name, value):
            object.__setattr__(self, name, value)

        if self.seed == -1:
            put("seed", None)
        if self.top_k == -1:
            put("top_k", 0)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is True:
                put(name, 1)
        if isinstance(self.stop, str):
            put("stop", (self.stop,))
        for name in ("stop", "stop_token_ids", "bad_words", "logit_bias"):
            if getattr(self, name) is None:
                put(name, ())
        if isinstance(self.logit_bias, Mapping):
            put("logit_bias", tuple(self.logit_bias.items()))
        if isinstance(self.structured_outputs, Mapping):
            put("structured_outputs", _structured(self.structured_outputs))
        for name in ("stop", "stop_token_ids", "bad_words", "allowed_token_ids"):
            if isinstance(getattr(self, name), (list, tuple, set, frozenset)):
                put(name, tuple(getattr(self, name)))

    def _check_numbers(self):
        _whole("n", self.n, 1, 16384)
        _real("temperature", self.temperature, 0, 2)
        _real("top_p", self.top_p, 0, 1, excludes_least=True)
        _whole("top_k", self.top_k, 0, 2**31 - 1, "; 0 or -1 turns it off")
        _real("min_p", self.min_p, 0, 1)
        if self.seed is not None:
            _whole("seed", self.seed, _SEED_MIN, _SEED_MAX)
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, 1, 2**31 - 1, "; None: up to max_model_len")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), -1, 2**31 - 1, "; -1: the whole vocabulary")
        _real("presence_penalty", self.presence_penalty, -2, 2)
        _real("frequency_penalty", self.frequency_penalty, -2, 2)
        _real("repetition_penalty", self.repetition_penalty, 0.001, 1000)
        _whole("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} must be at most max_tokens={self.max_tokens}")

    def _check_flags(self):
        flags = ("include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens")
        for name in (*flags, "spaces_between_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} must be True or False")
        if not isinstance(self.output_kind, RequestOutputKind):
            raise ValueError(
                f"output_kind={self.output_kind!r} must be one of {', '.join(map(str, RequestOutputKind))}"
            )

    def _check_stop(self):
        if not isinstance(self.stop, tuple) or not all(isinstance(s, str) for s in self.stop):
            raise ValueError(f"stop={self.stop!r} must be a string or a list of strings")
        if "" in self.stop:
            raise ValueError(
                f"stop={list(self.stop)!r} cannot contain an empty string: it would end every request at once"
            )
        if self.stop and not self.detokenize:
            raise ValueError(f"stop={list(self.stop)!r} needs detokenize=True: stop strings are searched in text")
        if not isinstance(self.stop_token_ids, tuple):
            raise ValueError(f"stop_token_ids={self.stop_token_ids!r} must be a list of token ids")
        for token_id in self.stop_token_ids:
            _whole("stop_token_ids", token_id, 0, 2**31 - 1)
        object.__setattr__(self, "stop_token_ids", tuple(dict.fromkeys(self.stop_token_ids)))

    def _check_tokens(self):
        """Which tokens are favoured or forbidden."""
        words, allowed, pairs = self.bad_words, self.allowed_token_ids, self.logit_bias
        if not isinstance(words, tuple) or not all(isinstance(word, str) for word in words):
            raise ValueError(f"bad_words={words!r} must be a list of strings")
        if not all(word.strip() for word in words):
            raise ValueError(f"bad_words={list(words)!r} cannot contain an empty string, or one of spaces only")
        if allowed is not None:
            if not isinstance(allowed, tuple):
                raise ValueError(f"allowed_token_ids={allowed!r} must be a list of token ids")
            if not allowed:
                raise ValueError("allowed_token_ids=[] allows no token; give one or more, or None for all")
            for token_id in allowed:
                _whole("allowed_token_ids", token_id, 0, 2**31 - 1)
        if not isinstance(pairs, tuple) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
            raise ValueError(f"logit_bias={pairs!r} must be a dictionary from token ids to numbers")
        token_id_to_bias = {}
        for token_id, bias in pairs:
            if isinstance(token_id, str) and token_id.isdecimal():  # as JSON has it
                token_id = int(token_id)
            _whole("logit_bias", token_id, 0, 2**31 - 1)
            _real(f"logit_bias of token {token_id}", bias, -1e6, 1e6)
            token_id_to_bias[token_id] = float(bias)
        object.__setattr__(self, "logit_bias", tuple(token_id_to_bias.items()))


def _structured(given: Mapping[str, Any]) -> StructuredOutputsParams:
    names = [f.name for f in fields(StructuredOutputsParams)]
    if unknown := [name for name in given if name not in names]:
        raise ValueError(f"structured_outputs has {unknown}, but there are {', '.join(names)}")
    return StructuredOutputsParams(**given)


def _check_json(text: str):
    try:
        json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"json={text!r} is no JSON: {error}") from error


def _json_text(schema: Mapping[str, Any]) -> str:
    try:
        return json.dumps(schema)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"json={reprlib.repr(schema)} cannot be written as JSON: {error}") from error


def _whole(name: str, value: Any, least: int, most: int, hint: str = ""):
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name}={value!r} must be a whole number, not {type(value).__name__}{hint}")
    if not least <= value <= most:
        raise ValueError(f"{name}={value} must be in [{least}, {most}]{hint}")


def _real(name: str, value: Any, least: float, most: float, *, excludes_least: bool = False):
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name}={value!r} must be a number, not {type(value).__name__}")
    if math.isnan(value) or not least <= value <= most or (excludes_least and value == least):
        raise ValueError(f"{name}={value} must be in {'(' if excludes_least else '['}{least}, {most}]")
