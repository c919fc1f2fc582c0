"""What crosses the borders of a step, in plain numbers and numpy: scheduler → batch → runner → scheduler.

A row is the index of a running request in the device's per-request state. Row `max_num_seqs` belongs to nobody:
padding points to it.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

ON_DEVICE = -1
"""In place of a token id: the row's last sampled token, which the device holds."""

NOT_DRAWN = -1
"""In place of a drawn token: the request had come to its end, or was not there."""

NO_TOKEN = -2
"""In place of a drawn token: none could be drawn, for every one is forbidden or its logit is not a number."""

MAX_STOP_IDS = 8
"""Most token ids for each row at which the device stops drawing by itself; the host finds the others."""

MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS = 256, 16
"""Most bad words of several tokens that a row has room for, and most tokens in one."""

FEW_LOGPROBS = 20
"""Log-probabilities of more tokens than this are costly: they take calls of one draw, and few prompt tokens a step."""

PROMPT_LOGPROBS_CHUNK = 128
"""Most prompt tokens whose logits over the vocabulary are there at once."""


def mask_words(vocab_size: int) -> int:
    """How many int32 words a row of a mask over the vocabulary has: token i is bit i mod 32 of word i ÷ 32."""
    return -(-vocab_size // 32)


@dataclass(frozen=True, kw_only=True, slots=True)
class StartedRow:
    """A row that a request takes: its blocks so far and how its tokens are drawn.

    `seed` is in [0, 2⁶⁴). A temperature of 0 is greedy; top_k 0 keeps all tokens. `stop_ids`: tokens that end it.
    """

    row: int
    block_ids: tuple[int, ...]
    seed: int
    child: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    num_prompt_tokens: int
    stop_ids: tuple[int, ...] = ()
    is_adjusted: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class AdjustedRow:
    """What changes the logits of a row that a request takes; see `adjustments.Adjustments`, made of these.

    `bad_words`: token ids of each. `allowed_token_ids` None: all.
    """

    row: int
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]
    stop_ids: tuple[int, ...]
    min_tokens: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: dict[int, float]
    allowed_token_ids: tuple[int, ...] | None
    bad_words: tuple[tuple[int, ...], ...]


