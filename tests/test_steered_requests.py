"""Requests whose tokens are chosen among candidates: drawn for once, held, forked; no pool or neighbour changes that.

`BeamSearch` steers them, on a device in plain Python that finds every wrong block.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpaged.beam_search import BeamSearch
from jaxpaged.request import Request, Status
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.scheduler import _Plan
from toy_device import VOCAB, ToyEngine, expected_tokens, most_probable

NUM_CANDIDATES = 9
ENDS = frozenset(range(0, VOCAB, 11))


def add_search(engine, name, prompt, width, max_tokens=6, ends=ENDS, tokenizer=None) -> BeamSearch:
    root = Request(
        id=f"{name}/0",
        parent_id=name,
        prompt_token_ids=list(prompt),
        params=SamplingParams(temperature=0, logprobs=NUM_CANDIDATES),
        arrival=engine._num_arrived,
        max_tokens=max_tokens,
        seed=0,
        eos_token_ids=ends,
        is_steered=True,
    )
    engine._num_arrived += 1
    engine.scheduler.add(root)
    return BeamSearch(name, None, root, width, 1.0, tokenizer)


def expected(prompt, width, max_tokens=6, ends=ENDS):
    """Token ids of the best completions, by the definition of a beam search that never stops early."""
    live, ended = [((), 0.0)], []
    for _ in range(1, max_tokens + 1):
        extensions = [
            ((*tokens, token_id), total + logprob)
            for tokens, total in live
            for token_id, logprob in most_probable((*prompt, *tokens), NUM_CANDIDATES)
        ]
        extensions.sort(key=lambda extension: -extension[1])
        live = []
        for tokens, total in extensions:
            if len(live) == width:
                break
            (ended if tokens[-1] in ends else live).append((tokens, total))
    ended += live
    ended.sort(key=lambda e: -e[1] / len(e[0]))
    return [list(tokens) for tokens, _ in ended[:width]]


def run_step(engine, *searches):
    """A step, after which a search goes on if its hypotheses have drawn."""
    engine.step()
    take_candidates(engine, *searches)


def take_candidates(engine, *searches):
    """Has the searches go on whose hypotheses have all drawn."""
    by_name = {search.request_id: search for search in searches}
    for request, num_tokens in engine.updated:
        if request.is_steered:
            by_name[request.parent_id].take(request, num_tokens, engine.scheduler)
    engine.scheduler.check()


def run(engine, searches):
    """Steps until nothing is left."""
    for _ in range(10_000):
        if not engine.scheduler.has_unfinished():
            return
        run_step(engine, *searches)
    raise AssertionError("not done after 10,000 steps")


def found(search):
    return [completion.token_ids for completion in search.output(search.output_kind).outputs]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(data=st.data())
def test_no_pool_budget_or_neighbour_changes_what_is_found(data):
    block_size = data.draw(st.sampled_from([1, 2, 4]))
    engine = ToyEngine(
        block_size=block_size,
        num_device_blocks=data.draw(st.integers(-(-24 // block_size), 60)),
        max_model_len=24,
        max_num_seqs=data.draw(st.integers(4, 7)),
        max_num_batched_tokens=data.draw(st.sampled_from([1, 3, 8, 64])),
        enable_prefix_caching=data.draw(st.booleans()),
        num_decode_steps=data.draw(st.sampled_from([1, 4])),
        max_in_flight=data.draw(st.sampled_from([1, 2])),
        num_host_blocks=data.draw(st.sampled_from([0, 8, 200])),
    )
    prompts = st.lists(st.integers(1, 3), min_size=1, max_size=14)
    wanted, others = [], []
    for i in range(data.draw(st.integers(1, 3))):
        prompt, width = data.draw(prompts), data.draw(st.integers(1, 4))
        wanted.append((add_search(engine, f"search {i}", prompt, width), expected(prompt, width)))
        if data.draw(st.booleans()):
            others.append(engine.add(data.draw(prompts), max_tokens=8, n=data.draw(st.integers(1, 3)), seed=i))
    members = [member for first in others for member in (first, *first.siblings)]
    run(engine, [search for search, _ in wanted])
    for search, token_ids in wanted:
        assert found(search) == token_ids
    for member in members:
        assert member.output_token_ids == expected_tokens(member)
    assert engine.pool.num_used == 0


def test_a_steered_request_draws_once_and_is_held_until_its_token_is_chosen():
    engine = ToyEngine(num_decode_steps=4, max_in_flight=2)
    search = add_search(engine, "a", [1, 2, 3], 2, ends=frozenset())
    [root] = search.members
    engine.step()
    assert not engine.in_flight and root.output_token_ids == []
    assert root.candidates.keys() == {token_id for token_id, _ in most_probable((1, 2, 3), NUM_CANDIDATES)}
    with pytest.raises(RuntimeError, match="nothing could be scheduled"):
        engine.step()
    search.take(root, 0, engine.scheduler)
    assert [m.output_token_ids for m in search.members] == [[t] for t, _ in most_probable((1, 2, 3), 2)]
    step = engine.step()
    assert [(r.start, r.num_scheduled_tokens, r.num_draws) for r in step.requests] == [(3, 1, 1)] * 2


def test_hypotheses_share_full_blocks_and_a_partial_one_is_copied_for_each_other():
    engine = ToyEngine(block_size=4, max_in_flight=2)
    search = add_search(engine, "a", range(1, 7), 3, ends=frozenset())
    engine.step()
    search.take(search.members[0], 0, engine.scheduler)
    step = engine.step()
    first, *others = [m.block_ids for m in search.members]
    assert [blocks[0] for blocks in others] == first[:1] * 2
    assert len({blocks[1] for blocks in (first, *others)}) == 3
    assert sorted(step.copies) == sorted((first[1], blocks[1]) for blocks in others)


def test_hypotheses_that_hold_all_blocks_give_way_to_one_that_has_not_drawn():
    """Four of them at 7 tokens in blocks of 4 want 7 blocks at once; the pool has 5."""
    engine = ToyEngine(block_size=4, num_device_blocks=5, max_model_len=20, enable_prefix_caching=False)
    search = add_search(engine, "a", range(1, 7), 4, ends=frozenset())
    run(engine, [search])
    assert found(search) == expected(tuple(range(1, 7)), 4, ends=frozenset())
    assert engine.scheduler.num_preemptions > 0


def test_a_preempted_hypothesis_that_has_drawn_is_not_admitted_before_the_choice():
    engine = ToyEngine(block_size=4, num_device_blocks=8)
    search = add_search(engine, "a", range(1, 7), 2, ends=frozenset())
    [root] = search.members
    engine.step()
    engine.scheduler.rewind()
    other = engine.add([1, 2], max_tokens=1)
    step = engine.step()
    assert [r.request_id for r in step.requests] == [other.id] and root.status is Status.PREEMPTED
    search.take(root, 0, engine.scheduler)
    run(engine, [search])
    assert found(search) == expected(tuple(range(1, 7)), 2, ends=frozenset())


def test_hypotheses_forked_from_one_that_comes_back_from_the_host_come_from_there_too():
    engine = ToyEngine(block_size=4, num_device_blocks=8, num_host_blocks=8, enable_prefix_caching=False)
    search = add_search(engine, "a", range(1, 7), 3, ends=frozenset())
    [root] = search.members
    engine.step()
    others = [engine.add([7] * 13, max_tokens=1, seed=i) for i in range(2)]
    scheduler = engine.scheduler
    scheduler._preempt(_Plan(0), root)
    host_block_ids = list(root.host_block_ids)
    for other in others:  # take all blocks of the device, so that nothing of the root is left there
        while not other.is_finished:
            engine.step()
    search.take(root, 0, scheduler)
    step = engine.step()
    first, *forked = [m.block_ids for m in search.members]
    assert step.copies == ()
    assert sorted(step.swaps_in) == sorted(
        [*zip(host_block_ids, first, strict=True), *((host_block_ids[1], blocks[1]) for blocks in forked)]
    )
    take_candidates(engine, search)
    run(engine, [search])
    assert found(search) == expected(tuple(range(1, 7)), 3, ends=frozenset())


@pytest.mark.parametrize("is_caching", [True, False])
def test_a_hypothesis_preempted_in_the_step_of_its_fork_leaves_the_others_the_copy_that_they_share(is_caching):
    """Four hypotheses from 12 tokens on, in a pool of the six blocks that one of them could want."""
    engine = ToyEngine(
        block_size=4, num_device_blocks=6, max_model_len=24, max_num_batched_tokens=3, num_host_blocks=8,
        enable_prefix_caching=is_caching,
    )  # fmt: skip
    prompt = (1, 1, 1, 2, 2, 1, 3, 1, 1, 2, 1, 3)
    search = add_search(engine, "a", prompt, 4)
    run(engine, [search])
    assert found(search) == expected(prompt, 4) and engine.scheduler.num_preemptions > 0


def test_an_aborted_search_frees_every_block_at_once():
    for num_steps in range(5):
        engine = ToyEngine(block_size=4, num_device_blocks=8)
        search = add_search(engine, "a", range(1, 7), 3, ends=frozenset())
        for _ in range(num_steps):
            run_step(engine, search)
        search.abort(engine.scheduler)
        engine.scheduler.check()
        assert search.is_finished and not engine.scheduler.has_unfinished() and engine.pool.num_used == 0


def test_a_hypothesis_that_ends_by_itself_ends_the_search_with_an_error():
    engine = ToyEngine(block_size=4, num_device_blocks=8)
    search = add_search(engine, "a", range(1, 7), 2, ends=frozenset())
    run_step(engine, search)
    broken = search.members[1]
    broken.stop_reason = "no token may be drawn"
    engine.scheduler.finish(broken)
    search.take(broken, 0, engine.scheduler)
    output = search.output(search.output_kind)
    assert (output.error, output.outputs) == ("a hypothesis could not go on: no token may be drawn", [])
    assert output.finished and not engine.scheduler.has_unfinished() and engine.pool.num_used == 0


class Undecodable:
    """Decodes the prompts of these tests alone."""

    def encode(self, text):
        raise NotImplementedError

    def decode(self, token_ids):
        if max(token_ids) > 6:
            raise KeyError(max(token_ids))
        return "x" * len(token_ids)


def test_a_tokenizer_that_fails_on_what_was_found_is_an_error_of_the_search():
    engine = ToyEngine(block_size=4, num_device_blocks=8)
    search = add_search(engine, "a", range(1, 7), 2, ends=frozenset(), tokenizer=Undecodable())
    run(engine, [search])
    output = search.output(search.output_kind)
    assert output.outputs == [] and output.error.startswith("Undecodable.decode cannot take a hypothesis")
