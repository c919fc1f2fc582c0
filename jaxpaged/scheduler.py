"""Which tokens are computed next, and in whose blocks. Plain host Python: returns data, never touches the device.

One rule serves prefill, chunks, prefix hits, recomputation and decoding: `num_computed_tokens` chases `num_tokens`.
In each step running requests with one token left get it first, then unfinished prefills in order of arrival, then
waiting requests are admitted, all within the token budget. Where blocks run out, the request that arrived last is
preempted: it gives its blocks back and is computed again later. The oldest request can take blocks from all others,
so that every step makes progress.
"""

import bisect
import time
from collections import deque

from jaxpaged.block_pool import ROOT_DIGEST, BlockPool, block_digest
from jaxpaged.config import EngineConfig
from jaxpaged.memory import blocks_for
from jaxpaged.outputs import Logprob
from jaxpaged.request import Request, Status
from jaxpaged.step_data import ON_DEVICE, ScheduledRequest, ScheduledStep, StartedRow, StepOutput


class _Plan:
    """A step while it is put together."""

    def __init__(self, budget: int):
        self.budget = budget
        self.scheduled: dict[str, ScheduledRequest] = {}
        self.started: dict[int, Request] = {}
        self.copies: list[tuple[int, int]] = []
        self.num_preempted = 0
        self.has_stalled = False


