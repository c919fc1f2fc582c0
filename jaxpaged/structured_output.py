"""Structured output on the host: which tokens may come next for the text to be what was asked for.

A request's grammar is compiled when the request is added, by llguidance: a parser over the bytes of tokens, so that a
token may end one part of the text and begin the next. Masks are packed: bit i of a row of int32 words stands for token
i, least significant bits first.
"""

import functools
import json
from collections.abc import Iterable, Sequence

import llguidance
import numpy as np
from llguidance.numpy import fill_next_token_bitmask_par

from jaxpaged.sampling_params import StructuredOutputsParams
from jaxpaged.step_data import mask_words
from jaxpaged.tokenizer import Tokenizer, backend_of


class Grammar:
    """Where one request stands in its text. Made by `GrammarCompiler.compile`."""

    def __init__(self, matcher: llguidance.LLMatcher):
        self._matcher = matcher
        self._num_tokens = 0
        self.error: str | None = None
        """Why it can go on no more."""

    @property
    def is_complete(self) -> bool:
        """Whether nothing but end of sequence may follow."""
        return self.error is None and self._matcher.is_stopped()

    def follow(self, output_token_ids: Sequence[int]):
        """Takes the tokens drawn since the last call; what comes after a complete text changes nothing.

        A token that may not come is an `error`, as are the limits of the parser.
        """
        for token_id in output_token_ids[self._num_tokens :]:
            if not self.is_complete and not self._matcher.consume_token(token_id):
                self.error = self._matcher.get_error().splitlines()[0]
            self._num_tokens += 1

    def fork(self) -> "Grammar":
        """One that goes on from here by itself."""
        fork = Grammar(self._matcher.deep_copy())
        fork._num_tokens, fork.error = self._num_tokens, self.error
        return fork


class GrammarCompiler:
    """Compiles grammars for one model, and fills the masks of its requests.

    `vocab_size`: of the model, which may be larger than the tokenizer's; ids beyond it are never allowed.
    Raises ValueError for a tokenizer whose tokens cannot be told byte by byte.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Iterable[int]):
        self.num_words = mask_words(vocab_size)
        self._executor = llguidance.LLExecutor()
        self._grammar_of = functools.lru_cache(maxsize=64)(self._compile)
        try:
            self._tokenizer = llguidance.LLTokenizer(
                backend_of(tokenizer).to_str(), n_vocab=vocab_size, eos_token=sorted(eos_token_ids)
            )
        except Exception as error:  # the library raises whatever it likes
            raise ValueError(f"structured outputs do not work with this tokenizer: {error}") from error

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """A request's grammar at its start. ValueError for one that is malformed or that no text satisfies."""
        return self._grammar_of(params).fork()

    def _compile(self, params: StructuredOutputsParams) -> Grammar:
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
            raise ValueError(f"structured_outputs: {params} cannot be used: {error}") from error
        return grammar

    def fill(self, row_and_grammar: Sequence[tuple[int, Grammar]], mask_bw: np.ndarray):
        """Overwrites these rows of the packed masks, int32 [rows, num_words], with what may come next.

        Nothing may where a grammar has an `error`.
        """
        pairs = [(grammar._matcher, row) for row, grammar in row_and_grammar]
        fill_next_token_bitmask_par(self._executor, pairs, mask_bw)
        for row, grammar in row_and_grammar:
            if grammar._matcher.is_error():
                grammar.error = grammar.error or grammar._matcher.get_error().splitlines()[0]
                mask_bw[row] = 0

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
        assert isinstance(params.json, str)
        return llguidance.grammar_from("json", params.json)
    if params.json_object is not None:
        return llguidance.grammar_from("json", '{"type": "object"}')
    if params.regex is not None:
        return llguidance.grammar_from("regex", params.regex)
    if params.choice is not None:
        return llguidance.grammar_from("choice", json.dumps(list(params.choice)))
    assert params.grammar is not None
    return llguidance.grammar_from("grammar", params.grammar)
