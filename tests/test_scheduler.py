"""The laws of scheduling, each on a case small enough to know every block id. Blocks hold 4 tokens."""

import hashlib
import struct

import numpy as np
import pytest

from jaxpaged.request import Status
from jaxpaged.step_data import StepLogprobs, StepOutput
from toy_device import VOCAB, ToyEngine, expected_tokens

BUDGETS = [1, 2, 3, 15, 16, 17]


def tokens_of(step):
    """{request id: tokens scheduled}, in the order of the step."""
    return {r.request_id: r.num_scheduled_tokens for r in step.requests}


def free_queue(engine):
    return list(engine.pool._queue)


def prompt(num_tokens, start=100):
    return list(range(start, start + num_tokens))


def run_all(engine, requests):
    engine.run()
    for request in requests:
        assert request.output_token_ids == expected_tokens(request)
    assert engine.pool.num_used == 0


# ---- budget and order


@pytest.mark.parametrize("budget", BUDGETS)
def test_a_prompt_longer_than_the_budget_is_computed_in_chunks(budget):
    engine = ToyEngine(max_num_batched_tokens=budget)
    request = engine.add(prompt(37), max_tokens=3)
    run_all(engine, [request])
    chunks = [r.num_scheduled_tokens for step in engine.steps for r in step.requests if r.is_prefill]
    assert chunks == [budget] * (37 // budget) + [37 % budget] * bool(37 % budget)
    assert len(engine.steps) == len(chunks) + 2


@pytest.mark.parametrize("budget", BUDGETS)
def test_every_step_stays_within_the_budget_and_makes_progress(budget):
    engine = ToyEngine(max_num_batched_tokens=budget, num_device_blocks=12)
    requests = [engine.add(prompt(5 * i + 1, 10 * i), max_tokens=6) for i in range(7)]
    run_all(engine, requests)
    assert max(step.num_scheduled_tokens for step in engine.steps) == budget


def test_decodes_come_first_then_prefills_by_arrival_then_admissions():
    engine = ToyEngine(max_num_batched_tokens=8, max_num_seqs=8)
    for length in (2, 9, 20, 5):
        engine.add(prompt(length, 10 * length), max_tokens=9)
    assert tokens_of(engine.step()) == {"0": 2, "1": 6}
    assert tokens_of(engine.step()) == {"0": 1, "1": 3, "2": 4}
    assert tokens_of(engine.step()) == {"0": 1, "1": 1, "2": 6}
    engine.add(prompt(3), max_tokens=9)
    assert tokens_of(engine.step()) == {"0": 1, "1": 1, "2": 6}
    assert tokens_of(engine.step()) == {"0": 1, "1": 1, "2": 4, "3": 2}
    assert tokens_of(engine.step()) == {"0": 1, "1": 1, "2": 1, "3": 3, "4": 2}


def test_a_decode_that_arrived_late_comes_before_a_prefill_that_arrived_early():
    engine = ToyEngine(max_num_batched_tokens=8)
    engine.add(prompt(2), max_tokens=9)
    engine.add(prompt(30, 200), max_tokens=9)
    engine.step()
    late = engine.add(prompt(1, 300), max_tokens=9)
    while engine.scheduler.requests["1"].num_tokens_to_compute > 1:
        assert next(iter(tokens_of(engine.step()))) == "0"
    engine.step()
    engine.add(prompt(20, 400), max_tokens=3)
    while late.num_output_tokens == 0:
        engine.step()
    assert list(tokens_of(engine.step())) == ["0", "1", "2", "3"]


def test_waiting_requests_are_admitted_in_order_even_where_a_later_one_would_fit():
    engine = ToyEngine(num_device_blocks=6, max_model_len=24)
    first = engine.add(prompt(12), max_tokens=4)
    engine.add(prompt(17, 200), max_tokens=4)
    small = engine.add(prompt(1, 300), max_tokens=4)
    assert list(tokens_of(engine.step())) == ["0"]
    assert first.status is Status.RUNNING and small.status is Status.WAITING
    engine.run()


def test_nothing_to_do_is_none_and_not_an_empty_step():
    assert ToyEngine().scheduler.schedule() is None


# ---- blocks and the prefix cache


def test_blocks_are_taken_when_their_first_token_is_scheduled():
    engine = ToyEngine(max_num_batched_tokens=5)
    request = engine.add(prompt(9), max_tokens=5)
    assert engine.step().requests[0].new_block_ids == (0, 1)
    step = engine.step()
    assert (step.requests[0].first_new_block, step.requests[0].new_block_ids) == (2, (2,))
    assert [engine.step().requests[0].new_block_ids for _ in range(3)] == [(), (), ()]
    assert request.block_ids == [0, 1, 2]
    step = engine.step()
    assert (step.requests[0].start, step.requests[0].first_new_block, step.requests[0].new_block_ids) == (12, 3, (3,))
    assert request.is_finished and engine.pool.num_used == 0


@pytest.mark.parametrize("k", [1, 2, 5])
def test_a_prompt_of_exactly_k_blocks_sent_twice_has_k_minus_1_blocks_cached(k):
    engine = ToyEngine()
    first = engine.add(prompt(4 * k), max_tokens=2)
    engine.run()
    second = engine.add(prompt(4 * k), max_tokens=2)
    run_all(engine, [first, second])
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 4 * (k - 1))
    assert (engine.scheduler.num_prefix_queries, engine.scheduler.num_prefix_hits) == (8 * k, 4 * (k - 1))


