"""Prompts in all the forms that a user may give them, as token ids."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxpaged.tokenizer import Tokenizer, encode, encode_chat

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, {"prompt": text}, {"prompt_token_ids": ids} or {"messages": conversation}."""

_KEYS = ("prompt", "prompt_token_ids", "messages")


def as_list(prompts: Any) -> list[Any]:
    """One prompt, or a sequence of prompts, as a list of prompts. ValueError for neither."""
    if isinstance(prompts, (str, bytes, Mapping)):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise ValueError(f"prompts={prompts!r} must be a prompt or a list of prompts")
    prompts = list(prompts)
    return [prompts] if prompts and all(_is_int(item) for item in prompts) else prompts


def text_of(prompt: Any) -> str | None:
    """The text of what may be a prompt, None where none was given."""
    return prompt if isinstance(prompt, str) else prompt.get("prompt") if isinstance(prompt, Mapping) else None


def tokenize(prompt: Prompt, tokenizer: Tokenizer | None) -> list[int]:
    """Token ids of a prompt. ValueError for anything that is not a prompt, and for text without a tokenizer."""
    if isinstance(prompt, Mapping):
        if not prompt or any(key not in _KEYS for key in prompt):
            raise ValueError(f"a prompt has one of the keys {', '.join(_KEYS)}, not {list(prompt)}")
        if "messages" in prompt:
            if len(prompt) > 1:
                raise ValueError(f'"messages" stands alone in a prompt, not with {list(prompt)}')
            return encode_chat(needed(tokenizer), prompt["messages"])
        text = prompt.get("prompt", "")
        if not isinstance(text, str):
            raise ValueError(f'"prompt" must be text, not {type(text).__name__}; token ids go in "prompt_token_ids"')
        if "prompt_token_ids" in prompt:
            return _token_ids(prompt["prompt_token_ids"])
        prompt = text
    if isinstance(prompt, str):
        if not prompt:
            raise ValueError("the prompt is empty; give at least one token")
        return encode(needed(tokenizer), prompt)
    return _token_ids(prompt)


def needed(tokenizer: Tokenizer | None) -> Tokenizer:
    """The tokenizer; ValueError where there is none."""
    if tokenizer is None:
        raise ValueError("the model has no tokenizer: give token ids, or Engine(..., tokenizer=...)")
    return tokenizer


def check_token_ids(token_ids: list[int], max_model_len: int, vocab_size: int):
    """ValueError for token ids that cannot be served as a prompt: none, too many, or outside the vocabulary."""
    if not token_ids:
        raise ValueError("the prompt is empty; give at least one token")
    if len(token_ids) >= max_model_len:
        raise ValueError(
            f"the prompt has {len(token_ids)} tokens, but max_model_len={max_model_len} must hold it and at least "
            "one new token; shorten the prompt or raise max_model_len"
        )
    wrong = [token_id for token_id in token_ids if not 0 <= token_id < vocab_size]
    if wrong:
        raise ValueError(f"token ids {wrong[:5]} are outside the vocabulary, 0 to {vocab_size - 1}")


def _is_int(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _token_ids(value: Any) -> list[int]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise ValueError(f"a prompt is text or a list of token ids, not {type(value).__name__}")
    token_ids = list(value)
    wrong = [item for item in token_ids if not _is_int(item)]
    if wrong:
        raise ValueError(f"a prompt's token ids must be whole numbers, not {wrong[0]!r}")
    return [int(item) for item in token_ids]
