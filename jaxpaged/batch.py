"""From a scheduled step to what the device is sent: numpy arrays, padded to a bucket."""

import bisect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxpaged.config import EngineConfig
from jaxpaged.memory import blocks_for, swap_sizes
from jaxpaged.step_data import (
    FEW_LOGPROBS,
    MAX_STOP_IDS,
    NOT_DRAWN,
    PROMPT_LOGPROBS_CHUNK,
    BlockCopies,
    BlockUpdates,
    PromptTargets,
    RowUpdates,
    ScheduledStep,
    StartedRow,
    StepInputs,
    SwapIn,
    SwapOut,
)

DROPPED = np.iinfo(np.int32).max
"""An index outside every array: what is scattered there is dropped."""

_NOBODY = StartedRow(
    row=DROPPED, block_ids=(), seed=0, child=0, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, num_prompt_tokens=0
)

MOST_DRAWS = 8
"""Most decode steps in one call where the engine chooses."""


@dataclass(frozen=True, slots=True)
class Buckets:
    """The padded sizes that steps are compiled for, ascending.

    `tokens` of a prefill step, `requests` of a decode step, `logprobs` of what is drawn, `updates` of the device's
    state before a step, `swaps`: blocks swapped at once. `max_draws`: most tokens that a request draws in one decode
    step.
    """

    tokens: tuple[int, ...]
    requests: tuple[int, ...]
    logprobs: tuple[int, ...]
    updates: tuple[int, ...]
    swaps: tuple[int, ...]
    max_draws: int
    max_blocks: int
    num_rows: int
    """Rows of the device's state, the one of padding included."""

    @property
    def padding_row(self) -> int:
        return self.num_rows - 1

    def prefill_requests(self, num_tokens: int) -> tuple[int, ...]:
        """Padded numbers of requests in a prefill step of that many tokens.

        Coarse: a request costs a row of logits, less than half of what a token costs, where there are many tokens.
        """
        least, most = self.requests[0], self.requests[-1]
        sizes, size = [], max(least, num_tokens // 64)
        while size < min(most, num_tokens):
            sizes.append(size)
            size *= 4
        return (*sizes, min(most, max(num_tokens, least)))


def make_buckets(config: EngineConfig) -> Buckets:
    """Buckets of a resolved config: requests 1, 2, 4, 8, 12, 16, 24, 32, … (a third padding at most), tokens alike."""
    assert config.max_model_len is not None and isinstance(config.block_size, int)
    # XLA:CPU multiplies a single bfloat16 or int8 row 5 to 50 times slower than two, a float32 one twice as fast.
    least_requests = 1 if config.dtype == "float32" and config.quantization is None else 2
    most_requests = max(min(config.max_num_seqs, config.max_num_batched_tokens), least_requests)
    max_draws = MOST_DRAWS if config.num_decode_steps == "auto" else config.num_decode_steps
    most_new_blocks = most_requests + (config.max_num_batched_tokens + most_requests * max_draws) // config.block_size
    sizes = (1, 2, 4, *_sizes(8, most_requests))
    return Buckets(
        tokens=_sizes(16, max(config.max_num_batched_tokens, 16)),
        requests=tuple(sorted({b for b in sizes if least_requests <= b <= most_requests})),
        logprobs=tuple(sorted({min(FEW_LOGPROBS, config.max_logprobs), config.max_logprobs})),
        updates=_update_sizes(max(config.max_num_seqs, most_new_blocks)),
        swaps=swap_sizes(config),
        max_draws=max_draws,
        max_blocks=blocks_for(config.max_model_len, config.block_size),
        num_rows=config.max_num_seqs + 1,
    )


def _sizes(least: int, most: int) -> tuple[int, ...]:
    """least × (1, 1.5, 2, 3, 4, 6, …) up to `most`, which ends the list."""
    sizes, size = [], least
    while size < most:
        sizes += [size, size * 3 // 2]
        size *= 2
    return (*(s for s in sizes if s < most), most)


def _update_sizes(most: int) -> tuple[int, ...]:
    """8, 64, 512, … up to one that holds `most`: few shapes matter more than padding for arrays this small."""
    sizes = [8]
    while sizes[-1] < most:
        sizes.append(8 * sizes[-1])
    return tuple(sizes)


def pick_bucket(size: int, buckets: Sequence[int], what: str) -> int:
    """The smallest bucket that holds `size`; ValueError when none does."""
    i = bisect.bisect_left(buckets, size)
    if i == len(buckets):
        raise ValueError(f"{size} {what} do not fit the largest bucket, {buckets[-1]}; a step must stay within it")
    return buckets[i]


def build(step: ScheduledStep, buckets: Buckets, scratch_block: int) -> StepInputs:
    """The step as arrays. `scratch_block` is what unused page-table entries point to."""
    requests = step.requests
    is_masked = any(r.is_structured and r.num_draws for r in requests)
    is_decode = not is_masked and all(r.num_scheduled_tokens == 1 and not r.prompt_target_ids for r in requests)
    num_requests, num_tokens = len(requests), step.num_scheduled_tokens
    if is_decode:
        t = b = pick_bucket(num_requests, buckets.requests, "requests")
    else:
        t = pick_bucket(num_tokens, buckets.tokens, "tokens")
        b = pick_bucket(num_requests, buckets.prefill_requests(t), "requests")

    token_t = np.zeros(t, np.int32)
    row_b = np.full(b, buckets.padding_row, np.int32)
    query_start_b1 = np.full(b + 1, num_tokens, np.int32)
    context_len_b = np.zeros(b, np.int32)
    num_draws_b = np.zeros(b, np.int32)
    token_t[:num_tokens] = np.fromiter(itertools.chain.from_iterable(r.token_ids for r in requests), np.int32)
    row_b[:num_requests] = [r.row for r in requests]
    query_start_b1[:num_requests] = np.cumsum([0, *(r.num_scheduled_tokens for r in requests[:-1])])
    context_len_b[:num_requests] = [r.start + r.num_scheduled_tokens for r in requests]
    num_draws_b[:num_requests] = [r.num_draws for r in requests]

    asked = [r.num_logprobs for r in requests if r.num_logprobs is not None]
    return StepInputs(
        is_decode=is_decode,
        token_t=token_t,
        row_b=row_b,
        query_start_b1=query_start_b1,
        context_len_b=context_len_b,
        num_requests=num_requests,
        num_tokens=num_tokens,
        num_draws_b=num_draws_b,
        has_logprobs=bool(asked),
        num_logprobs=_logprobs_bucket(asked, buckets),
        is_adjusted=any(r.is_adjusted for r in requests),
        is_masked=is_masked,
        prompt_targets=_prompt_targets(step, buckets, t),
        row_updates=_row_updates(step, buckets, scratch_block),
        adjusted_rows=step.adjusted,
        block_updates=_block_updates(step, buckets),
        swaps_out=tuple(_swap_out(pairs, size, scratch_block) for pairs, size in _chunks(step.swaps_out, buckets)),
        copies=_copies(step, buckets),
        swaps_in=tuple(_swap_in(pairs, size) for pairs, size in _chunks(step.swaps_in, buckets)),
    )


def _logprobs_bucket(asked: list[int], buckets: Buckets) -> int:
    most = buckets.logprobs[-1] if -1 in asked else max(asked, default=0)
    return pick_bucket(most, buckets.logprobs, "logprobs")


def _prompt_targets(step: ScheduledStep, buckets: Buckets, num_padded_tokens: int) -> PromptTargets | None:
    """Prompt tokens whose log-probabilities are wanted; the i-th target of a request follows its i-th token."""
    indices, token_ids, first = [], [], 0
    for request in step.requests:
        indices += range(first, first + len(request.prompt_target_ids))
        token_ids += request.prompt_target_ids
        first += request.num_scheduled_tokens
    if not token_ids:
        return None
    size = prompt_chunk(num_padded_tokens)
    pad = -len(token_ids) % size
    return PromptTargets(
        index_cp=np.pad(np.array(indices, np.int32), (0, pad)).reshape(-1, size),
        token_cp=np.pad(np.array(token_ids, np.int32), (0, pad)).reshape(-1, size),
        num_logprobs=_logprobs_bucket([r.num_prompt_logprobs for r in step.requests], buckets),
    )


def prompt_chunk(num_padded_tokens: int) -> int:
    """How many prompt tokens' logits over the vocabulary are made at once in a prefill of that size."""
    return min(num_padded_tokens, PROMPT_LOGPROBS_CHUNK)


def _row_updates(step: ScheduledStep, buckets: Buckets, scratch_block: int) -> RowUpdates | None:
    """Rows started get their blocks and parameters, rows released point to the scratch block again."""
    rows = [*step.started, *(replace(_NOBODY, row=row) for row in step.released)]
    if not rows:
        return None
    rows += [_NOBODY] * (pick_bucket(len(rows), buckets.updates, "rows") - len(rows))
    page_table_up = np.full((len(rows), buckets.max_blocks), scratch_block, np.int32)
    stop_id_us = np.full((len(rows), MAX_STOP_IDS), NOT_DRAWN, np.int32)
    for u, row in enumerate(rows):
        page_table_up[u, : len(row.block_ids)] = row.block_ids
        stop_id_us[u, : len(row.stop_ids)] = row.stop_ids
    return RowUpdates(
        row_u=np.array([r.row for r in rows], np.int32),
        page_table_up=page_table_up,
        seed_u2=np.array([(r.seed >> 32, r.seed & 0xFFFFFFFF) for r in rows], np.uint32),
        child_u=np.array([r.child for r in rows], np.int32),
        temperature_u=np.array([r.temperature for r in rows], np.float32),
        top_k_u=np.array([r.top_k for r in rows], np.int32),
        top_p_u=np.array([r.top_p for r in rows], np.float32),
        min_p_u=np.array([r.min_p for r in rows], np.float32),
        num_prompt_tokens_u=np.array([r.num_prompt_tokens for r in rows], np.int32),
        stop_id_us=stop_id_us,
        is_adjusted_u=np.array([r.is_adjusted for r in rows], bool),
    )


def _block_updates(step: ScheduledStep, buckets: Buckets) -> BlockUpdates | None:
    started = {row.row for row in step.started}
    entries = [
        (r.row, r.first_new_block + i, block_id)
        for r in step.requests
        if r.row not in started
        for i, block_id in enumerate(r.new_block_ids)
    ]
    if not entries:
        return None
    entries += [(DROPPED, 0, 0)] * (pick_bucket(len(entries), buckets.updates, "new blocks") - len(entries))
    row_w, column_w, block_w = np.array(entries, np.int32).T
    return BlockUpdates(row_w=row_w, column_w=column_w, block_w=block_w)


def _copies(step: ScheduledStep, buckets: Buckets) -> BlockCopies | None:
    if not step.copies:
        return None
    num_padded = pick_bucket(len(step.copies), buckets.updates, "copied blocks")
    pairs = [*step.copies, *[(0, DROPPED)] * (num_padded - len(step.copies))]
    source_c, target_c = np.array(pairs, np.int32).T
    return BlockCopies(source_c=source_c, target_c=target_c)


def _chunks(pairs: Sequence[tuple[int, int]], buckets: Buckets) -> Iterator[tuple[Sequence[tuple[int, int]], int]]:
    """The blocks to swap in groups of bucket sizes: as many as fill the largest, then the next; the last is padded."""
    start = 0
    while start < len(pairs):
        left = len(pairs) - start
        size = next((size for size in reversed(buckets.swaps) if size <= left), buckets.swaps[0])
        yield pairs[start : start + size], size
        start += size


def _swap_out(pairs: Sequence[tuple[int, int]], size: int, scratch_block: int) -> SwapOut:
    device_blocks, host_blocks = np.array(pairs, np.int32).T
    padding = (0, size - len(pairs))
    return SwapOut(
        device_block_c=np.pad(device_blocks, padding, constant_values=scratch_block), host_blocks=host_blocks
    )


def _swap_in(pairs: Sequence[tuple[int, int]], size: int) -> SwapIn:
    host_blocks, device_blocks = np.array(pairs, np.int32).T
    padding = (0, size - len(pairs))
    return SwapIn(host_blocks=host_blocks, device_block_c=np.pad(device_blocks, padding, constant_values=DROPPED))