@pytest.mark.parametrize("n", range(1, 14))
def test_a_prefix_hit_covers_at_most_all_full_blocks_before_the_last_token(n):
    engine = ToyEngine()
    engine.add(prompt(16), max_tokens=1)
    engine.run()
    again = engine.add(prompt(n), max_tokens=1)
    run_all(engine, [again])
    assert again.num_cached_tokens == (n - 1) // 4 * 4


def test_a_hit_takes_up_the_very_blocks_and_computes_only_the_rest():
    engine = ToyEngine(num_device_blocks=8)
    engine.add(prompt(10), max_tokens=1)
    engine.run()
    assert free_queue(engine) == [2, 3, 4, 5, 6, 7, 1, 0]
    again = engine.add([*prompt(8), 7, 8, 9], max_tokens=2)
    step = engine.step()
    assert again.block_ids == [0, 1, 2]
    assert (step.requests[0].start, step.requests[0].token_ids) == (8, (7, 8, 9))
    assert step.started[0].block_ids == (0, 1, 2)


def test_a_request_waits_for_the_step_that_fills_blocks_it_can_hit():
    engine = ToyEngine()
    requests = [engine.add(prompt(9), max_tokens=3), engine.add(prompt(9), max_tokens=3), engine.add([1], max_tokens=3)]
    assert len(engine.step().requests) == 1, "the second would compute the same, the third keeps its place behind it"
    step = engine.step()
    assert [(r.start, len(r.token_ids)) for r in step.requests] == [(9, 1), (8, 1), (0, 1)]
    assert requests[1].block_ids[:2] == requests[0].block_ids[:2]
    assert requests[1].block_ids[2:] != requests[0].block_ids[2:]
    run_all(engine, requests)
    assert [r.num_cached_tokens for r in requests] == [0, 8, 0]


def test_a_request_whose_own_blocks_nobody_fills_is_not_kept_waiting():
    engine = ToyEngine()
    engine.add([*prompt(4), 1, 2, 3, 4, 5], max_tokens=3)
    run_all(engine, [engine.add([*prompt(4), 9], max_tokens=1)])
    both = [engine.add([*prompt(4), *(k,) * 5], max_tokens=3) for k in (6, 7)]
    assert len(engine.step().requests) == 2, "the common block is known already"
    run_all(engine, both)
    assert [r.num_cached_tokens for r in both] == [4, 4]


