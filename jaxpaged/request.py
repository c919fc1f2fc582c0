"""One sequence on its way through the engine: tokens, blocks, and the moves its status may make."""

import time
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from jaxpaged.outputs import FinishReason, Logprob
from jaxpaged.sampling_params import SamplingParams


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


_LEGAL_MOVES = {
    Status.WAITING: {Status.RUNNING, Status.FINISHED},
    Status.RUNNING: {Status.PREEMPTED, Status.FINISHED},
    Status.PREEMPTED: {Status.RUNNING, Status.FINISHED},
    Status.FINISHED: set(),
}


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """The scheduler's unit. `num_computed_tokens` chases `num_tokens`; there are no phases.

    `token_ids` are the tokens known, of the prompt and drawn; `num_in_flight` more are drawn by steps whose outputs
    the host has not seen. At most the last of all these tokens waits to be computed while any is in flight.
    `arrival` orders requests: a smaller number came first. `max_tokens` is already cut to the room that
    max_model_len leaves. `block_ids[i]` holds the K and V of tokens [i × block_size, (i + 1) × block_size);
    `digests[i]` names the content of full block i and is extended as blocks fill.
    `bad_words` are the token ids of its parameters' bad words, in each spelling.
    `num_prompt_logprobs` are wanted beside those of the prompt's tokens (of n completions, by the first);
    `prompt_logprobs` are those of the prompt's first tokens, None in place of the first, as far as they are known.
    `is_adjusted`: anything but temperature and truncation changes its logits.
    `grammar` (a `structured_output.Grammar`) says which tokens may come next; None: all.
    `host_block_ids` are what `block_ids` were, in host memory, of a preempted request that is swapped out.
    `siblings` wait to be forked from this one: all its tokens but the last are theirs, too.
    Where `is_steered`, drawn tokens are not appended: each draw leaves its most probable ones as `candidates`, and the
    request has nothing to compute until whoever steers it (beam search) has it `choose` one of them.
    """

    id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival: int
    max_tokens: int
    seed: int
    eos_token_ids: frozenset[int] = frozenset()
    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: Any = None
    parent_id: str | None = None
    child: int = 0
    siblings: list["Request"] = field(default_factory=list)
    is_steered: bool = False
    candidates: dict[int, Logprob] | None = None

    status: Status = Status.WAITING
    num_prompt_tokens: int = field(init=False)
    token_ids: list[int] = field(init=False)
    is_adjusted: bool = field(init=False)
    num_prompt_logprobs: int | None = field(init=False)
    num_computed_tokens: int = 0
    block_ids: list[int] = field(default_factory=list)
    host_block_ids: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    num_indexed_blocks: int = 0
    row: int | None = None
    num_in_flight: int = 0
    num_cached_tokens: int | None = None
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=lambda: [None])
    cumulative_logprob: float = 0.0
    arrival_time: float = field(default_factory=time.monotonic)
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None

    def __post_init__(self):
        self.token_ids = list(self.prompt_token_ids)
        self.num_prompt_tokens = len(self.prompt_token_ids)
        p = self.params
        is_penalized = (p.presence_penalty, p.frequency_penalty, p.repetition_penalty) != (0, 0, 1)
        self.is_adjusted = bool(
            is_penalized
            or (p.min_tokens and self.stop_ids)
            or p.logit_bias
            or p.bad_words
            or p.allowed_token_ids is not None
        )
        self.num_prompt_logprobs = p.prompt_logprobs if self.child == 0 else None

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far, those in flight included."""
        return len(self.token_ids) + self.num_in_flight

    @property
    def num_output_tokens(self) -> int:
        """Drawn tokens known so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def is_finished(self) -> bool:
        return self.status is Status.FINISHED

    @property
    def is_at_fork(self) -> bool:
        """Whether siblings wait and everything but the last token is computed."""
        return bool(self.siblings) and self.num_computed_tokens == len(self.token_ids) - 1

    @property
    def num_tokens_to_compute(self) -> int:
        """Tokens not computed yet; up to the last token while siblings wait to be forked, or it is to be chosen.

        The last token that the request can have needs no computing.
        """
        num_tokens = len(self.token_ids) + self.num_in_flight
        if num_tokens - self.num_prompt_tokens == self.max_tokens:
            return 0
        is_last_held = self.siblings or (self.is_steered and self.num_in_flight)
        return num_tokens - self.num_computed_tokens - (1 if is_last_held else 0)

    @property
    def num_draws_left(self) -> int:
        """Tokens that it may still draw beyond those in flight."""
        num_left = self.num_prompt_tokens + self.max_tokens - len(self.token_ids) - self.num_in_flight
        return min(num_left, 1 - self.num_in_flight) if self.is_steered else num_left

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end it: end of sequence unless ignored, then its own."""
        eos = () if self.params.ignore_eos else sorted(self.eos_token_ids)
        return (*eos, *(self.params.stop_token_ids or ()))

    def move(self, status: Status):
        """Changes the status; RuntimeError for a move that is not legal."""
        if status not in _LEGAL_MOVES[self.status]:
            raise RuntimeError(f"request {self.id}: {self.status.value} → {status.value} is not a legal move")
        self.status = status

    def append(self, token_id: int, logprobs: dict[int, Logprob] | None = None):
        """Takes a drawn token, and the log-probabilities of its draw if they were asked for.

        Sees whether it ends the request: EOS, then stop ids, then length.
        """
        self.token_ids.append(token_id)
        if logprobs is not None:
            self.logprobs.append(logprobs)
            self.cumulative_logprob += logprobs[token_id].logprob
        if self.first_token_time is None:
            self.first_token_time = time.monotonic()
        if token_id in self.eos_token_ids and not self.params.ignore_eos:
            self.finish_reason = "stop"
        elif token_id in (self.params.stop_token_ids or ()):
            self.finish_reason, self.stop_reason = "stop", token_id
        elif self.num_output_tokens >= self.max_tokens:
            self.finish_reason = "length"

    def choose(self, token_id: int):
        """Takes one of the candidates."""
        assert self.candidates is not None, f"request {self.id} has no candidates"
        self.append(token_id, {token_id: self.candidates[token_id]})
        self.candidates = None

    def branch(self, request_id: str) -> "Request":
        """A request with the same tokens and candidates, to be forked from this one once both have chosen."""
        branch = Request(
            id=request_id,
            parent_id=self.parent_id,
            prompt_token_ids=self.prompt_token_ids,
            params=self.params,
            arrival=self.arrival,
            max_tokens=self.max_tokens,
            seed=self.seed,
            eos_token_ids=self.eos_token_ids,
            is_steered=self.is_steered,
            candidates=self.candidates,
            logprobs=list(self.logprobs),
            cumulative_logprob=self.cumulative_logprob,
            arrival_time=self.arrival_time,
            first_token_time=self.first_token_time,
        )
        branch.token_ids = list(self.token_ids)
        return branch

    def stop_at(self, num_tokens: int, stop: str):
        """Ends the request for a stop string that was found in its text up to `num_tokens`; drops all tokens after."""
        del self.token_ids[num_tokens:]
        del self.logprobs[num_tokens - self.num_prompt_tokens :]
        self.cumulative_logprob = sum(next(iter(entry.values())).logprob for entry in self.logprobs)
        self.finish_reason, self.stop_reason = "stop", stop

    @property
    def is_ended_by_token(self) -> bool:
        """Whether the last token is an end-of-sequence or stop token, whose text is not part of the output."""
        return self.finish_reason == "stop" and not isinstance(self.stop_reason, str)
