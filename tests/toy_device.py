"""A device and an engine's loop in plain Python, to test the host side without jax.

What K and V of a token hold depends on every token before it. Here a slot holds exactly that: the tuple of tokens
that were attended to, read from the slots that the page table names, and the token itself. A wrong block, a missing
copy, a stale hit or a wrong position leaves a wrong tuple behind, and wrong tokens follow from it.
"""

from collections import deque

import numpy as np

from jaxpaged.batch import DROPPED, Buckets, build, make_buckets
from jaxpaged.config import EngineConfig
from jaxpaged.request import Request
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.scheduler import Scheduler
from jaxpaged.step_data import NOT_DRAWN, ON_DEVICE, ScheduledStep, StepInputs, StepLogprobs, StepOutput

VOCAB = 997
STALE = (-7,)


def draw(token_ids, seed: int, child: int) -> int:
    """The token that follows: depends on all tokens, the seed and the child."""
    return hash((tuple(token_ids), seed, child)) % VOCAB


def most_probable(token_ids, num: int) -> list[tuple[int, float]]:
    """(token, log-probability) of the most probable tokens that follow, for a greedy request of seed and child 0."""
    drawn, spread = draw(token_ids, 0, 0), hash((tuple(token_ids), VOCAB)) % 100_003
    return [((drawn + 7 * k) % VOCAB, -0.1 * (k + 1) - spread / 100_003) for k in range(num)]


def expected_tokens(request: Request) -> list[int]:
    """What a request must yield, whatever happens around it."""
    token_ids, ends = list(request.prompt_token_ids), set(request.params.stop_token_ids or ())
    if not request.params.ignore_eos:
        ends |= request.eos_token_ids
    for _ in range(request.max_tokens):
        token_ids.append(draw(token_ids, request.seed, request.child))
        if token_ids[-1] in ends:
            break
    return token_ids[request.num_prompt_tokens :]