def test_a_block_is_hit_from_the_next_schedule_on():
    engine = ToyEngine(max_num_batched_tokens=12)
    first = engine.add(prompt(20), max_tokens=3)
    second = engine.add([*prompt(16), 7], max_tokens=3)
    third = engine.add([*prompt(12), 8], max_tokens=3)
    engine.step()
    engine.step()
    assert second.num_cached_tokens is None, "it waits for the fourth block"
    engine.step()
    assert (second.num_cached_tokens, third.num_cached_tokens) == (16, 12)
    assert second.block_ids[:4] == first.block_ids[:4]
    run_all(engine, [first, second, third])


def test_blocks_filled_by_decoding_are_hit_too():
    engine = ToyEngine()
    first = engine.add(prompt(3), max_tokens=7)
    engine.run()
    assert first.num_computed_tokens == 9
    follow_up = engine.add([*first.token_ids, 5], max_tokens=2)
    run_all(engine, [first, follow_up])
    assert follow_up.num_cached_tokens == 8


def test_a_block_without_all_its_tokens_is_never_hit():
    engine = ToyEngine()
    engine.add(prompt(7), max_tokens=1)
    engine.run()
    again = engine.add([*prompt(7), 1, 2, 3], max_tokens=1)
    run_all(engine, [again])
    assert again.num_cached_tokens == 4


def test_a_block_with_the_same_tokens_after_another_prefix_is_not_hit():
    engine = ToyEngine()
    engine.add([1, 2, 3, 4, *prompt(4), 9], max_tokens=1)
    engine.run()
    other = engine.add([1, 2, 3, 5, *prompt(4), 9], max_tokens=1)
    moved = engine.add([*prompt(4), 9], max_tokens=1)
    run_all(engine, [other, moved])
    assert (other.num_cached_tokens, moved.num_cached_tokens) == (0, 0)


def test_with_prefix_caching_off_nothing_is_found():
    engine = ToyEngine(enable_prefix_caching=False)
    requests = [engine.add(prompt(12), max_tokens=1)]
    engine.run()
    requests.append(engine.add(prompt(12), max_tokens=1))
    run_all(engine, requests)
    assert requests[1].num_cached_tokens == 0 and engine.pool.num_cached == 0


def test_freed_blocks_keep_their_content_until_they_are_reused_tail_first():
    engine = ToyEngine(num_device_blocks=6, max_model_len=24)
    engine.add(prompt(17), max_tokens=1)
    engine.run()
    assert free_queue(engine) == [4, 5, 3, 2, 1, 0]
    engine.add(prompt(9, 500), max_tokens=1)
    engine.run()
    assert free_queue(engine) == [3, 2, 1, 0, 5, 4]
    again = engine.add(prompt(17), max_tokens=1)
    run_all(engine, [again])
    assert again.num_cached_tokens == 12


def test_a_cached_block_given_to_another_is_not_hit_any_more():
    engine = ToyEngine(num_device_blocks=4, max_model_len=16)
    engine.add(prompt(13), max_tokens=1)
    engine.run()
    engine.add(prompt(13, 500), max_tokens=1)
    engine.run()
    again = engine.add(prompt(13), max_tokens=1)
    run_all(engine, [again])
    assert again.num_cached_tokens == 0


def test_the_index_holds_the_digests_of_the_specification():
    engine = ToyEngine(digest_context=b"(0, None, None)")
    engine.add(prompt(9), max_tokens=1)
    engine.run()
    root = hashlib.sha256(bytes(32) + struct.pack("<4i", 100, 101, 102, 103) + b"(0, None, None)").digest()
    child = hashlib.sha256(root + struct.pack("<4i", 104, 105, 106, 107) + b"(0, None, None)").digest()
    assert engine.pool._digest_to_block == {root: 0, child: 1}


def test_the_prefix_cache_is_reset_only_while_no_request_holds_blocks():
    engine = ToyEngine()
    engine.add(prompt(9), max_tokens=2)
    engine.step()
    assert not engine.scheduler.reset_prefix_cache()
    engine.run()
    assert engine.scheduler.reset_prefix_cache()
    again = engine.add(prompt(9), max_tokens=1)
    engine.run()
    assert again.num_cached_tokens == 0


