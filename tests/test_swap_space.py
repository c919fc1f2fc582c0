"""The laws of swapping, on a device without jax: what goes to the host, when it comes back, what is never moved."""

from collections import Counter

import pytest

from jaxpaged.block_pool import BlockPool, SwapSpace
from jaxpaged.memory import PreemptionCosts
from jaxpaged.request import Status
from test_scheduler import prompt, run_all
from toy_device import ToyEngine


def two_that_outgrow_their_pool(**settings):
    """The second is preempted when the first needs a fifth block."""
    engine = ToyEngine(**({"num_device_blocks": 7, "max_model_len": 28, "num_host_blocks": 8} | settings))
    return engine, (engine.add(prompt(14), max_tokens=9), engine.add(prompt(11, 200), max_tokens=9))


def until_preempted(engine, request):
    while not request.num_preemptions:
        engine.step()
    return engine.steps[-1]


# ---- a request goes and comes back


def test_a_swapped_request_computes_no_token_twice():
    engine, requests = two_that_outgrow_their_pool()
    run_all(engine, requests)
    assert requests[1].num_preemptions > 0
    assert sum(step.num_scheduled_tokens for step in engine.steps) == sum(len(r.token_ids) - 1 for r in requests)


def test_blocks_go_to_the_host_in_the_step_that_takes_them_and_come_back_in_the_one_that_needs_them():
    engine, (first, second) = two_that_outgrow_their_pool()
    engine.step()
    assert second.block_ids == [4, 5, 6]
    step = until_preempted(engine, second)
    assert step.swaps_out == ((4, 0), (5, 1), (6, 2)) and not step.swaps_in
    assert (second.host_block_ids, second.block_ids, second.status) == ([0, 1, 2], [], Status.PREEMPTED)
    assert first.block_ids == [0, 1, 2, 3, 6], "the tail of the other is taken first"
    while second.status is not Status.RUNNING:
        assert not engine.steps[-1].swaps_in
        engine.step()
    assert engine.steps[-1].swaps_in == ((1, 5), (2, 6)), "the first was still there"
    assert second.block_ids == [4, 5, 6, 3]
    assert second.host_block_ids == [] and engine.scheduler.swap_space.host.num_used == 0
    run_all(engine, [first, second])