class Scheduler:
    """`schedule()` says what a step computes, `update()` takes what it drew."""

    def __init__(self, config: EngineConfig, digest_context: bytes = b""):
        assert config.num_device_blocks is not None and isinstance(config.block_size, int)
        self.config = config
        self.block_size = config.block_size
        self.pool = BlockPool(config.num_device_blocks)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.requests: dict[str, Request] = {}
        self._digest_context = digest_context
        self._free_rows = list(range(config.max_num_seqs))
        self._released: set[int] = set()
        self.num_preemptions = 0
        self.num_prefix_queries = 0
        self.num_prefix_hits = 0

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

    def finish(self, request: Request):
        """Ends a request, wherever it is, and frees its row and blocks at once; siblings not forked yet end with it."""
        if request.status is Status.RUNNING:
            self.running.remove(request)
            self._release(request)
        elif request in self.waiting:
            self.waiting.remove(request)
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
        """Forgets cached content; False while requests hold blocks."""
        return self.pool.reset_index()

    def check(self):
        """RuntimeError unless blocks, rows and queues agree (see `BlockPool.check`)."""
        self.pool.check([request.block_ids for request in self.running])
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

    def schedule(self) -> ScheduledStep | None:
        """The next step; None when there is nothing to compute."""
        if not self.has_unfinished():
            return None
        plan = _Plan(self.config.max_num_batched_tokens)
        for request in list(self.running):
            self._fork(plan, request)
        decodes = [r for r in self.running if r.num_tokens_to_compute == 1]
        prefills = [r for r in self.running if r.num_tokens_to_compute > 1]
        self._schedule_running(plan, decodes + prefills)
        self._admit(plan)
        if not plan.scheduled:
            raise RuntimeError(
                f"nothing could be scheduled: {len(self.running)} running, {len(self.waiting)} waiting, "
                f"{self.pool.num_available} of {self.pool.num_blocks} blocks available"
            )
        return self._commit(plan)

    def update(self, step: ScheduledStep, output: StepOutput) -> list[Request]:
        """Appends the drawn tokens, ends requests that are at their end; returns those that got a token."""
        updated = []
        for i, scheduled in enumerate(step.requests):
            request = self.requests.get(scheduled.request_id)
            if request is None or not scheduled.samples:
                continue
            token_id = int(output.token_id_b[i])
            if scheduled.num_logprobs is not None:
                _append_logprobs(request, token_id, output, i, scheduled.num_logprobs)
            request.append(token_id)
            if request.finish_reason is not None:
                self.finish(request)
            updated.append(request)
        return updated

    def rewind(self):
        """After a step that may not have run: forgets all K and V, and running requests are computed again."""
        plan = _Plan(0)
        while self.running:
            self._preempt(plan, self.running[-1])
        self.pool.reset_index()

    def _schedule_running(self, plan: _Plan, requests: list[Request]):
        for request in requests:
            if request.status is Status.RUNNING:  # one before it may have preempted it
                self._schedule_tokens(plan, request)

    def _schedule_tokens(self, plan: _Plan, request: Request):
        """Gives a running request as many of its tokens as budget and blocks allow."""
        num_tokens = min(request.num_tokens_to_compute, plan.budget)
        if num_tokens == 0:
            return
        num_tokens, new_block_ids = self._reserve(plan, request, num_tokens)
        if num_tokens == 0:
            plan.has_stalled = True
            return
        start, stop = request.num_computed_tokens, request.num_computed_tokens + num_tokens
        token_ids = tuple(request.token_ids[start:stop])
        samples = stop == request.num_tokens
        if samples and num_tokens == 1 and request.is_last_token_on_device:
            token_ids = (ON_DEVICE,)
        plan.budget -= num_tokens
        plan.scheduled[request.id] = ScheduledRequest(
            request_id=request.id,
            row=_row(request),
            start=start,
            token_ids=token_ids,
            first_new_block=len(request.block_ids) - len(new_block_ids),
            new_block_ids=tuple(new_block_ids),
            samples=samples,
            is_prefill=start < request.num_prompt_tokens,
            num_logprobs=request.params.logprobs if samples else None,
        )

    def _reserve(self, plan: _Plan, request: Request, num_tokens: int) -> tuple[int, list[int]]:
        """(tokens that the request has blocks for, the blocks added), preempting later arrivals if need be."""
        needed = blocks_for(request.num_computed_tokens + num_tokens, self.block_size) - len(request.block_ids)
        while needed > self.pool.num_available and self.running[-1] is not request:
            self._preempt(plan, self.running[-1])
        num_new = max(min(needed, self.pool.num_available), 0)
        new_block_ids = self.pool.allocate(num_new)
        request.block_ids += new_block_ids
        room = len(request.block_ids) * self.block_size - request.num_computed_tokens
        return min(num_tokens, room), new_block_ids

    def _admit(self, plan: _Plan):
        """Lets waiting requests run, in order, while budget, rows and blocks for the whole prompt are there.

        Nobody is admitted in a step in which a running request lost its blocks or found none.
        """
        while self.waiting and plan.budget and self._free_rows and not plan.num_preempted and not plan.has_stalled:
            if not self.pool.num_available:
                break
            request = self.waiting[0]
            hits = self._match_prefix(request)
            needed = blocks_for(request.num_tokens, self.block_size) - len(hits)
            if needed > self.pool.num_available - self.pool.num_unheld(hits):
                break
            self.waiting.popleft()
            self.pool.share(hits)
            num_cached = len(hits) * self.block_size
            self._start(plan, request, hits, num_cached)
            if request.num_cached_tokens is None:
                request.num_cached_tokens = num_cached
                self.num_prefix_queries += request.num_tokens
                self.num_prefix_hits += num_cached
            self._schedule_running(plan, [request, *self._fork(plan, request)])

    def _fork(self, plan: _Plan, parent: Request) -> list[Request]:
        """Starts the siblings of a request whose prompt is computed but for its last token; returns those started.

        Full blocks are shared. A partial block stays with the parent and is copied for each sibling. Siblings for
        which no row or block is left wait like any other request.
        """
        if not parent.is_at_fork:
            return []
        num_full, num_partial = divmod(parent.num_computed_tokens, self.block_size)
        shared, partial = parent.block_ids[:num_full], parent.block_ids[num_full : num_full + 1]
        num_copied = int(num_partial > 0)
        forked = []
        siblings, parent.siblings = parent.siblings, []
        for sibling in siblings:
            if not self._free_rows or self.pool.num_available < num_copied:
                break
            self.pool.share(shared)
            copied = self.pool.allocate(num_copied)
            plan.copies += zip(partial, copied, strict=False)
            sibling.num_cached_tokens = parent.num_cached_tokens
            sibling.digests = list(parent.digests)
            self._start(plan, sibling, shared + copied, parent.num_computed_tokens)
            forked.append(sibling)
        for sibling in siblings[len(forked) :]:
            self._wait(sibling)
        return forked

    def _start(self, plan: _Plan, request: Request, block_ids: list[int], num_computed_tokens: int):
        request.block_ids = list(block_ids)
        request.num_computed_tokens = num_computed_tokens
        request.row = self._free_rows.pop()
        request.is_last_token_on_device = False
        request.move(Status.RUNNING)
        if request.first_scheduled_time is None:
            request.first_scheduled_time = time.monotonic()
        bisect.insort(self.running, request, key=lambda r: r.arrival)
        plan.started[request.row] = request

    def _preempt(self, plan: _Plan, request: Request):
        """Takes the blocks of a running request, undoing what this step had planned for it."""
        undone = plan.scheduled.pop(request.id, None)
        if undone is not None:
            plan.budget += undone.num_scheduled_tokens
        plan.copies = [(source, target) for source, target in plan.copies if target not in request.block_ids]
        plan.started.pop(_row(request), None)
        plan.num_preempted += 1
        self.num_preemptions += 1
        request.num_preemptions += 1
        self.running.remove(request)
        self._release(request)
        request.num_computed_tokens = 0
        request.move(Status.PREEMPTED)
        self._wait(request)

    def _wait(self, request: Request):
        """Queues a request by its arrival: siblings and preempted requests may be older than those that wait."""
        bisect.insort(self.waiting, request, key=lambda r: r.arrival)

    def _release(self, request: Request):
        self.pool.free(request.block_ids)
        request.block_ids = []
        self._free_rows.append(_row(request))
        self._released.add(_row(request))
        request.row = None

    def _commit(self, plan: _Plan) -> ScheduledStep:
        """Counts the planned tokens as computed, indexes the blocks they fill, and returns the step."""
        for scheduled in plan.scheduled.values():
            request = self.requests[scheduled.request_id]
            request.num_computed_tokens += scheduled.num_scheduled_tokens
            if self.config.enable_prefix_caching:
                self._index_full_blocks(request, scheduled.start)
        step = ScheduledStep(
            requests=tuple(plan.scheduled.values()),
            started=tuple(_started_row(request) for request in plan.started.values()),
            released=tuple(sorted(self._released - plan.started.keys())),
            copies=tuple(plan.copies),
            num_preempted=plan.num_preempted,
        )
        self._released.clear()
        return step

    # ---- prefix cache

    def _match_prefix(self, request: Request) -> list[int]:
        """Cached blocks that the request can take up; the block of its last token is never one of them."""
        if not self.config.enable_prefix_caching:
            return []
        num_blocks = (request.num_tokens - 1) // self.block_size
        return self.pool.match(self._digests(request, num_blocks)[:num_blocks])

    def _index_full_blocks(self, request: Request, start: int):
        """Makes the blocks findable that are full since `start` tokens were computed."""
        first, last = start // self.block_size, request.num_computed_tokens // self.block_size
        if first < last:
            digests = self._digests(request, last)
            for i in range(first, last):
                self.pool.index(request.block_ids[i], digests[i])

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


def _started_row(request: Request) -> StartedRow:
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
    )


def _append_logprobs(request: Request, token_id: int, output: StepOutput, i: int, num_logprobs: int):
    logprobs = output.logprobs
    assert logprobs is not None, "a request asked for logprobs, but the step returned none"
    width = logprobs.top_id_bk.shape[1] if num_logprobs == -1 else num_logprobs
    sampled = float(logprobs.sampled_b[i])
    entry = {token_id: Logprob(sampled, int(logprobs.rank_b[i]))}
    for rank in range(width):
        entry.setdefault(int(logprobs.top_id_bk[i, rank]), Logprob(float(logprobs.top_logprob_bk[i, rank]), rank + 1))
    request.logprobs.append(entry)
    request.cumulative_logprob += sampled