def test_cached_blocks_that_a_request_hits_do_not_count_as_room_for_its_others():
    engine = ToyEngine(num_device_blocks=6, max_model_len=24)
    engine.add(prompt(9), max_tokens=1)
    engine.run()
    holder = engine.add(prompt(9, 500), max_tokens=8)
    engine.step()
    assert engine.pool.num_available == 3
    again = engine.add(prompt(8) + prompt(5, 700), max_tokens=1)
    engine.step()
    assert again.status is Status.WAITING, "2 hits are 2 of the 3 blocks available, and 2 more are needed"
    run_all(engine, [holder, again])


# ---- preemption


def two_that_outgrow_their_pool(**settings):
    engine = ToyEngine(num_device_blocks=5, max_model_len=20, **settings)
    return engine, [engine.add(prompt(8), max_tokens=10), engine.add(prompt(7, 300), max_tokens=10)]


def test_preemption_takes_the_request_that_arrived_last():
    engine, (first, second) = two_that_outgrow_their_pool()
    while not engine.scheduler.num_preemptions:
        engine.step()
    assert (first.status, second.status) == (Status.RUNNING, Status.PREEMPTED)
    assert (second.block_ids, second.row, second.num_computed_tokens) == ([], None, 0)
    assert engine.scheduler.waiting[0] is second
    assert engine.steps[-1].num_preempted == second.num_preemptions == 1
    run_all(engine, [first, second])


@pytest.mark.parametrize("is_caching", [True, False])
def test_a_preempted_request_yields_the_same_tokens(is_caching):
    engine, requests = two_that_outgrow_their_pool(enable_prefix_caching=is_caching)
    run_all(engine, requests)
    assert engine.scheduler.num_preemptions > 0


def test_a_preempted_request_gets_its_cached_blocks_back():
    engine = ToyEngine(num_device_blocks=5, max_model_len=20)
    first, second = engine.add(prompt(8), max_tokens=6), engine.add(prompt(7, 300), max_tokens=10)
    while not engine.scheduler.num_preemptions:
        head = second.block_ids[:1]
        engine.step()
    while second.status is Status.PREEMPTED:
        engine.step()
    restarted = next(r for r in engine.steps[-1].requests if r.request_id == second.id)
    assert (restarted.start, second.block_ids[:1]) == (4, head)
    assert second.num_cached_tokens == 0, "what it found of its own is no hit of the prompt"
    run_all(engine, [first, second])


def test_nobody_is_admitted_in_a_step_in_which_a_request_lost_its_blocks():
    engine, requests = two_that_outgrow_their_pool()
    run_all(engine, requests)
    num_steps = next(i for i, step in enumerate(engine.steps) if step.num_preempted)
    engine, requests = two_that_outgrow_their_pool()
    for _ in range(num_steps):
        engine.step()
    small = engine.add([1], max_tokens=2)
    step = engine.step()
    assert step.num_preempted == 1 and not step.started and engine.pool.num_available == 1
    assert [r.id for r in engine.scheduler.waiting] == ["1", "2"]
    run_all(engine, [*requests, small])


def test_a_decode_already_planned_is_undone_when_an_older_prefill_needs_its_blocks():
    settings = {"num_device_blocks": 7, "max_model_len": 28, "max_num_batched_tokens": 8, "max_num_seqs": 2}
    engine = ToyEngine(**settings, enable_prefix_caching=False)
    parent = engine.add(prompt(24), n=2, max_tokens=1)
    child, young = parent.siblings[0], engine.add([1], max_tokens=9)
    for _ in range(3):
        engine.step()
    assert tokens_of(engine.step()) == {"0": 1, "2": 1}, "the child has no row and waits"
    assert tokens_of(engine.step()) == {"2": 1, "1": 7}
    assert tokens_of(engine.step()) == {"2": 1, "1": 7}
    assert (young.num_computed_tokens, engine.pool.num_available) == (4, 2)
    step = engine.step()
    assert tokens_of(step) == {"1": 7} and step.num_preempted == 1
    assert young.status is Status.PREEMPTED
    run_all(engine, [parent, child, young])


# ---- n > 1


