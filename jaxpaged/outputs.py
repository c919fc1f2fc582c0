"""What a user gets back."""

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural logarithm of a token's probability: the model's, or, with logprobs_mode="processed_logprobs", that with
    which it was drawn.

    `rank` counts the tokens at least as probable, 1 for the most probable.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionOutput:
    """One completion of a prompt.

    `token_ids` keep the token that ended the completion, `text` does not.
    `finish_reason` "error": no token was left to draw. `stop_reason` is the stop string or stop token id that ended it,
    what was wrong for "error", None for end-of-sequence and length.
    `logprobs`: for each token, token id → `Logprob`, the sampled token first.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        """Whether nothing will be added."""
        return self.finish_reason is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestMetrics:
    """When things happened, in seconds of `time.monotonic()`; None: not yet."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestOutput:
    """All completions of one prompt, in the order of their `index`.

    A prompt that could not be served has `finished=True, outputs=[]` and says why in `error`.
    `prompt_logprobs`: for each prompt token, token id → `Logprob`, the token itself first; None for the first one.
    `num_cached_tokens`: prompt tokens whose K and V were found in the prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int] | None
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    error: str | None = None
    num_cached_tokens: int | None = None
    metrics: RequestMetrics | None = None
