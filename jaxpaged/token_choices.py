"""Which tokens the requests of an engine may draw, as far as it takes the model and its tokenizer to say so."""

import functools
from collections.abc import Sequence

import numpy as np

from jaxpaged.config import ModelConfig
from jaxpaged.sampling_params import SamplingParams, StructuredOutputsParams
from jaxpaged.step_data import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, mask_words
from jaxpaged.structured_output import Grammar, GrammarCompiler
from jaxpaged.tokenizer import Tokenizer, spellings


class TokenChoices:
    """Checks parameters against the vocabulary, spells bad words, compiles grammars and fills their masks."""

    def __init__(self, tokenizer: Tokenizer | None, model: ModelConfig):
        self._tokenizer, self._vocab_size, self._eos_token_ids = tokenizer, model.vocab_size, model.eos_token_ids
        self._spellings = functools.lru_cache(maxsize=64)(self._spell)

    def check(self, params: SamplingParams):
        """ValueError for ids outside the vocabulary, for texts that cannot be told in tokens, for grammars that cannot
        be used, and where no token is left that may be drawn."""
        for name, token_ids in (
            ("stop_token_ids", params.stop_token_ids),
            ("allowed_token_ids", params.allowed_token_ids),
            ("logit_bias", dict(params.logit_bias or ())),
        ):
            self._check_ids(name, token_ids or ())
        if params.stop and self._tokenizer is None:
            raise ValueError(
                f"stop={list(params.stop)!r} is searched in text, but there is no tokenizer; use stop_token_ids"
            )
        self._check_bad_words(params)
        self._check_any_is_left(params)
        self.grammar(params)

    def bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Token ids of each spelling of the bad words."""
        return self._spellings(tuple(params.bad_words or ()))

    def grammar(self, params: SamplingParams) -> Grammar | None:
        """A completion's grammar at its start; None where nothing is asked for. ValueError: it cannot be used."""
        if params.structured_outputs is None:
            return None
        assert isinstance(params.structured_outputs, StructuredOutputsParams)
        return self._compiler.compile(params.structured_outputs)

    def masks(self, num_rows: int, row_and_grammar: Sequence[tuple[int, Grammar]]) -> np.ndarray:
        """Packed masks [rows, words] of what may come next: in rows without a grammar, anything."""
        mask_bw = np.full((num_rows, mask_words(self._vocab_size)), -1, np.int32)
        if row_and_grammar:
            self._compiler.fill(row_and_grammar, mask_bw)
        return mask_bw

    @functools.cached_property
    def _compiler(self) -> GrammarCompiler:
        if self._tokenizer is None:
            raise ValueError("structured_outputs say what text must be, but there is no tokenizer")
        if not self._eos_token_ids:
            raise ValueError(
                "structured_outputs end with the end of sequence, but the model has none; give eos_token_id in its "
                "config.json"
            )
        return GrammarCompiler(self._tokenizer, self._vocab_size, self._eos_token_ids)

    def _spell(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        if not words:
            return ()
        if self._tokenizer is None:
            raise ValueError(f"bad_words={list(words)!r} are texts, but there is no tokenizer")
        return tuple(dict.fromkeys(ids for word in words for ids in spellings(self._tokenizer, word) if ids))

    def _check_ids(self, what: str, token_ids: Sequence[int] | dict[int, float]):
        for token_id in token_ids:
            if not 0 <= token_id < self._vocab_size:
                raise ValueError(f"{what} has {token_id}, but the vocabulary has ids 0 to {self._vocab_size - 1}")

    def _check_bad_words(self, params: SamplingParams):
        long = [word for word in self.bad_words(params) if len(word) > 1]
        if len(long) > MAX_BAD_WORDS:
            raise ValueError(
                f"bad_words have {len(long)} spellings of more than one token; there is room for {MAX_BAD_WORDS}"
            )
        for word in self.bad_words(params):
            if len(word) > MAX_BAD_WORD_TOKENS:
                raise ValueError(
                    f"bad_words has one of {len(word)} tokens, {list(word)}; there is room for {MAX_BAD_WORD_TOKENS}"
                )
            self._check_ids("bad_words", word)

    def _check_any_is_left(self, params: SamplingParams):
        forbidden = {word[0] for word in self.bad_words(params) if len(word) == 1}
        if params.min_tokens:
            forbidden |= {*(params.stop_token_ids or ()), *(() if params.ignore_eos else self._eos_token_ids)}
        allowed = range(self._vocab_size) if params.allowed_token_ids is None else params.allowed_token_ids
        if all(token_id in forbidden for token_id in allowed):
            raise ValueError(
                f"allowed_token_ids={params.allowed_token_ids and list(params.allowed_token_ids)} are all forbidden by "
                f"bad_words={list(params.bad_words or ())!r}, or by min_tokens={params.min_tokens} since they end the "
                "request; allow one more token"
            )