def forked(num_prompt_tokens, n=3, **settings):
    engine = ToyEngine(**({"max_num_seqs": 8} | settings))
    parent = engine.add(prompt(num_prompt_tokens), n=n, max_tokens=6, seed=2**63 + 5)
    return engine, [parent, *parent.siblings]


@pytest.mark.parametrize("is_caching", [True, False])
@pytest.mark.parametrize("num_prompt_tokens", [1, 2, 4, 5, 7, 8, 9, 12, 13])
def test_children_of_a_prompt_yield_what_each_would_yield_alone(num_prompt_tokens, is_caching):
    engine, members = forked(num_prompt_tokens, enable_prefix_caching=is_caching)
    run_all(engine, members)
    assert len({tuple(m.output_token_ids) for m in members}) == 3
    prefill_tokens = sum(r.num_scheduled_tokens for step in engine.steps for r in step.requests if r.is_prefill)
    assert prefill_tokens == num_prompt_tokens - 1 + 3, "the prompt once, and its last token once for each child"


def test_a_fork_shares_full_blocks_and_copies_the_partial_one_once_for_each_other_child():
    engine, members = forked(11)
    step = engine.step()
    assert tokens_of(step) == {"0": 10} and not step.requests[0].num_draws and not step.copies
    step = engine.step()
    assert step.copies == ((2, 3), (2, 4))
    assert [m.block_ids for m in members] == [[0, 1, 2], [0, 1, 3], [0, 1, 4]]
    assert engine.pool.ref_counts[:5] == [3, 3, 1, 1, 1]
    assert tokens_of(step) == {"0": 1, "1": 1, "2": 1} and all(r.num_draws == 1 for r in step.requests)
    assert sorted(row.child for row in step.started) == [1, 2]
    run_all(engine, members)


@pytest.mark.parametrize("num_prompt_tokens", [1, 5, 9])
def test_a_fork_at_the_end_of_a_block_copies_nothing(num_prompt_tokens):
    engine, members = forked(num_prompt_tokens)
    run_all(engine, members)
    assert not any(step.copies for step in engine.steps)


def test_a_prompt_of_exactly_k_blocks_is_forked_within_its_last_block():
    engine, members = forked(8)
    engine.step()
    step = engine.step()
    assert step.copies == ((1, 2), (1, 3))
    assert [m.block_ids for m in members] == [[0, 1], [0, 2], [0, 3]]


def test_a_prompt_of_one_token_is_forked_in_the_step_that_admits_it():
    engine, members = forked(1)
    assert tokens_of(engine.step()) == {"0": 1, "1": 1, "2": 1}
    assert [m.block_ids for m in members] == [[0], [1], [2]]
    assert len({m.row for m in members}) == 3


def test_a_prompt_found_in_the_cache_up_to_its_last_token_is_forked_in_the_step_that_admits_it():
    engine = ToyEngine(max_num_seqs=8)
    engine.add(prompt(9), max_tokens=1)
    engine.run()
    parent = engine.add(prompt(9), n=2, max_tokens=3)
    members = [parent, *parent.siblings]
    assert tokens_of(engine.step()) == {"1": 1, "2": 1}
    assert [m.num_cached_tokens for m in members] == [8, 8]
    run_all(engine, members)


def test_children_without_a_row_wait_as_ordinary_requests():
    engine, members = forked(7, n=3, max_num_seqs=3)
    other = engine.add(prompt(5, 400), max_tokens=9)
    engine.step()
    assert other.status is Status.RUNNING
    engine.step()
    assert [m.status for m in members] == [Status.RUNNING, Status.RUNNING, Status.WAITING]
    assert [r.id for r in engine.scheduler.waiting] == ["2"]
    run_all(engine, [*members, other])
    assert members[2].num_cached_tokens == 4


def test_children_without_a_block_wait_as_ordinary_requests():
    engine, members = forked(11, n=3, num_device_blocks=5, max_model_len=20)
    other = engine.add(prompt(3, 400), max_tokens=3)
    engine.step()
    engine.step()
    assert [m.status for m in members] == [Status.RUNNING, Status.RUNNING, Status.WAITING]
    run_all(engine, [*members, other])


