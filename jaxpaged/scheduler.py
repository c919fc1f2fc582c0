"""Which tokens are computed next, and in whose blocks. Plain host Python: returns data, never touches the device.

One rule serves prefill, chunks, prefix hits, recomputation and decoding: `num_computed_tokens` chases `num_tokens`.
In each step running requests with one token left get it first, then unfinished prefills in order of arrival, then
waiting requests are admitted, all within the token budget. Where blocks run out, the request that arrived last is
preempted: its blocks are swapped out to the host and come back later, or it gives them up and is computed again. The
oldest request can take blocks from all others, so that every step makes progress.

Steps may be scheduled before the outputs of earlier ones are known: `update` takes outputs in the order in which
steps were scheduled. Until then a request counts its draws in flight as tokens, whose values the device has. What
ends a request early is thus seen late, and what was drawn beyond the end is dropped.
"""

import bisect
import math
import time
from collections import deque

from jaxpaged.block_pool import ROOT_DIGEST, BlockPool, SwapSpace, block_digest
from jaxpaged.config import EngineConfig
from jaxpaged.memory import PreemptionCosts, blocks_for
from jaxpaged.outputs import Logprob
from jaxpaged.request import Request, Status
from jaxpaged.step_data import (
    FEW_LOGPROBS,
    MAX_STOP_IDS,
    NO_TOKEN,
    NOT_DRAWN,
    ON_DEVICE,
    PROMPT_LOGPROBS_CHUNK,
    AdjustedRow,
    ScheduledRequest,
    ScheduledStep,
    StartedRow,
    StepOutput,
)


class _Plan:
    """A step while it is put together."""

    def __init__(self, budget: int):
        self.budget = budget
        self.scheduled: dict[Request, ScheduledRequest] = {}
        self.filled: set[bytes] = set()
        """Digests of the blocks that this step fills with prompt."""
        self.most_draws = 1
        self.costly_budget = PROMPT_LOGPROBS_CHUNK
        """Prompt tokens left to requests that want the log-probabilities of more than a few tokens for each."""
        self.num_preempted = 0
        self.has_stalled = False


