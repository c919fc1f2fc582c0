"""The laws of the host side under random load, and mutations that the toy device must catch."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import toy_device
from jaxpaged import scheduler
from jaxpaged.batch import build
from jaxpaged.block_pool import BlockPool, SwapSpace, block_digest
from jaxpaged.memory import PreemptionCosts
from jaxpaged.request import Request
from jaxpaged.scheduler import Scheduler, _Plan
from jaxpaged.step_data import ON_DEVICE
from toy_device import ToyEngine, expected_tokens

TINY = {"num_device_blocks": 12, "max_num_seqs": 4, "block_size": 4, "max_model_len": 40}


def serve(num_requests: int, *, seed: int, abort_rate: float = 0.1, **settings) -> tuple[ToyEngine, list[Request]]:
    """Random requests with few different prefixes come while others run; some are aborted. Checks every outcome."""
    rng = random.Random(seed)
    engine = ToyEngine(**(TINY | settings))
    common = [rng.randrange(50) for _ in range(20)]
    prefixes = [[rng.randrange(50) for _ in range(num_own)] + common[num_own:] for num_own in (1, 4, 4, 20)]
    members, num_left = [], num_requests
    while num_left > 0 or engine.scheduler.has_unfinished():
        while num_left > 0 and rng.random() < 0.5:
            prompt = rng.choice(prefixes)[: rng.randrange(1, 20)] + [rng.randrange(50) for _ in range(rng.randrange(8))]
            n = rng.choice([1, 1, 1, 2, 3])
            first = engine.add(
                prompt, n=n, max_tokens=rng.randrange(1, 14), seed=rng.randrange(2**64), eos=range(30),
                stop_token_ids=[30, 31], ignore_eos=rng.random() < 0.5,
            )  # fmt: skip
            members += [first, *first.siblings]
            num_left -= n
        if engine.scheduler.has_unfinished():
            if rng.random() < abort_rate:
                engine.abort(rng.choice([m for m in members if not m.is_finished]))
            if engine.scheduler.has_unfinished():
                engine.step()
    for member in members:
        assert member.is_finished
        if member.finish_reason != "abort":
            assert member.output_token_ids == expected_tokens(member)
    assert engine.pool.num_used == engine.scheduler.swap_space.host.num_used == 0 and not engine.scheduler.requests
    return engine, members


def test_a_thousand_random_requests_with_random_aborts_in_a_tiny_pool_yield_their_tokens_and_free_all_blocks():
    engine, members = serve(1000, seed=0, max_num_batched_tokens=24)
    assert len(members) >= 1000
    assert engine.scheduler.num_preemptions > 100 and engine.scheduler.num_prefix_hits > 1000
    assert sum(len(step.copies) for step in engine.steps) > 50
    assert sum(m.finish_reason == "abort" for m in members) > 30
    assert sum(m.finish_reason == "stop" for m in members) > 30


@pytest.mark.parametrize("is_caching", [True, False])
@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
@pytest.mark.parametrize("budget", [1, 2, 3, 15, 16, 17, 2048])
def test_any_budget_and_block_size_with_caching_on_or_off_yields_the_same_tokens(budget, block_size, is_caching):
    serve(
        40,
        seed=budget,
        max_num_batched_tokens=budget,
        block_size=block_size,
        num_device_blocks=max(48 // block_size, 4),
        enable_prefix_caching=is_caching,
    )


@pytest.mark.parametrize("num_decode_steps", [1, 3, 8])
@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
def test_any_number_of_steps_in_flight_and_of_draws_in_a_step_yields_the_same_tokens(max_in_flight, num_decode_steps):
    engine, members = serve(
        300, seed=3, max_num_batched_tokens=24, max_in_flight=max_in_flight, num_decode_steps=num_decode_steps
    )
    assert engine.scheduler.num_preemptions > 30 and engine.scheduler.num_prefix_hits > 300
    assert sum(m.finish_reason == "abort" for m in members) > 10
    assert sum(m.finish_reason == "stop" for m in members) > 10
    most_draws = max(r.num_draws for step in engine.steps for r in step.requests)
    assert min(num_decode_steps, 2) <= most_draws <= num_decode_steps
    has_unknown_tokens = any(r.token_ids == (ON_DEVICE,) for step in engine.steps for r in step.requests)
    assert has_unknown_tokens == (max_in_flight > 1)


@pytest.mark.parametrize("max_num_seqs", [3, 4, 9])
def test_any_number_of_rows_yields_the_same_tokens(max_num_seqs):
    engine, _ = serve(80, seed=1, max_num_seqs=max_num_seqs, num_device_blocks=11)
    assert max(len(step.requests) for step in engine.steps) == max_num_seqs or engine.scheduler.num_preemptions


def test_a_pool_that_holds_one_request_serves_all_one_after_another():
    engine, _ = serve(60, seed=2, num_device_blocks=10, max_model_len=40, abort_rate=0)
    assert engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("is_caching", [True, False])
@pytest.mark.parametrize("num_host_blocks", [1, 5, 200])
def test_swapping_yields_the_same_tokens_whatever_room_the_host_has(num_host_blocks, is_caching):
    engine, members = serve(
        300, seed=4, max_num_batched_tokens=24, max_in_flight=2, num_decode_steps=2, num_host_blocks=num_host_blocks,
        enable_prefix_caching=is_caching,
    )  # fmt: skip
    scheduler, num_out = engine.scheduler, engine.scheduler.num_swapped_out
    assert scheduler.num_preemptions > 30 and num_out >= (1 if num_host_blocks == 1 else 100)
    assert num_host_blocks == 1 or 50 < scheduler.num_swapped_in < num_out
    assert num_out == sum(len(step.swaps_out) for step in engine.steps)
    assert max(m.num_preemptions for m in members) >= 2


def test_swapping_some_and_computing_others_again_by_cost_yields_the_same_tokens():
    costs = PreemptionCosts(per_token=1.0, per_block=3.9)
    engine, _ = serve(300, seed=4, max_num_batched_tokens=24, max_in_flight=2, num_host_blocks=200, costs=costs)
    num_swapped = sum(bool(step.swaps_out) for step in engine.steps)
    assert 10 < num_swapped < engine.scheduler.num_preemptions - 10


@pytest.mark.parametrize("swap_space", [0, 4])
@pytest.mark.parametrize("num_host_blocks", [1, 5, 200])
def test_keeping_evicted_blocks_on_the_host_yields_the_same_tokens_whatever_room_it_has(num_host_blocks, swap_space):
    engine, _ = serve(
        300, seed=4, max_num_batched_tokens=24, max_in_flight=2, num_decode_steps=2, num_host_blocks=num_host_blocks,
        kv_offloading_size=1, swap_space=swap_space,
    )  # fmt: skip
    scheduler = engine.scheduler
    assert scheduler.num_preemptions > 30 and scheduler.num_offloaded > 100
    assert scheduler.num_host_hits > (0 if num_host_blocks < 200 else 400)
    assert (scheduler.num_swapped_out > 0) == (swap_space > 0)
    assert scheduler.num_offloaded + scheduler.num_swapped_out == sum(len(step.swaps_out) for step in engine.steps)


class AnyOrderOfEvents(RuleBasedStateMachine):
    """Requests come, steps are scheduled and done, aborts fall between the two, in any order."""

    def __init__(self):
        super().__init__()
        self.members: list[Request] = []

    @initialize(
        num_device_blocks=st.integers(7, 12),
        num_host_blocks=st.sampled_from([0, 3, 30]),
        cache=st.sampled_from(["none", "device", "device and host"]),
    )
    def start(self, num_device_blocks, num_host_blocks, cache):
        self.engine = ToyEngine(
            num_device_blocks=num_device_blocks, max_num_seqs=3, block_size=2, max_model_len=14,
            max_num_batched_tokens=5, num_decode_steps=3, num_host_blocks=num_host_blocks,
            enable_prefix_caching=cache != "none", kv_offloading_size=int(cache == "device and host"),
        )  # fmt: skip

    @rule(
        length=st.integers(1, 9), start=st.integers(0, 1), n=st.integers(1, 3), max_tokens=st.integers(1, 5),
        seed=st.integers(0, 3),
    )  # fmt: skip
    def add(self, length, start, n, max_tokens, seed):
        first = self.engine.add([start] * length, n=n, max_tokens=max_tokens, seed=seed, eos=range(100))
        self.members += [first, *first.siblings]

    @precondition(lambda self: len(self.engine.in_flight) < 3 and self.engine.scheduler.has_unfinished())
    @rule()
    def launch(self):
        self.engine.launch()

    @precondition(lambda self: self.engine.in_flight)
    @rule()
    def update(self):
        self.engine.update()

    @precondition(lambda self: self.engine.in_flight)
    @rule()
    def rewind(self):
        self.engine.in_flight.clear()
        self.engine.scheduler.rewind()

    @precondition(lambda self: any(not m.is_finished for m in self.members))
    @rule(data=st.data())
    def abort(self, data):
        self.engine.abort(data.draw(st.sampled_from([m for m in self.members if not m.is_finished])))

    @rule()
    def reset_prefix_cache(self):
        was_idle = self.engine.pool.num_used == 0
        assert self.engine.scheduler.reset_prefix_cache() == was_idle

    @invariant()
    def books_are_right_and_outputs_are_prefixes_of_what_they_must_be(self):
        self.engine.scheduler.check()
        for member in self.members:
            output = member.output_token_ids
            wanted = expected_tokens(member)
            assert output == wanted[: len(output)]
            assert not member.is_finished or member.finish_reason == "abort" or output == wanted

    def teardown(self):
        while self.engine.in_flight:
            self.engine.update()
        self.engine.run(max_steps=1000)
        assert all(m.is_finished for m in self.members)
        assert self.engine.pool.num_used == self.engine.scheduler.swap_space.host.num_used == 0


TestAnyOrderOfEvents = AnyOrderOfEvents.TestCase
TestAnyOrderOfEvents.settings = settings(max_examples=100, stateful_step_count=40, deadline=None, derandomize=True)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 6), st.integers(1, 3)), min_size=1, max_size=8),
    budget=st.integers(1, 20),
    num_blocks=st.integers(9, 16),
    is_caching=st.booleans(),
)
def test_any_set_of_requests_is_served_in_any_pool_that_holds_the_largest(lengths, budget, num_blocks, is_caching):
    engine = ToyEngine(
        block_size=2,
        num_device_blocks=num_blocks,
        max_model_len=18,
        max_num_batched_tokens=budget,
        enable_prefix_caching=is_caching,
    )
    members = []
    for length, max_tokens, n in lengths:
        first = engine.add(range(length), max_tokens=max_tokens, n=n)
        members += [first, *first.siblings]
    engine.run(max_steps=5000)
    assert all(m.output_token_ids == expected_tokens(m) for m in members)


# ---- mutations: each must turn the load above red


def ignore_the_budget(patch):
    original = _Plan.__init__
    patch.setattr(_Plan, "__init__", lambda plan, budget: original(plan, budget + 1))


def skip_the_copy_of_a_fork(patch):
    original = Scheduler._commit
    patch.setattr(Scheduler, "_commit", lambda self, plan: replace(original(self, plan), copies=()))


def copy_only_to_the_first_child(patch):
    original = Scheduler._commit

    def commit(self, plan):
        step = original(self, plan)
        return replace(step, copies=step.copies[:1])

    patch.setattr(Scheduler, "_commit", commit)


def share_the_partial_block(patch):
    original = Scheduler._fork

    def fork(self, parent):
        forked = original(self, parent)
        for child in forked:
            if child.num_computed_tokens % self.block_size:
                self.pool.share(parent.block_ids[-1:])
                self.pool.free(child.block_ids[-1:])
                child.block_ids[-1] = parent.block_ids[len(child.block_ids) - 1]
        return forked

    patch.setattr(Scheduler, "_fork", fork)


def hit_the_block_of_the_last_token(patch):
    def match_prefix(self, request):
        num_blocks = request.num_tokens // self.block_size
        return self.pool.match(self._digests(request, num_blocks)[:num_blocks]), []

    patch.setattr(Scheduler, "_match_prefix", match_prefix)


def count_one_hit_token_too_many(patch):
    original = Scheduler._start

    def start(self, request, block_ids, num_computed_tokens):
        is_hit = 0 < num_computed_tokens < request.num_tokens - 1 and not request.siblings
        original(self, request, block_ids, num_computed_tokens + is_hit)

    patch.setattr(Scheduler, "_start", start)


def keep_reused_blocks_in_the_index(patch):
    def forget(self, block_id):
        self._num_cached -= block_id in self._block_to_digest

    patch.setattr(BlockPool, "_forget", forget)


def leave_the_parent_out_of_the_digest(patch):
    patch.setattr(scheduler, "block_digest", lambda parent, tokens, context: block_digest(b"", tokens, context))


def index_blocks_before_they_are_full(patch):
    original = Scheduler._digests

    def index(self, request):
        for i, digest in enumerate(original(self, request, len(request.token_ids) // self.block_size)):
            if i < len(request.block_ids):
                self.pool.index(request.block_ids[i], digest)

    patch.setattr(Scheduler, "_index_full_blocks", index)


def hit_blocks_of_the_same_step(patch):
    original = Scheduler._schedule_tokens

    def schedule_tokens(self, plan, request):
        original(self, plan, request)
        if request in plan.scheduled and self.config.enable_prefix_caching:
            scheduled = plan.scheduled[request]
            request.num_computed_tokens += scheduled.num_scheduled_tokens
            self._index_full_blocks(request)
            request.num_computed_tokens -= scheduled.num_scheduled_tokens

    patch.setattr(Scheduler, "_schedule_tokens", schedule_tokens)


def index_blocks_of_unknown_tokens(patch):
    original = Scheduler._commit

    def commit(self, plan):
        for request in self.running:
            request.token_ids += [0] * (request.num_in_flight + 1)
        step = original(self, plan)
        for request in self.running:
            del request.token_ids[-(request.num_in_flight + 1) :]
        return step

    patch.setattr(Scheduler, "_commit", commit)


def restart_a_request_whose_token_is_in_flight(patch):
    original = Scheduler._preempt

    def preempt(self, plan, request):
        request.num_in_flight = 0
        original(self, plan, request)

    patch.setattr(Scheduler, "_preempt", preempt)


def take_outputs_in_the_wrong_order(patch):
    original = Scheduler.update

    def update(self, step, output):
        return original(self, step, replace(output, token_id_ib=output.token_id_ib[:, ::-1]))

    patch.setattr(Scheduler, "update", update)


def draw_beyond_max_tokens(patch):
    left = Request.num_draws_left.fget
    patch.setattr(Request, "num_draws_left", property(lambda self: left(self) + 1))


def keep_what_is_drawn_after_the_end(patch):
    original = Request.append

    def append(self, token_id, logprobs=None):
        original(self, token_id, logprobs)
        if self.finish_reason == "stop" and self.num_in_flight and self.num_output_tokens < self.max_tokens:
            self.finish_reason = None

    patch.setattr(Request, "append", append)


def preempt_the_first_arrival(patch):
    original = Scheduler._preempt
    patch.setattr(Scheduler, "_preempt", lambda self, plan, request: original(self, plan, self.running[0]))


def forget_to_release_rows(patch):
    original = Scheduler._commit
    patch.setattr(Scheduler, "_commit", lambda self, plan: replace(original(self, plan), released=()))


def free_a_block_too_early(patch):
    original = BlockPool.free

    def free(self, block_ids):
        for block_id in block_ids:
            if self.ref_counts[block_id] > 1:
                self.ref_counts[block_id] = 1
        original(self, block_ids)

    patch.setattr(BlockPool, "free", free)


def mutate_inputs(patch, change):
    def mutated(step, buckets, scratch_block):
        return change(build(step, buckets, scratch_block))

    patch.setattr(toy_device, "build", mutated)


def send_a_wrong_block_id(patch):
    def change(inputs):
        updates = inputs.block_updates
        if updates is None:
            return inputs
        return replace(inputs, block_updates=replace(updates, block_w=(updates.block_w + 1) % 12))

    mutate_inputs(patch, change)


def forget_block_updates(patch):
    mutate_inputs(patch, lambda inputs: replace(inputs, block_updates=None))


def send_positions_off_by_one(patch):
    mutate_inputs(patch, lambda inputs: replace(inputs, context_len_b=inputs.context_len_b + 1))


def send_tokens_shifted_by_one(patch):
    mutate_inputs(patch, lambda inputs: replace(inputs, token_t=inputs.token_t + (inputs.token_t >= 0)))


def swap_the_halves_of_seeds(patch):
    def change(inputs):
        rows = inputs.row_updates
        if rows is None:
            return inputs
        return replace(inputs, row_updates=replace(rows, seed_u2=rows.seed_u2[:, ::-1]))

    mutate_inputs(patch, change)


MUTATIONS = [
    ignore_the_budget,
    skip_the_copy_of_a_fork,
    copy_only_to_the_first_child,
    share_the_partial_block,
    hit_the_block_of_the_last_token,
    count_one_hit_token_too_many,
    keep_reused_blocks_in_the_index,
    leave_the_parent_out_of_the_digest,
    index_blocks_before_they_are_full,
    hit_blocks_of_the_same_step,
    index_blocks_of_unknown_tokens,
    restart_a_request_whose_token_is_in_flight,
    take_outputs_in_the_wrong_order,
    draw_beyond_max_tokens,
    keep_what_is_drawn_after_the_end,
    preempt_the_first_arrival,
    forget_to_release_rows,
    free_a_block_too_early,
    send_a_wrong_block_id,
    forget_block_updates,
    send_positions_off_by_one,
    send_tokens_shifted_by_one,
    swap_the_halves_of_seeds,
]


def swap_in_from_a_wrong_host_block(patch):
    original = SwapSpace.swap_in

    def swap_in(self, *arguments):
        swapped = original(self, *arguments)
        return swapped and (swapped[0], [((h + 1) % self.host.num_blocks, d) for h, d in swapped[1]])

    patch.setattr(SwapSpace, "swap_in", swap_in)


def swap_in_nothing(patch):
    original = Scheduler._commit
    patch.setattr(Scheduler, "_commit", lambda self, plan: replace(original(self, plan), swaps_in=()))


def swap_out_what_the_step_has_written(patch):
    executed, swap_out = toy_device.ToyDevice.execute, toy_device.ToyDevice._swap_out
    patch.setattr(toy_device.ToyDevice, "_swap_out", lambda self, inputs: None)

    def execute(self, inputs):
        output = executed(self, inputs)
        swap_out(self, inputs)
        return output

    patch.setattr(toy_device.ToyDevice, "execute", execute)


def take_up_blocks_that_hold_something_else_by_now(patch):
    patch.setattr(SwapSpace, "_are_alike", lambda self, twins: self.device.ref_counts[twins.device_block] == 0)


def take_a_partial_block_for_what_it_was(patch):
    original = SwapSpace._pair
    patch.setattr(SwapSpace, "_pair", lambda self, *blocks, is_full: original(self, *blocks, is_full=True))


def count_a_token_too_many_as_swapped_in(patch):
    original = Scheduler._swap_in

    def swap_in(self, request):
        request.num_computed_tokens += 1
        return original(self, request)

    patch.setattr(Scheduler, "_swap_in", swap_in)


def keep_the_hosts_blocks(patch):
    patch.setattr(Scheduler, "_read_host_blocks", lambda self: self._swaps_in.clear())


def swap_out_one_block_too_few(patch):
    original = SwapSpace.swap_out

    def swap_out(self, block_ids, num_full):
        swapped = original(self, block_ids, num_full)
        return swapped and (swapped[0], swapped[1][:-1])

    patch.setattr(SwapSpace, "swap_out", swap_out)


MUTATIONS_OF_SWAPPING = [
    swap_in_from_a_wrong_host_block,
    swap_in_nothing,
    swap_out_what_the_step_has_written,
    swap_out_one_block_too_few,
    take_up_blocks_that_hold_something_else_by_now,
    take_a_partial_block_for_what_it_was,
    count_a_token_too_many_as_swapped_in,
    keep_the_hosts_blocks,
]


@pytest.mark.parametrize("mutation", [*MUTATIONS, *MUTATIONS_OF_SWAPPING], ids=lambda mutation: mutation.__name__)
def test_a_mutation_of_the_host_side_is_caught(mutation, monkeypatch):
    mutation(monkeypatch)
    num_host_blocks = 30 if mutation in MUTATIONS_OF_SWAPPING else 0
    with pytest.raises((AssertionError, RuntimeError, IndexError, KeyError, ValueError)) as caught:
        for seed in (2, 4, 5):
            serve(
                300, seed=seed, max_num_batched_tokens=10, max_in_flight=2, num_decode_steps=1 + 2 * (seed == 5),
                num_host_blocks=num_host_blocks,
            )  # fmt: skip
    print(f"{mutation.__name__}: {caught.type.__name__}: {caught.value}")