class ToyDevice:
    """Executes `StepInputs` as the runner does: blocks moved, row updates, block updates, then the tokens."""

    def __init__(self, config: EngineConfig, buckets: Buckets):
        self.block_size = config.block_size
        self.scratch_block = config.num_device_blocks
        self.blocks = [[STALE] * self.block_size for _ in range(self.scratch_block + 1)]
        self.host_blocks: dict[int, list] = {}
        self.page_table = np.full((buckets.num_rows, buckets.max_blocks), self.scratch_block, np.int32)
        self.last_token = [0] * buckets.num_rows
        self.seed_child = {}
        self.stop_ids = {}

    def slot(self, row: int, position: int) -> tuple[int, int]:
        """(block, offset) of a row's token."""
        return int(self.page_table[row, position // self.block_size]), position % self.block_size

    def execute(self, inputs: StepInputs) -> StepOutput:
        self._swap_out(inputs)
        self._copy(inputs)
        self._swap_in(inputs)
        self._update_rows(inputs)
        b = len(inputs.row_b)
        starts = np.minimum(np.arange(b + 1), inputs.num_requests) if inputs.is_decode else inputs.query_start_b1
        most_draws = max(int(inputs.num_draws_b.max()), 1)
        token_id_ib = np.full((most_draws, b), NOT_DRAWN, np.int32)
        logprobs = _no_logprobs((most_draws, b), inputs.num_logprobs) if inputs.has_logprobs else None
        written = {}
        for i in range(inputs.num_requests):
            token_ids = inputs.token_t[starts[i] : starts[i + 1]].tolist()
            row, context_len = int(inputs.row_b[i]), int(inputs.context_len_b[i])
            history = self._attend(i, row, context_len - len(token_ids), written)
            for token_id in token_ids:
                history += (self.last_token[row] if token_id == ON_DEVICE else token_id,)
                self._write(i, row, history, written)
            for d in range(max(int(inputs.num_draws_b[i]), 1)):
                if d > 0:
                    history += (self.last_token[row],)
                    self._write(i, row, history, written)
                token_id_ib[d, i] = self.last_token[row] = draw(history, *self.seed_child[row])
                if logprobs is not None:
                    ids, values = zip(*most_probable(history, inputs.num_logprobs), strict=True)
                    logprobs.top_id_ibk[d, i], logprobs.top_logprob_ibk[d, i] = ids, values
                    logprobs.drawn_ib[d, i], logprobs.rank_ib[d, i] = values[0], 1
                if token_id_ib[d, i] in self.stop_ids[row]:
                    break
        return StepOutput(token_id_ib=token_id_ib, logprobs=logprobs)

    def _swap_out(self, inputs: StepInputs):
        for swap in inputs.swaps_out:
            assert set(swap.device_block_c[len(swap.host_blocks) :].tolist()) <= {self.scratch_block}
            for block, host_block in zip(swap.device_block_c.tolist(), swap.host_blocks.tolist(), strict=False):
                self.host_blocks[host_block] = list(self.blocks[block])

    def _swap_in(self, inputs: StepInputs):
        for swap in inputs.swaps_in:
            assert set(swap.device_block_c[len(swap.host_blocks) :].tolist()) <= {DROPPED}
            for host_block, block in zip(swap.host_blocks.tolist(), swap.device_block_c.tolist(), strict=False):
                self.blocks[block] = list(self.host_blocks[host_block])

    def _copy(self, inputs: StepInputs):
        if inputs.copies is not None:
            pairs = zip(inputs.copies.source_c.tolist(), inputs.copies.target_c.tolist(), strict=True)
            content = {target: list(self.blocks[source]) for source, target in pairs if target != DROPPED}
            for target, slots in content.items():
                self.blocks[target] = slots

    def _update_rows(self, inputs: StepInputs):
        if inputs.row_updates is not None:
            rows = inputs.row_updates
            for u, row in enumerate(rows.row_u.tolist()):
                if row != DROPPED:
                    self.page_table[row] = rows.page_table_up[u]
                    self.stop_ids[row] = set(rows.stop_id_us[u].tolist()) - {NOT_DRAWN}
                    self.seed_child[row] = (int(rows.seed_u2[u, 0]) << 32 | int(rows.seed_u2[u, 1]), rows.child_u[u])
        if inputs.block_updates is not None:
            updates = inputs.block_updates
            for row, column, block in zip(updates.row_w, updates.column_w, updates.block_w, strict=True):
                if row != DROPPED:
                    self.page_table[row, column] = block

    def _attend(self, i: int, row: int, num_tokens: int, written: dict) -> tuple[int, ...]:
        slots = [self.slot(row, position) for position in range(num_tokens)]
        for slot in slots:
            assert slot not in written, f"request {i} reads {slot}, which request {written[slot]} writes in this step"
        return tuple(self.blocks[block][offset][-1] for block, offset in slots)

    def _write(self, i: int, row: int, history: tuple[int, ...], written: dict):
        block, offset = self.slot(row, len(history) - 1)
        assert block != self.scratch_block, f"row {row} writes position {len(history) - 1} to the scratch block"
        holders = np.unique(np.argwhere(self.page_table == block)[:, 0]).tolist()
        assert holders == [row], f"row {row} writes block {block}, which rows {holders} hold"
        self.blocks[block][offset] = history
        written[block, offset] = i


def _no_logprobs(shape: tuple[int, int], num_logprobs: int) -> StepLogprobs:
    top = *shape, num_logprobs
    return StepLogprobs(np.zeros(shape), np.zeros(shape, np.int32), np.zeros(top, np.int32), np.zeros(top))


class ToyEngine:
    """Scheduler, batch and toy device in a loop that checks every step.

    `max_in_flight` steps are scheduled and executed before the output of the first of them is told to the scheduler.
    """

    def __init__(
        self, *, digest_context: bytes = b"", max_in_flight: int = 1, num_host_blocks: int = 0, costs=None, **settings
    ):
        defaults = {"block_size": 4, "num_device_blocks": 32, "max_model_len": 64, "max_num_seqs": 4}
        defaults |= {"max_num_batched_tokens": 64, "num_decode_steps": 1}
        self.config = EngineConfig(**(defaults | settings))
        self.buckets = make_buckets(self.config)
        self.scheduler = Scheduler(self.config, digest_context, num_host_blocks)
        self.scheduler.costs = costs
        self.device = ToyDevice(self.config, self.buckets)
        self.pool = self.scheduler.pool
        self.steps: list[ScheduledStep] = []
        self.in_flight: deque[tuple[ScheduledStep, StepOutput]] = deque()
        self.updated: list[tuple[Request, int]] = []
        self._max_in_flight = max_in_flight
        self._num_arrived = 0

    def add(self, prompt, *, max_tokens=4, n=1, seed=0, eos=(), **params) -> Request:
        """Queues a prompt; returns its first request, whose `siblings` are the others."""
        params = SamplingParams(n=n, seed=seed, **params)
        members = [
            Request(
                id=f"{self._num_arrived + child}",
                prompt_token_ids=list(prompt),
                params=params,
                arrival=self._num_arrived + child,
                max_tokens=min(max_tokens, self.config.max_model_len - len(prompt)),
                seed=seed,
                eos_token_ids=frozenset(eos),
                parent_id=str(self._num_arrived) if n > 1 else None,
                child=child,
            )
            for child in range(n)
        ]
        members[0].siblings = members[1:]
        self.scheduler.add(members[0])
        self._num_arrived += n
        return members[0]

    def schedule(self) -> ScheduledStep | None:
        """The next step, which must be legal; None only where steps are in flight."""
        step = self.scheduler.schedule(self.config.num_decode_steps)
        if step is None:
            assert self.in_flight or not self.scheduler.has_unfinished()
            self.scheduler.check()
            return None
        budget = self.config.max_num_batched_tokens
        assert 1 <= step.num_scheduled_tokens <= budget, f"{step.num_scheduled_tokens} tokens in a budget of {budget}"
        for scheduled in step.requests:
            assert scheduled.num_scheduled_tokens >= 1
            request = self.scheduler.requests[scheduled.request_id]
            most = request.num_prompt_tokens + request.max_tokens - 1
            assert scheduled.start + scheduled.num_computed_tokens <= most, "the last token needs no computing"
        rows = [r.row for r in step.requests]
        assert len(set(rows)) == len(rows), f"rows {rows} are not distinct"
        self.scheduler.check()
        self.steps.append(step)
        return step

    def execute(self, step: ScheduledStep) -> StepOutput:
        """What the device draws; afterwards every slot attended to must hold the right tokens."""
        output = self.device.execute(build(step, self.buckets, self.device.scratch_block))
        running = {request.row for request in self.scheduler.running}
        for row in set(range(self.buckets.num_rows)) - running:
            assert (self.device.page_table[row] == self.device.scratch_block).all(), f"free row {row} has blocks"
        for scheduled in step.requests:
            request = self.scheduler.requests.get(scheduled.request_id)
            if request is not None:
                self._check_slots(request, scheduled.start + scheduled.num_computed_tokens)
        return output

    def launch(self) -> bool:
        """Schedules and executes a step, whose output stays in flight. False when there is none to be had."""
        step = self.schedule()
        if step is not None:
            self.in_flight.append((step, self.execute(step)))
        return step is not None

    def update(self) -> ScheduledStep:
        """Tells the scheduler of the oldest step in flight."""
        step, output = self.in_flight.popleft()
        self.updated = self.scheduler.update(step, output)
        self.scheduler.check()
        return step

    def step(self) -> ScheduledStep:
        """One whole step."""
        while len(self.in_flight) < self._max_in_flight and self.launch():
            pass
        return self.update()

    def run(self, max_steps: int = 100_000):
        """Steps until nothing is left."""
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished():
                return
            self.step()
        raise AssertionError(f"not done after {max_steps} steps")

    def abort(self, request: Request):
        """Ends a request and its siblings not forked yet."""
        for member in (request, *request.siblings):
            member.finish_reason = "abort"
        self.scheduler.finish(request)
        self.scheduler.check()

    def _check_slots(self, request: Request, num_tokens: int):
        for position in range(min(num_tokens, len(request.token_ids))):
            block, offset = self.device.slot(request.row, position)
            assert block == request.block_ids[position // self.config.block_size]
            found, wanted = self.device.blocks[block][offset], tuple(request.token_ids[: position + 1])
            assert found == wanted, f"request {request.id}, position {position}, block {block}: {found} ≠ {wanted}"