def test_a_child_that_waits_keeps_its_place_before_later_requests():
    engine, members = forked(7, n=3, max_num_seqs=3)
    others = [engine.add(prompt(5, 400 + i), max_tokens=3) for i in range(3)]
    engine.step()
    engine.step()
    assert [r.id for r in engine.scheduler.waiting] == ["1", "2", "5"]
    run_all(engine, [*members, *others])


@pytest.mark.parametrize("is_caching", [True, False])
def test_a_child_is_preempted_alone_and_yields_the_same_tokens(is_caching):
    engine, members = forked(6, n=3, num_device_blocks=5, max_model_len=20, enable_prefix_caching=is_caching)
    while not engine.scheduler.num_preemptions:
        engine.step()
    assert [m.status for m in members] == [Status.RUNNING, Status.RUNNING, Status.PREEMPTED]
    run_all(engine, members)


def test_a_child_preempted_in_the_step_of_its_fork_leaves_no_copy_behind():
    engine = ToyEngine(num_device_blocks=5, max_model_len=20)
    older = engine.add(prompt(8, 400), max_tokens=4)
    parent = engine.add(prompt(6), n=2, max_tokens=6)
    members = [parent, *parent.siblings]
    engine.step()
    assert (older.block_ids, parent.block_ids, engine.pool.num_available) == ([0, 1], [2, 3], 1)
    step = engine.step()
    assert tokens_of(step) == {"0": 1, "1": 1} and older.block_ids == [0, 1, 4]
    assert (step.copies, step.started, step.num_preempted) == ((), (), 1)
    assert members[1].status is Status.PREEMPTED
    run_all(engine, [older, *members])


def test_a_group_preempted_before_its_fork_is_forked_after_it_returns():
    engine = ToyEngine(num_device_blocks=6, max_model_len=24, max_num_batched_tokens=6)
    older = engine.add(prompt(3, 400), max_tokens=8)
    parent = engine.add(prompt(20), n=2, max_tokens=2)
    members = [parent, *parent.siblings]
    while not parent.num_preemptions:
        engine.step()
    assert parent.siblings and parent.status is Status.PREEMPTED
    assert members[1].status is Status.WAITING and members[1] not in engine.scheduler.waiting
    run_all(engine, [older, *members])


def test_aborting_a_group_before_its_fork_ends_all_its_members():
    engine, members = forked(30, max_num_batched_tokens=8)
    engine.step()
    engine.abort(members[0])
    assert all(m.is_finished for m in members)
    assert not engine.scheduler.has_unfinished() and engine.pool.num_used == 0
    assert not engine.scheduler.requests


def test_aborting_a_child_before_the_fork_leaves_the_others():
    engine, members = forked(30, max_num_batched_tokens=8)
    engine.step()
    engine.abort(members[1])
    assert members[1].is_finished and members[0].siblings == [members[2]]
    run_all(engine, [members[0], members[2]])


def test_aborting_a_child_after_the_fork_leaves_the_others():
    engine, members = forked(7)
    engine.step()
    engine.step()
    engine.abort(members[0])
    run_all(engine, members[1:])


# ---- the end


@pytest.mark.parametrize(
    ("eos", "stop_ids", "ignore_eos", "max_tokens", "reason", "stop_reason", "length"),
    [
        (True, True, False, 9, "stop", None, 3),
        (False, True, False, 9, "stop", "id", 3),
        (True, True, True, 9, "stop", "id", 3),
        (True, False, True, 9, "length", None, 9),
        (False, False, False, 3, "length", None, 3),
        (True, False, False, 3, "stop", None, 3),
        (False, True, False, 3, "stop", "id", 3),
        (True, True, False, 2, "length", None, 2),
    ],
)
def test_an_end_is_eos_before_a_stop_id_before_length(
    eos, stop_ids, ignore_eos, max_tokens, reason, stop_reason, length
):
    third = expected_tokens(ToyEngine().add(prompt(5), max_tokens=3))[2]
    engine = ToyEngine()
    request = engine.add(
        prompt(5),
        max_tokens=max_tokens,
        eos=[third] if eos else [],
        stop_token_ids=[third] if stop_ids else [],
        ignore_eos=ignore_eos,
    )
    run_all(engine, [request])
    assert request.finish_reason == reason
    assert request.stop_reason == (third if stop_reason == "id" else None)
    assert request.num_output_tokens == length