def test_what_is_swapped_again_is_copied_only_where_it_is_new():
    engine = ToyEngine(num_device_blocks=10, max_model_len=40, num_host_blocks=20, max_num_seqs=3)
    requests = [engine.add(prompt(12, 100 * i), max_tokens=27) for i in range(3)]
    run_all(engine, requests)
    swapped_out = [pair for step in engine.steps for pair in step.swaps_out]
    again = [request for request in requests if request.num_preemptions > 1]
    assert again, "somebody left twice"
    # Full blocks go once; a partial one goes each time.
    num_full = sum(len(request.token_ids) // 4 for request in requests)
    assert len(swapped_out) <= num_full + sum(request.num_preemptions for request in requests)


def test_blocks_that_completions_share_are_swapped_once():
    engine = ToyEngine(num_device_blocks=12, max_model_len=44, num_host_blocks=40, max_num_seqs=4)
    first = engine.add(prompt(17), n=4, max_tokens=20, seed=3)
    members = [first, *first.siblings]
    run_all(engine, members)
    assert sum(member.num_preemptions > 0 for member in members) >= 2
    copied = Counter(device for step in engine.steps for device, _ in step.swaps_out if device < 4)
    assert set(copied) == {0, 1, 2, 3} and set(copied.values()) == {1}, "the four full blocks of the prompt"


def test_requests_that_share_blocks_share_them_again_when_they_are_back():
    engine = ToyEngine(num_device_blocks=12, max_model_len=44, num_host_blocks=40, max_num_seqs=4)
    oldest = engine.add(prompt(16, 500), max_tokens=28)
    first = engine.add(prompt(13), n=2, max_tokens=20, seed=3)
    members = [first, *first.siblings]
    while not all(member.host_block_ids for member in members):
        engine.step()
    assert members[0].host_block_ids[:3] == members[1].host_block_ids[:3]
    while not all(member.status is Status.RUNNING for member in members):
        engine.step()
    assert members[0].block_ids[:3] == members[1].block_ids[:3]
    run_all(engine, [oldest, *members])


# ---- a request that is computed again instead


@pytest.mark.parametrize("num_host_blocks", [0, 1, 2])
def test_where_the_host_has_no_room_a_request_is_computed_again(num_host_blocks):
    engine, requests = two_that_outgrow_their_pool(num_host_blocks=num_host_blocks)
    run_all(engine, requests)
    assert requests[1].num_preemptions > 0
    assert engine.scheduler.num_swapped_out == engine.scheduler.num_swapped_in == 0


@pytest.mark.parametrize(
    ("mode", "costs", "is_swapped"),
    [
        ("auto", None, True),
        ("auto", PreemptionCosts(per_token=1.0, per_block=3.9), True),
        ("auto", PreemptionCosts(per_token=1.0, per_block=5.1), False),
        ("swap", PreemptionCosts(per_token=1.0, per_block=5.1), True),
    ],
)
def test_a_request_is_swapped_where_that_costs_less_than_computing_it_again(mode, costs, is_swapped):
    engine, requests = two_that_outgrow_their_pool(preemption_mode=mode, costs=costs)
    step = until_preempted(engine, requests[1])
    assert bool(step.swaps_out) == is_swapped
    run_all(engine, requests)


def test_blocks_that_others_hold_need_no_computing_again():
    """15 tokens in 4 blocks, of which 3 are shared: swapping costs 4 blocks, recomputing 3 tokens."""
    costs = PreemptionCosts(per_token=1.0, per_block=1.0)
    for is_caching in (True, False):
        engine = ToyEngine(
            num_device_blocks=5, max_model_len=20, num_host_blocks=8, costs=costs, enable_prefix_caching=is_caching
        )
        first = engine.add(prompt(13), n=2, max_tokens=7, seed=1)
        second = first.siblings[0]
        step = until_preempted(engine, second)
        assert bool(step.swaps_out) == (not is_caching)
        run_all(engine, [first, second])


def test_a_request_that_has_drawn_its_last_token_is_not_swapped():
    engine = ToyEngine(num_device_blocks=7, max_model_len=24, num_host_blocks=8)
    first, last = engine.add(prompt(12), max_tokens=9), engine.add(prompt(9, 200), max_tokens=2)
    engine.launch(), engine.launch()
    assert last.num_draws_left == 0 and last.status is Status.RUNNING
    while not last.num_preemptions:
        engine.launch()
    assert last.num_in_flight == 2 and not any(step.swaps_out for step in engine.steps)
    while engine.in_flight:
        engine.update()
    run_all(engine, [first, last])


# ---- ends and failures


def test_an_abort_of_a_swapped_request_frees_the_hosts_blocks_at_once():
    engine, (first, second) = two_that_outgrow_their_pool()
    until_preempted(engine, second)
    assert engine.scheduler.swap_space.host.num_used == 3
    engine.abort(second)
    assert engine.scheduler.swap_space.host.num_used == 0
    run_all(engine, [first])


def test_a_swapped_request_whose_token_in_flight_ends_it_frees_the_hosts_blocks():
    engine, (first, second) = two_that_outgrow_their_pool(max_in_flight=2)
    while not second.host_block_ids:
        engine.launch()
    assert second.num_in_flight > 0
    second.max_tokens = second.num_output_tokens + second.num_in_flight
    while engine.in_flight:
        engine.update()
    assert second.finish_reason == "length" and engine.scheduler.swap_space.host.num_used == 0
    run_all(engine, [first, second])


def test_after_a_failed_step_swapped_requests_are_computed_again():
    engine, requests = two_that_outgrow_their_pool()
    until_preempted(engine, requests[1])
    engine.device.host_blocks.clear()
    engine.scheduler.rewind()
    engine.scheduler.check()
    assert engine.scheduler.swap_space.host.num_used == 0
    run_all(engine, requests)


def test_a_reset_of_the_prefix_cache_leaves_swapped_requests_what_they_have():
    engine, (first, second) = two_that_outgrow_their_pool()
    until_preempted(engine, second)
    engine.abort(first)
    assert engine.scheduler.reset_prefix_cache()
    run_all(engine, [second])
    assert engine.scheduler.num_swapped_out == 3


# ---- the books


def swap_space(num_device_blocks=8, num_host_blocks=8):
    device = BlockPool(num_device_blocks)
    return device, SwapSpace(device, num_host_blocks)


def test_a_block_that_the_host_holds_already_is_not_copied_again_while_both_sides_keep_it():
    device, space = swap_space()
    blocks = device.allocate(3)
    host, copies = space.swap_out(blocks, 2)
    assert (host, copies) == ([0, 1, 2], [(0, 0), (1, 1), (2, 2)])
    assert space.num_to_copy(blocks) == 1
    again, copies = space.swap_out(blocks, 3)
    assert (again, copies) == ([0, 1, 3], [(2, 3)]), "the third was not full"
    space.host.free(host), space.host.free(again)
    assert space.swap_out(blocks, 3) == ([0, 1, 3], []), "freed blocks keep what they hold"
    space.host.free([0, 1, 3])
    space.host.allocate(8)
    assert space.num_to_copy(blocks) == 3


def test_a_block_that_is_still_on_the_device_is_taken_up_again():
    device, space = swap_space()
    blocks = device.allocate(3)
    host, _ = space.swap_out(blocks, 2)
    device.free(blocks)
    device.allocate(1)
    assert space.swap_in(host, 2, 4) == ([0, 1, 3], [(2, 3)])
    assert device.ref_counts[:4] == [1, 1, 1, 1]


def test_nothing_is_done_where_there_is_no_room():
    device, space = swap_space(4, 2)
    blocks = device.allocate(3)
    assert space.swap_out(blocks, 3) is None
    assert (space.host.num_used, space.num_to_copy(blocks)) == (0, 3)
    host, _ = space.swap_out(blocks[:2], 2)
    device.free(blocks)
    device.allocate(4)
    assert space.swap_in(host, 2, 2) is None
    space.host.check([host])
    device.check([range(4)])