class Scheduler:
    """`schedule()` says what a step computes, `update()` takes what it drew.

    `costs` decide between swapping and recomputing, where the config leaves it open; None: not measured yet, swap.
    """

    def __init__(self, config: EngineConfig, digest_context: bytes = b"", num_host_blocks: int = 0):
        assert config.num_device_blocks is not None and isinstance(config.block_size, int)
        self.config = config
        self.block_size = config.block_size
        self.pool = BlockPool(config.num_device_blocks)
        self.swap_space = SwapSpace(self.pool, num_host_blocks)
        if config.kv_offloading_size:
            self.pool.evict = self._offload
        self.costs: PreemptionCosts | None = None
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.requests: dict[str, Request] = {}
        self._digest_context = digest_context
        self._free_rows = list(range(config.max_num_seqs))
        # What the device does not know yet: the next step tells it.
        self._started: dict[int, Request] = {}
        self._released: set[int] = set()
        self._copies: list[tuple[int, int]] = []
        self._swaps_out: list[tuple[int, int]] = []
        self._swaps_in: list[tuple[int, int]] = []
        self._host_blocks_read: list[int] = []
        """Held until the step that reads them is scheduled."""
        self._in_flight: deque[list[Request]] = deque()
        self.num_preemptions = 0
        self.num_swapped_out = 0
        self.num_swapped_in = 0
        self.num_offloaded = 0
        self.num_prefix_queries = 0
        self.num_prefix_hits = 0
        self.num_host_hits = 0

    # ---- requests come and go

    def add(self, request: Request):
        """Queues a request, with its siblings. ValueError when it could never be served."""
        full_length = request.num_prompt_tokens + request.max_tokens
        needed = blocks_for(full_length, self.block_size)
        if needed > self.pool.num_blocks:
            raise ValueError(
                f"the request needs {needed} blocks at its full length ({request.num_prompt_tokens} prompt + "
                f"{request.max_tokens} new tokens, {self.block_size} a block), but the KV pool has "
                f"{self.pool.num_blocks}; shorten the prompt, lower max_tokens, or enlarge the pool"
            )
        num_members = 1 + len(request.siblings)
        if num_members > self.config.max_num_seqs:
            raise ValueError(
                f"n={num_members} completions run side by side, but max_num_seqs={self.config.max_num_seqs}; "
                "lower n or raise max_num_seqs"
            )
        members = {member.id: member for member in (request, *request.siblings)}
        if taken := sorted(members.keys() & self.requests):
            raise ValueError(f"request ids {taken} are in use by unfinished requests; give another request_id")
        self.requests |= members
        self.waiting.append(request)

    def fork(self, parent: Request, siblings: list[Request]):
        """Has requests that differ from an unfinished one in the last token alone start from its blocks."""
        self.requests |= {sibling.id: sibling for sibling in siblings}
        parent.siblings = siblings

    def finish(self, request: Request):
        """Ends a request, wherever it is, and frees its row and blocks at once; siblings not forked yet end with it."""
        if request.status is Status.RUNNING:
            self.running.remove(request)
            self._release(request)
        elif request in self.waiting:
            self.waiting.remove(request)
            self._drop_host_blocks(request)
        else:
            for other in (*self.running, *self.waiting):
                if request in other.siblings:
                    other.siblings.remove(request)
        for member in (request, *request.siblings):
            member.move(Status.FINISHED)
            member.finished_time = time.monotonic()
            del self.requests[member.id]
        request.siblings.clear()

    def has_unfinished(self) -> bool:
        return bool(self.running or self.waiting)

    def reset_prefix_cache(self) -> bool:
        """Forgets cached content, here and on the host; False while requests hold blocks."""
        is_reset = self.pool.reset_index()
        if is_reset:
            self.swap_space.host.forget_index()  # what swapped requests hold there is theirs alone
        return is_reset

    def check(self):
        """RuntimeError unless blocks, rows and queues agree (see `BlockPool.check`)."""
        self.pool.check([request.block_ids for request in self.running])
        self.swap_space.host.check([*(request.host_block_ids for request in self.waiting), self._host_blocks_read])
        rows = [_row(request) for request in self.running]
        if sorted([*rows, *self._free_rows]) != list(range(self.config.max_num_seqs)):
            raise RuntimeError(f"rows of running requests {rows} and free rows {self._free_rows} are not all rows once")
        for name, queue in (("running", self.running), ("waiting", self.waiting)):
            arrivals = [request.arrival for request in queue]
            if arrivals != sorted(arrivals):
                raise RuntimeError(f"{name} requests are not in order of arrival: {arrivals}")
        for request in self.running:
            if len(request.block_ids) < blocks_for(request.num_computed_tokens, self.block_size):
                raise RuntimeError(
                    f"request {request.id} has computed {request.num_computed_tokens} tokens in "
                    f"{len(request.block_ids)} blocks of {self.block_size}"
                )

    # ---- a step

    def schedule(self, most_draws: int = 1) -> ScheduledStep | None:
        """The next step; None when there is nothing to compute before the outputs of steps in flight are known.

        Where it has decodes alone, nothing waits and blocks are there, each draws up to `most_draws` tokens.
        """
        if not self.has_unfinished():
            return None
        plan = _Plan(self.config.max_num_batched_tokens)
        for request in [r for r in self.running if r.siblings]:
            self._fork(request)
        decodes, prefills = [], []
        for request in self.running:
            num_tokens = request.num_tokens_to_compute
            if num_tokens > 0:
                (decodes if num_tokens == 1 else prefills).append(request)
        if most_draws > 1 and not prefills and not self.waiting and self._may_draw(decodes, most_draws):
            plan.most_draws = most_draws
        self._schedule_running(plan, decodes + prefills)
        self._admit(plan)
        if not plan.scheduled:
            if self._in_flight:
                return None
            if self.running and len(self.running) + len(self.waiting) > 1:
                # Requests that wait for a choice hold what others need to draw, without which there is no choice.
                self._preempt(plan, self.running[-1])
                return self.schedule(most_draws)
            raise RuntimeError(
                f"nothing could be scheduled: {len(self.running)} running, {len(self.waiting)} waiting, "
                f"{self.pool.num_available} of {self.pool.num_blocks} blocks available"
            )
        return self._commit(plan)

    def update(self, step: ScheduledStep, output: StepOutput) -> list[tuple[Request, int]]:
        """Appends the tokens drawn by the oldest step in flight, and ends requests that are at their end.

        Returns the requests that got tokens, each with their number; steered ones got candidates instead. Draws of a
        request that has ended are dropped.
        """
        updated = []
        drawn = output.token_id_ib.T.tolist()
        first_target = 0
        for i, (scheduled, request) in enumerate(zip(step.requests, self._in_flight.popleft(), strict=True)):
            if scheduled.prompt_target_ids:
                _append_prompt_logprobs(request, scheduled, output, first_target)
                first_target += len(scheduled.prompt_target_ids)
            if request.status is Status.FINISHED or not scheduled.num_draws:
                continue
            request.num_in_flight -= scheduled.num_draws
            num_known = len(request.token_ids)
            for draw in range(scheduled.num_draws):
                if drawn[i][draw] == NOT_DRAWN:
                    raise RuntimeError(f"request {request.id} is not at its end, but the device stopped drawing")
                if drawn[i][draw] == NO_TOKEN:
                    request.finish_reason = "error"
                    request.stop_reason = "no token may be drawn: all are forbidden, or logits are not numbers"
                    break
                logprobs = None
                if scheduled.num_logprobs is not None:
                    logprobs = _logprobs(output, draw, i, scheduled.num_logprobs)
                if request.is_steered:
                    request.candidates = logprobs
                    break
                request.append(drawn[i][draw], logprobs)
                if request.finish_reason is not None:
                    break
            if request.status is Status.RUNNING:
                self._index_full_blocks(request)
            if request.finish_reason is not None:
                self.finish(request)
            updated.append((request, len(request.token_ids) - num_known))
        return updated

    def rewind(self):
        """After steps that may not have run: forgets all K and V and all draws in flight; running and swapped requests
        are computed again."""
        self._in_flight.clear()
        for request in (*self.running, *self.waiting):
            request.num_in_flight = 0
        plan = _Plan(0)
        while self.running:
            self._preempt(plan, self.running[-1], may_swap=False)
        for request in self.waiting:
            self._drop_host_blocks(request)
        self._swaps_out.clear()
        self._read_host_blocks()
        self.swap_space.forget()
        self.pool.reset_index()
        self._released.update(self._free_rows)

    def _schedule_running(self, plan: _Plan, requests: list[Request]):
        for request in requests:
            if request.status is Status.RUNNING:  # one before it may have preempted it
                self._schedule_tokens(plan, request)

    def _schedule_tokens(self, plan: _Plan, request: Request):
        """Gives a running request as many of its tokens as budget and blocks allow."""
        num_tokens = min(request.num_tokens_to_compute, plan.budget)
        has_targets = _has_targets(request)
        has_costly_targets = has_targets and _is_costly(request.num_prompt_logprobs)
        if has_costly_targets:
            num_tokens = min(num_tokens, plan.costly_budget)
        if num_tokens == 0:
            return
        num_more = min(plan.most_draws, request.num_draws_left) - 1 if plan.most_draws > 1 else 0
        num_blocks, start = len(request.block_ids), request.num_computed_tokens
        if start + num_tokens + num_more > num_blocks * self.block_size:
            num_tokens = self._reserve(plan, request, num_tokens, num_more)
            if num_tokens == 0:
                plan.has_stalled = True
                return
        stop, num_known = start + num_tokens, len(request.token_ids)
        num_draws = 1 + num_more if stop == num_known + request.num_in_flight else 0
        plan.budget -= num_tokens
        plan.costly_budget -= num_tokens if has_costly_targets else 0
        plan.scheduled[request] = ScheduledRequest(
            request_id=request.id,
            row=_row(request),
            start=start,
            token_ids=tuple(request.token_ids[start:stop]) if stop <= num_known else (ON_DEVICE,),
            first_new_block=num_blocks,
            new_block_ids=tuple(request.block_ids[num_blocks:]),
            num_draws=num_draws,
            is_prefill=start < request.num_prompt_tokens,
            num_logprobs=request.params.logprobs if num_draws else None,
            is_adjusted=self._is_adjusted(request),
            prompt_target_ids=tuple(request.prompt_token_ids[start + 1 : stop + 1]) if has_targets else (),
            num_prompt_logprobs=request.num_prompt_logprobs or 0,
            is_structured=request.grammar is not None,
        )
        if num_tokens > 1 and self.config.enable_prefix_caching:
            num_full = min(stop, num_known) // self.block_size
            plan.filled.update(self._digests(request, num_full)[request.num_indexed_blocks : num_full])

    def _may_draw(self, decodes: list[Request], most_draws: int) -> bool:
        """Whether all of them find blocks for `most_draws` tokens without a preemption, none wants log-probabilities
        that several draws in a call have no room for, and none has draws that depend on what the host makes of the one
        before."""
        needed = 0
        for request in decodes:
            if request.grammar or _is_costly(request.params.logprobs) or _has_targets(request):
                return False
            num_tokens = request.num_computed_tokens + min(most_draws, request.num_draws_left)
            needed += max(blocks_for(num_tokens, self.block_size) - len(request.block_ids), 0)
        return needed <= self.pool.num_available

    def _reserve(self, plan: _Plan, request: Request, num_tokens: int, num_more: int) -> int:
        """Adds blocks, preempting later arrivals if need be; returns the tokens that the request has blocks for.

        `num_more`: tokens that are drawn and computed in the same step, for which blocks are known to be there.
        """
        num_wanted = request.num_computed_tokens + num_tokens + num_more
        needed = blocks_for(num_wanted, self.block_size) - len(request.block_ids)
        while needed > self.pool.num_available and self.running[-1] is not request:
            self._preempt(plan, self.running[-1])
        num_new = max(min(needed, self.pool.num_available), 0)
        request.block_ids += self.pool.allocate(num_new)
        room = len(request.block_ids) * self.block_size - request.num_computed_tokens
        return min(num_tokens, room)

    def _admit(self, plan: _Plan):
        """Lets waiting requests run, in order, while budget, rows and blocks for the whole prompt are there.

        Nobody is admitted in a step in which a running request lost its blocks or found none. A request whose next
        block of prompt is filled by this very step waits for the next one, where it can hit it.
        """
        while self.waiting and plan.budget and self._free_rows and not plan.num_preempted and not plan.has_stalled:
            if not self.pool.num_available:
                break
            request = next((r for r in self.waiting if r.candidates is None), None)  # others have nothing to compute
            if request is None or request.num_in_flight:
                break
            if request.host_block_ids:
                if not self._swap_in(request):
                    break
                self.waiting.remove(request)
                self._schedule_running(plan, [request, *self._fork(request)])
                continue
            if not self._start_after_hits(plan, request):
                break
            self.waiting.remove(request)
            self._schedule_running(plan, [request, *self._fork(request)])

    def _start_after_hits(self, plan: _Plan, request: Request) -> bool:
        """Starts a request with what the prefix cache has of it, here and on the host; False when it is to wait."""
        hits, host_hits = self._match_prefix(request)
        num_hits = len(hits) + len(host_hits)
        to_fill = request.digests[len(hits) : min(num_hits + 1, self._num_cacheable(request))]
        if not plan.filled.isdisjoint(to_fill):
            return False
        needed = blocks_for(request.num_tokens, self.block_size) - len(hits)
        if needed > self.pool.num_available - self.pool.num_unheld(hits):
            return False
        self.pool.share(hits)
        self.swap_space.host.share(host_hits)
        loaded = self._load(host_hits, len(host_hits), len(host_hits))
        assert loaded is not None
        num_cached = num_hits * self.block_size
        self._start(request, hits + loaded, num_cached)
        request.num_indexed_blocks = len(hits)
        plan.filled.update(to_fill[: len(host_hits)])
        if request.num_cached_tokens is None:
            request.num_cached_tokens = num_cached
            self.num_prefix_queries += request.num_tokens
            self.num_prefix_hits += num_cached
            self.num_host_hits += len(host_hits) * self.block_size
        return True

    def _fork(self, parent: Request) -> list[Request]:
        """Starts the siblings of a request whose prompt is computed but for its last token; returns those started.

        Full blocks are shared. A partial block stays with the parent and is copied for each sibling, from the host
        where the parent's is only on its way from there. Siblings for which no row or block is left wait like any
        other request.
        """
        if not parent.is_at_fork:
            return []
        num_full, num_partial = divmod(parent.num_computed_tokens, self.block_size)
        shared, partial = parent.block_ids[:num_full], parent.block_ids[num_full : num_full + 1]
        num_copied, on_their_way = int(num_partial > 0), {target: source for source, target in self._swaps_in}
        forked = []
        siblings, parent.siblings = parent.siblings, []
        for sibling in siblings:
            if not self._free_rows or self.pool.num_available < num_copied:
                break
            self.pool.share(shared)
            copied = self.pool.allocate(num_copied)
            if partial and partial[0] in on_their_way:
                self._swaps_in.append((on_their_way[partial[0]], copied[0]))
            else:
                self._copies += zip(partial, copied, strict=False)
            sibling.num_cached_tokens = parent.num_cached_tokens
            sibling.digests = list(parent.digests)
            self._start(sibling, shared + copied, parent.num_computed_tokens)
            forked.append(sibling)
        for sibling in siblings[len(forked) :]:
            self._wait(sibling)
        return forked

    def _start(self, request: Request, block_ids: list[int], num_computed_tokens: int):
        request.block_ids = list(block_ids)
        request.num_computed_tokens = num_computed_tokens
        request.num_indexed_blocks = num_computed_tokens // self.block_size
        request.row = self._free_rows.pop()
        request.move(Status.RUNNING)
        if request.first_scheduled_time is None:
            request.first_scheduled_time = time.monotonic()
        bisect.insort(self.running, request, key=lambda r: r.arrival)
        self._started[request.row] = request

    def _preempt(self, plan: _Plan, request: Request, *, may_swap: bool = True):
        """Takes the blocks of a running request, undoing what this step had planned for it."""
        undone = plan.scheduled.pop(request, None)
        if undone is not None:
            plan.budget += undone.num_scheduled_tokens
        plan.num_preempted += 1
        self.num_preemptions += 1
        request.num_preemptions += 1
        self.running.remove(request)
        if not (may_swap and self._swap_out(request)):
            request.num_computed_tokens = 0
        self._release(request)
        request.move(Status.PREEMPTED)
        self._wait(request)

    def _wait(self, request: Request):
        """Queues a request by its arrival: siblings and preempted requests may be older than those that wait."""
        bisect.insort(self.waiting, request, key=lambda r: r.arrival)

    def _swap_out(self, request: Request) -> bool:
        """Has the blocks of a request that is preempted copied to the host, if that is cheaper and room is there.

        They are copied as the steps scheduled so far leave them. So a request that was just forked, whose partial
        block is still to be filled, is computed again; one that has drawn its last token needs nothing any more.
        """
        targets = {target for _, target in (*self._copies, *self._swaps_in)}
        if request.num_draws_left == 0 or not targets.isdisjoint(request.block_ids):
            return False
        num_computed = request.num_computed_tokens
        block_ids = request.block_ids[: blocks_for(num_computed, self.block_size)]
        if not block_ids or not self._is_swap_cheaper(request, block_ids):
            return False
        swapped = self.swap_space.swap_out(block_ids, num_computed // self.block_size)
        if swapped is None:
            return False
        request.host_block_ids, copies = swapped
        self._swaps_out += copies
        self.num_swapped_out += len(copies)
        return True

    def _is_swap_cheaper(self, request: Request, block_ids: list[int]) -> bool:
        """By measured costs; blocks that others hold on the device can be hit in the prefix cache, at no cost."""
        if not self.config.may_swap:
            return False
        if self.config.preemption_mode == "swap" or self.costs is None:
            return True
        num_shared = sum(self.pool.ref_counts[i] > 1 for i in block_ids) if self.config.enable_prefix_caching else 0
        num_tokens = request.num_computed_tokens - num_shared * self.block_size
        return self.swap_space.num_to_copy(block_ids) * self.costs.per_block < num_tokens * self.costs.per_token

    def _swap_in(self, request: Request) -> bool:
        """Starts a swapped request where it was; False when there are no blocks for all its tokens."""
        num_full = request.num_computed_tokens // self.block_size
        num_under_way = len(self._swaps_in)
        block_ids = self._load(request.host_block_ids, num_full, blocks_for(request.num_tokens, self.block_size))
        if block_ids is None:
            return False
        self.num_swapped_in += len(self._swaps_in) - num_under_way
        request.host_block_ids = []
        self._start(request, block_ids, request.num_computed_tokens)
        request.num_indexed_blocks = 0  # its full blocks are findable again
        return True

    def _load(self, host_block_ids: list[int], num_full: int, num_blocks: int) -> list[int] | None:
        """Device blocks that will hold what held blocks of the host do; None where `num_blocks` in all are not there.

        The references to the host's blocks are kept until the step that reads them is scheduled, then dropped.
        """
        swapped = self.swap_space.swap_in(host_block_ids, num_full, num_blocks)
        if swapped is None:
            return None
        block_ids, copies = swapped
        self._swaps_in += copies
        self._host_blocks_read += host_block_ids
        return block_ids

    def _offload(self, block_id: int, digest: bytes):
        """Keeps on the host what the prefix index is about to forget."""
        copies = self.swap_space.offload(block_id, digest)
        self._swaps_out += copies
        self.num_offloaded += len(copies)

    def _drop_host_blocks(self, request: Request):
        if request.host_block_ids:
            self.swap_space.host.free(request.host_block_ids)
            request.host_block_ids = []
            request.num_computed_tokens = 0

    def _read_host_blocks(self):
        """Swap-ins are on their way, or given up: the host blocks they read may be given away."""
        self.swap_space.host.free(self._host_blocks_read)
        self._host_blocks_read = []
        self._swaps_in.clear()

    def _release(self, request: Request):
        self._started.pop(_row(request), None)
        self.pool.free(request.block_ids)
        for on_their_way in (self._copies, self._swaps_in):
            on_their_way[:] = [(source, target) for source, target in on_their_way if self.pool.ref_counts[target]]
        request.block_ids = []
        self._free_rows.append(_row(request))
        self._released.add(_row(request))
        request.row = None

    def _commit(self, plan: _Plan) -> ScheduledStep:
        """Counts the planned tokens as computed and draws as in flight, indexes blocks, and returns the step."""
        for request, scheduled in plan.scheduled.items():
            request.num_computed_tokens += scheduled.num_computed_tokens
            request.num_in_flight += scheduled.num_draws
            self._index_full_blocks(request)
        self._in_flight.append(list(plan.scheduled))
        step = ScheduledStep(
            requests=tuple(plan.scheduled.values()),
            started=tuple(self._started_row(request) for request in self._started.values()),
            adjusted=tuple(_adjusted_row(r) for r in self._started.values() if self._is_adjusted(r)),
            released=tuple(sorted(self._released - self._started.keys())),
            swaps_out=tuple(self._swaps_out),
            copies=tuple(self._copies),
            swaps_in=tuple(self._swaps_in),
            num_preempted=plan.num_preempted,
        )
        self._started.clear()
        self._released.clear()
        self._swaps_out.clear()
        self._copies.clear()
        self._read_host_blocks()
        return step

    def _is_adjusted(self, request: Request) -> bool:
        """Whether the device keeps counts of its tokens, and whatever else changes its logits."""
        return request.is_adjusted or self.config.logits_processor_counts

    def _started_row(self, request: Request) -> StartedRow:
        params = request.params
        return StartedRow(
            row=_row(request),
            block_ids=tuple(request.block_ids),
            seed=request.seed,
            child=request.child,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            num_prompt_tokens=request.num_prompt_tokens,
            stop_ids=request.stop_ids[:MAX_STOP_IDS],
            is_adjusted=self._is_adjusted(request),
        )

    # ---- prefix cache

    def _match_prefix(self, request: Request) -> tuple[list[int], list[int]]:
        """Cached blocks that the request can take up, and those of the host that hold what follows.

        The block of its last token is never one of them.
        """
        num_blocks = self._num_cacheable(request)
        digests = self._digests(request, num_blocks)[:num_blocks]
        hits = self.pool.match(digests)
        return hits, self.swap_space.host.match(digests[len(hits) :])

    def _num_cacheable(self, request: Request) -> int:
        """Most blocks that a prefix hit of the request can cover.

        Where log-probabilities of the prompt are still wanted, what comes before the first of these is computed.
        """
        if not self.config.enable_prefix_caching:
            return 0
        is_known = request.num_prompt_logprobs is None or len(request.prompt_logprobs) == request.num_prompt_tokens
        most_tokens = request.num_tokens - 1 if is_known else len(request.prompt_logprobs) - 1
        return most_tokens // self.block_size

    def _index_full_blocks(self, request: Request):
        """Makes the blocks findable that are full of tokens known and computed."""
        num_tokens, first = request.num_computed_tokens, request.num_indexed_blocks
        if num_tokens < (first + 1) * self.block_size or not self.config.enable_prefix_caching:
            return
        last = min(num_tokens, len(request.token_ids)) // self.block_size
        digests = self._digests(request, last)
        for i in range(first, last):
            self.pool.index(request.block_ids[i], digests[i])
        request.num_indexed_blocks = last

    def _digests(self, request: Request, num_blocks: int) -> list[bytes]:
        """Digests of the request's full blocks, `num_blocks` or more; each is computed once in its life."""
        size = self.block_size
        for i in range(len(request.digests), num_blocks):
            parent = request.digests[-1] if request.digests else ROOT_DIGEST
            tokens = request.token_ids[i * size : (i + 1) * size]
            request.digests.append(block_digest(parent, tokens, self._digest_context))
        return request.digests


def _row(request: Request) -> int:
    assert request.row is not None, f"request {request.id} has no row"
    return request.row


def _has_targets(request: Request) -> bool:
    """Whether the log-probability of the prompt token after the next one to compute is wanted."""
    if request.num_prompt_logprobs is None or len(request.prompt_logprobs) == request.num_prompt_tokens:
        return False
    return request.num_computed_tokens < request.num_prompt_tokens - 1


def _is_costly(num_logprobs: int | None) -> bool:
    return num_logprobs is not None and not 0 <= num_logprobs <= FEW_LOGPROBS


def _adjusted_row(request: Request) -> AdjustedRow:
    params = request.params
    allowed = params.allowed_token_ids
    return AdjustedRow(
        row=_row(request),
        prompt_token_ids=tuple(request.prompt_token_ids),
        output_token_ids=tuple(request.output_token_ids),
        stop_ids=request.stop_ids,
        min_tokens=params.min_tokens,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=dict(params.logit_bias or ()),
        allowed_token_ids=None if allowed is None else tuple(allowed),
        bad_words=request.bad_words,
    )


def _logprobs(output: StepOutput, draw: int, i: int, num_logprobs: int) -> dict[int, Logprob]:
    """Of one draw of request i: token id → log-probability, that of the drawn token first."""
    logprobs, token_id = output.logprobs, int(output.token_id_ib[draw, i])
    assert logprobs is not None, "a request asked for logprobs, but the step returned none"
    drawn = Logprob(float(logprobs.drawn_ib[draw, i]), int(logprobs.rank_ib[draw, i]))
    top = logprobs.top_id_ibk[draw, i], logprobs.top_logprob_ibk[draw, i]
    return _entry(token_id, drawn, *top, num_logprobs)


def _append_prompt_logprobs(request: Request, scheduled: ScheduledRequest, output: StepOutput, first: int):
    """Takes the log-probabilities `first`, … of the step's prompt tokens; those known from before a preemption stay."""
    logprobs = output.prompt_logprobs
    assert logprobs is not None, "a request asked for prompt_logprobs, but the step returned none"
    for i, token_id in enumerate(scheduled.prompt_target_ids):
        if scheduled.start + 1 + i == len(request.prompt_logprobs):
            own = Logprob(float(logprobs.logprob_n[first + i]), int(logprobs.rank_n[first + i]))
            top = logprobs.top_id_nk[first + i], logprobs.top_logprob_nk[first + i]
            request.prompt_logprobs.append(_entry(token_id, own, *top, scheduled.num_prompt_logprobs))


def _entry(token_id: int, own: Logprob, top_id_k, top_logprob_k, num_logprobs: int) -> dict[int, Logprob]:
    """A token's own log-probability and those of the most probable tokens; −1: of all. Those of −inf are left out."""
    entry = {token_id: own}
    width = len(top_id_k) if num_logprobs == -1 else num_logprobs
    candidates = zip(top_id_k[:width].tolist(), top_logprob_k[:width].tolist(), strict=True)
    for rank, (candidate, logprob) in enumerate(candidates, 1):
        if logprob > -math.inf:
            entry.setdefault(candidate, Logprob(logprob, rank))
    return entry