def test_any_of_several_eos_tokens_ends_a_request():
    engine = ToyEngine()
    request = engine.add(prompt(5), max_tokens=9, eos=range(VOCAB))
    run_all(engine, [request])
    assert (request.finish_reason, request.stop_reason, request.num_output_tokens) == ("stop", None, 1)


def test_a_prompt_of_max_model_len_minus_one_yields_one_token():
    engine = ToyEngine(max_model_len=64)
    request = engine.add(prompt(63), max_tokens=10)
    run_all(engine, [request])
    assert (request.num_output_tokens, request.finish_reason) == (1, "length")
    assert max(r.start + r.num_scheduled_tokens for step in engine.steps for r in step.requests) == 63


def test_nothing_is_scheduled_beyond_max_tokens():
    engine = ToyEngine()
    request = engine.add(prompt(5), max_tokens=3)
    run_all(engine, [request])
    assert [r.start for step in engine.steps for r in step.requests] == [0, 5, 6]


def test_the_update_that_sees_the_end_frees_row_and_blocks():
    engine = ToyEngine()
    request = engine.add(prompt(9), max_tokens=1)
    step = engine.schedule()
    row = request.row
    assert engine.pool.num_used == 3
    assert engine.scheduler.update(step, engine.execute(step)) == [(request, 1)]
    assert (engine.pool.num_used, request.row, request.is_finished) == (0, None, True)
    assert not engine.scheduler.has_unfinished()
    engine.add([1], max_tokens=2)
    step = engine.step()
    assert step.started[0].row == row and not step.released


def test_a_row_that_nobody_takes_is_released_in_the_next_step():
    engine = ToyEngine()
    short, long = engine.add(prompt(3), max_tokens=1), engine.add(prompt(3, 200), max_tokens=3)
    row = engine.step().requests[0].row
    assert short.is_finished
    assert engine.step().released == (row,)
    assert engine.step().released == ()
    assert long.is_finished


def test_a_request_aborted_while_its_step_runs_drops_the_token():
    engine = ToyEngine()
    aborted, other = engine.add(prompt(9), max_tokens=4), engine.add(prompt(3, 200), max_tokens=4)
    step = engine.schedule()
    output = engine.execute(step)
    engine.abort(aborted)
    assert engine.scheduler.update(step, output) == [(other, 1)]
    assert aborted.output_token_ids == []
    run_all(engine, [other])


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_an_abort_frees_row_and_blocks_at_once(num_steps):
    engine = ToyEngine(max_num_batched_tokens=5)
    request = engine.add(prompt(9), max_tokens=9)
    for _ in range(num_steps):
        engine.step()
    engine.abort(request)
    assert engine.pool.num_used == 0 and not engine.scheduler.has_unfinished()
    assert sorted(engine.scheduler._free_rows) == [0, 1, 2, 3]


def test_a_preempted_request_can_be_aborted():
    engine, (first, second) = two_that_outgrow_their_pool()
    while not engine.scheduler.num_preemptions:
        engine.step()
    engine.abort(second)
    run_all(engine, [first])


def test_a_finished_request_cannot_be_finished_again():
    engine = ToyEngine()
    request = engine.add(prompt(3), max_tokens=1)
    engine.run()
    with pytest.raises(RuntimeError, match="request 0: finished → finished is not a legal move"):
        engine.scheduler.finish(request)


# ---- what is refused


def test_a_request_larger_than_the_pool_is_refused_with_the_numbers_and_nothing_is_queued():
    engine = ToyEngine(num_device_blocks=4)
    with pytest.raises(ValueError, match=r"needs 5 blocks at its full length \(10 prompt \+ 7 new tokens, 4 a block\)"):
        engine.add(prompt(10), max_tokens=7)
    assert not engine.scheduler.has_unfinished() and not engine.scheduler.requests
    run_all(engine, [engine.add(prompt(10), max_tokens=6)])