class ScheduledRequest(NamedTuple):
    """The tokens of one request that a step computes: positions [start, start + len(token_ids)).

    `new_block_ids` come after the blocks that the row has. `num_draws`: tokens drawn after the last one, each but the
    last computed in turn; more than one in a step of decodes alone. `num_logprobs`: how many log-probabilities are
    wanted beside those of the drawn tokens; None: none at all. `is_adjusted`: whether anything but temperature and
    truncation changes its logits. `prompt_target_ids`: the tokens that follow its first ones in the prompt, where their
    log-probabilities are wanted, and those of `num_prompt_logprobs` others. `is_structured`: what it draws must be
    allowed by a grammar. (A tuple, since one is made for each decode of a step.)
    """

    request_id: str
    row: int
    start: int
    token_ids: tuple[int, ...]
    first_new_block: int
    new_block_ids: tuple[int, ...]
    num_draws: int
    is_prefill: bool
    num_logprobs: int | None = None
    is_adjusted: bool = False
    prompt_target_ids: tuple[int, ...] = ()
    num_prompt_logprobs: int = 0
    is_structured: bool = False

    @property
    def num_scheduled_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_computed_tokens(self) -> int:
        """Scheduled tokens and all drawn ones but the last."""
        return len(self.token_ids) + max(self.num_draws - 1, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduledStep:
    """One call: rows released and started before it, blocks moved before it (source, target), tokens computed.

    Blocks are moved in this order: `swaps_out` from the device to the host, as the step before left them; `copies` on
    the device; `swaps_in` from the host to the device.
    """

    requests: tuple[ScheduledRequest, ...]
    started: tuple[StartedRow, ...] = ()
    adjusted: tuple[AdjustedRow, ...] = ()
    released: tuple[int, ...] = ()
    swaps_out: tuple[tuple[int, int], ...] = ()
    copies: tuple[tuple[int, int], ...] = ()
    swaps_in: tuple[tuple[int, int], ...] = ()
    num_preempted: int = 0

    @property
    def num_scheduled_tokens(self) -> int:
        return sum(r.num_scheduled_tokens for r in self.requests)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowUpdates:
    """Whole rows of the device's per-request state to overwrite; rows out of range are dropped (padding)."""

    row_u: np.ndarray
    page_table_up: np.ndarray
    seed_u2: np.ndarray
    child_u: np.ndarray
    temperature_u: np.ndarray
    top_k_u: np.ndarray
    top_p_u: np.ndarray
    min_p_u: np.ndarray
    num_prompt_tokens_u: np.ndarray
    stop_id_us: np.ndarray
    is_adjusted_u: np.ndarray


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockUpdates:
    """Single entries of the page table to overwrite: page_table[row, column] = block; padding is out of range."""

    row_w: np.ndarray
    column_w: np.ndarray
    block_w: np.ndarray


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockCopies:
    """Blocks to copy before the step; padded targets are out of range."""

    source_c: np.ndarray
    target_c: np.ndarray


@dataclass(frozen=True, kw_only=True, slots=True)
class SwapOut:
    """Device blocks to gather before the step, padded with the scratch block, and the host blocks to keep them in."""

    device_block_c: np.ndarray
    host_blocks: np.ndarray


@dataclass(frozen=True, kw_only=True, slots=True)
class SwapIn:
    """Host blocks to scatter on the device before the step; padded targets are out of range."""

    host_blocks: np.ndarray
    device_block_c: np.ndarray


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptTargets:
    """Prompt tokens whose log-probabilities are wanted, in chunks [c, p]: where in the step's tokens the one before
    each is, and its id; padding, at the end, has index 0. `num_logprobs`: padded to how many others."""

    index_cp: np.ndarray
    token_cp: np.ndarray
    num_logprobs: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepInputs:
    """A step padded to a bucket: tokens [t] of `num_requests` requests packed one after another, requests [b].

    Request i has tokens [query_start[i], query_start[i + 1]); its context_len counts the tokens computed before
    and those of this step, so that its last token has position context_len − 1. Padded requests have length 0.
    `is_decode`: one token for each request, t = b. `num_draws_b`: tokens to draw after it, 0 for padding.
    `has_logprobs`: whether any request asked for some, `num_logprobs`: padded to how many. `is_adjusted`: whether
    any request's logits are changed.
    """

    is_decode: bool
    token_t: np.ndarray
    row_b: np.ndarray
    query_start_b1: np.ndarray
    context_len_b: np.ndarray
    num_requests: int
    num_tokens: int
    num_draws_b: np.ndarray
    has_logprobs: bool
    num_logprobs: int
    is_adjusted: bool
    is_masked: bool
    prompt_targets: PromptTargets | None
    row_updates: RowUpdates | None
    adjusted_rows: tuple[AdjustedRow, ...]
    block_updates: BlockUpdates | None
    swaps_out: tuple[SwapOut, ...]
    copies: BlockCopies | None
    swaps_in: tuple[SwapIn, ...]


@dataclass(frozen=True, slots=True)
class StepLogprobs:
    """Of each draw [i, b]: log-probability and rank of the drawn token, and the most probable tokens [i, b, k]."""

    drawn_ib: np.ndarray
    rank_ib: np.ndarray
    top_id_ibk: np.ndarray
    top_logprob_ibk: np.ndarray


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Of each prompt token wanted, of one request after another [n]: log-probability, rank, and the most probable
    tokens in its place [n, k]."""

    logprob_n: np.ndarray
    rank_n: np.ndarray
    top_id_nk: np.ndarray
    top_logprob_nk: np.ndarray


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutput:
    """The tokens drawn after each request of the step, one draw after another [i, b].

    NOT_DRAWN beyond its end, and where the request was not to draw; NO_TOKEN where it could not, which ends it.
    """

    token_id_ib: np.ndarray
    logprobs: StepLogprobs | None = None
    prompt_logprobs: PromptLogprobs | None = None
