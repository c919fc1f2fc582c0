"""Structured output on the host: which tokens may come next for the text to be what was asked for.

A request's grammar is compiled when the request is added, by llguidance: a parser over the bytes of tokens, so that a
token may end one part of the text and begin the next. Masks are packed: bit i of a row of int32 words stands for token
i, least significant bits first.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import llguidance
import numpy as np
from llguidance.numpy import fill_next_token_bitmask_par

from jaxpaged.tokenizer import Tokenizer, backend_of


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """What the whole text must be, with vLLM's names: exactly one of these. Checked when made (ValueError)."""

    json: str | Mapping[str, Any] | None = None
    """JSON of this schema, which is given as text or as what `json.loads` makes of it."""
    json_object: bool | None = None
    """True: any JSON object."""
    regex: str | None = None
    """Text that this regular expression matches from its start to its end; without look-around."""
    choice: Sequence[str] | None = None
    """One of these strings."""
    grammar: str | None = None
    """A sentence of this grammar, in Lark's form or in GBNF (llama.cpp's)."""

    def __post_init__(self):
        given = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}
        if len(given) != 1:
            names = ", ".join(f.name for f in fields(self))
            raise ValueError(f"structured outputs need exactly one of {names}, not {sorted(given) or 'none'}")
        [(name, value)] = given.items()
        if name == "choice":
            is_right = not isinstance(value, str) and len(value) and all(isinstance(item, str) for item in value)
            if not is_right or "" in value:
                raise ValueError(f"choice={value!r} must be a list of one or more strings, none of them empty")
        elif name == "json_object":
            if value is not True:
                raise ValueError(f"json_object={value!r} must be True, or be left out")
        elif name == "json" and isinstance(value, Mapping):
            pass
        elif not isinstance(value, str) or not value.strip():
            raise ValueError(f"{name}={value!r} must be a text that is not empty")


class Grammar:
    """Where one request stands in its text. Made by `GrammarCompiler.compile`."""

    def __init__(self, matcher: llguidance.LLMatcher):
        self._matcher = matcher

    @property
    def is_complete(self) -> bool:
        """Whether nothing but end of sequence may follow."""
        return self._matcher.is_stopped()

    def accept(self, token_id: int):
        """Takes the token drawn. RuntimeError for one that the mask did not allow."""
        if not self._matcher.consume_token(token_id):
            raise RuntimeError(
                f"token {token_id} was drawn, but the grammar forbids it: {self._matcher.get_error().splitlines()[0]}"
            )

    def fork(self) -> "Grammar":
        """One that goes on from here by itself."""
        return Grammar(self._matcher.deep_copy())


class GrammarCompiler:
    """Compiles grammars for one model, and fills the masks of its requests.

    `vocab_size`: of the model, which may be larger than the tokenizer's; ids beyond it are never allowed.
    Raises ValueError for a tokenizer whose tokens cannot be told byte by byte.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Iterable[int]):
        self.num_words = -(-vocab_size // 32)
        self._executor = llguidance.LLExecutor()
        try:
            self._tokenizer = llguidance.LLTokenizer(
                backend_of(tokenizer).to_str(), n_vocab=vocab_size, eos_token=sorted(eos_token_ids)
            )
        except Exception as error:  # the library raises whatever it likes
            raise ValueError(f"structured outputs do not work with this tokenizer: {error}") from error

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """A request's grammar at its start. ValueError for one that is malformed or that no text satisfies."""
        try:
            definition = _definition(params)
            message = llguidance.LLMatcher.validate_grammar(definition, self._tokenizer)
            if message and not message.startswith("WARNING"):
                raise ValueError(message.strip())
            matcher = llguidance.LLMatcher(self._tokenizer, definition, log_level=0)
            if matcher.is_error():
                raise ValueError(matcher.get_error().strip())
            grammar = Grammar(matcher)
            if not matcher.is_accepting() and not self._may_begin(grammar.fork()):
                raise ValueError("no text satisfies it")
        except ValueError as error:
            raise ValueError(f"{_shown(params)} cannot be used: {error}") from error
        return grammar

    def fill(self, row_and_grammar: Sequence[tuple[int, Grammar]], mask_bw: np.ndarray):
        """Overwrites these rows of the packed masks, int32 [rows, num_words], with what may come next."""
        pairs = [(grammar._matcher, row) for row, grammar in row_and_grammar]
        fill_next_token_bitmask_par(self._executor, pairs, mask_bw)

    def _may_begin(self, grammar: Grammar) -> bool:
        """Whether any token but end of sequence may come next."""
        mask_1w = np.zeros((1, self.num_words), np.int32)
        self.fill([(0, grammar)], mask_1w)
        is_allowed_v = np.unpackbits(mask_1w.view(np.uint8), bitorder="little")
        is_allowed_v[self._tokenizer.eos_tokens] = 0
        return bool(is_allowed_v.any())


def _definition(params: StructuredOutputsParams) -> str:
    """The grammar in the library's own form. ValueError for text that is not even of its kind."""
    if params.json is not None:
        return llguidance.grammar_from("json", _schema(params.json))
    if params.json_object is not None:
        return llguidance.grammar_from("json", '{"type": "object"}')
    if params.regex is not None:
        return llguidance.grammar_from("regex", params.regex)
    if params.choice is not None:
        return llguidance.grammar_from("choice", json.dumps(list(params.choice)))
    assert params.grammar is not None
    return llguidance.grammar_from("grammar", params.grammar)


def _schema(schema: str | Mapping[str, Any]) -> str:
    try:
        return json.dumps(json.loads(schema) if isinstance(schema, str) else schema)
    except (TypeError, ValueError) as error:
        raise ValueError(f"it is no JSON: {error}") from error


def _shown(params: StructuredOutputsParams) -> str:
    [(name, value)] = [(f.name, v) for f in fields(params) if (v := getattr(params, f.name)) is not None]
    return f"{name}={value!r}"