def test_more_completions_than_rows_are_refused():
    engine = ToyEngine(max_num_seqs=3)
    with pytest.raises(ValueError, match=r"n=4 completions run side by side, but max_num_seqs=3"):
        engine.add(prompt(3), n=4)
    assert not engine.scheduler.has_unfinished() and not engine.scheduler.requests


# ---- what crosses the border


def test_a_row_is_started_with_the_requests_parameters():
    engine = ToyEngine()
    engine.add([1, 2], seed=2**64 - 3, temperature=0.7, top_k=5, top_p=0.9, min_p=0.1)
    row = engine.step().started[0]
    assert (row.seed, row.child, row.temperature, row.top_k, row.top_p, row.min_p) == (2**64 - 3, 0, 0.7, 5, 0.9, 0.1)


def test_a_token_in_flight_is_read_on_the_device_and_after_a_preemption_from_the_host():
    engine, (first, second) = two_that_outgrow_their_pool(max_num_batched_tokens=4, max_in_flight=2)
    run_all(engine, [first, second])
    assert second.num_preemptions > 0
    for step in engine.steps:
        restarted = {row.row for row in step.started}
        for r in step.requests:
            assert r.row not in restarted or -1 not in r.token_ids
            assert -1 not in r.token_ids or r.num_scheduled_tokens == 1
    assert any(r.token_ids == (-1,) for step in engine.steps for r in step.requests)


def test_only_the_step_that_computes_the_last_known_token_samples_and_asks_for_logprobs():
    engine = ToyEngine(max_num_batched_tokens=4)
    request = engine.add(prompt(9), max_tokens=2, logprobs=1)
    asked = []
    for _ in range(4):
        step = engine.schedule()
        asked.append((step.requests[0].num_draws, step.requests[0].num_logprobs))
        token_id_ib = engine.execute(step).token_id_ib
        shape = (*token_id_ib.shape, 2)
        logprobs = StepLogprobs(
            drawn_ib=np.full(shape[:2], -0.5, np.float32),
            rank_ib=np.full(shape[:2], 3),
            top_id_ibk=np.full(shape, [41, 42]),
            top_logprob_ibk=np.full(shape, [-0.1, -0.2], np.float32),
        )
        engine.scheduler.update(step, StepOutput(token_id_ib=token_id_ib, logprobs=logprobs))
    assert asked == [(0, None), (0, None), (1, 1), (1, 1)]
    assert request.cumulative_logprob == -1.0
    drawn = request.output_token_ids[0]
    assert list(request.logprobs[0]) == [drawn, 41]
    assert [(entry.logprob, entry.rank) for entry in request.logprobs[0].values()] == [
        (-0.5, 3),
        (pytest.approx(-0.1), 1),
    ]


# ---- checks that check


def test_check_finds_a_row_held_twice_and_a_queue_out_of_order_and_blocks_missing():
    engine = ToyEngine()
    requests = [engine.add(prompt(9, 100 * i), max_tokens=4) for i in range(4)]
    engine.add(prompt(3), max_tokens=4)
    late = engine.add(prompt(3), max_tokens=4)
    engine.step()
    scheduler = engine.scheduler
    requests[0].row, row = requests[1].row, requests[0].row
    with pytest.raises(RuntimeError, match="not all rows once"):
        scheduler.check()
    requests[0].row = row
    scheduler.running.reverse()
    with pytest.raises(RuntimeError, match=r"running requests are not in order of arrival: \[3, 2, 1, 0\]"):
        scheduler.check()
    scheduler.running.reverse()
    scheduler.waiting.remove(late)
    scheduler.waiting.appendleft(late)
    with pytest.raises(RuntimeError, match=r"waiting requests are not in order of arrival: \[5, 4\]"):
        scheduler.check()
    scheduler.waiting.reverse()
    requests[0].num_computed_tokens = 13
    with pytest.raises(RuntimeError, match="request 0 has computed 13 tokens in 3 blocks of 4"):
        scheduler.check()
