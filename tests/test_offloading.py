"""What the prefix cache loses on the device may stay on the host: when it goes there, when it comes back, that it is
the same."""

import pytest

import tiny
from jaxpaged import Engine
from jaxpaged.block_pool import BlockPool, SwapSpace
from same_tokens import GREEDY, SETTINGS
from test_scheduler import prompt, run_all
from test_scheduler_random import serve as serve_random
from test_scheduler_random import swap_in_nothing, swap_out_what_the_step_has_written
from toy_device import ToyDevice, ToyEngine

PREFIX = prompt(17)
"""Four full blocks and a token."""


def toy(**settings):
    defaults = {"num_device_blocks": 6, "max_model_len": 24, "num_host_blocks": 8, "kv_offloading_size": 1}
    return ToyEngine(**(defaults | settings))


def serve(engine, token_ids, **params):
    """Runs one request to its end; returns it with the steps it took."""
    first_step = len(engine.steps)
    request = engine.add(token_ids, **({"max_tokens": 2} | params))
    run_all(engine, [request, *request.siblings])
    return request, engine.steps[first_step:]


def evict(engine):
    """Fills all blocks of the device with something else."""
    return serve(engine, prompt(22, 500))


# ---- going to the host and coming back


def test_evicted_blocks_go_to_the_host_in_the_step_that_overwrites_them_and_come_back_with_a_hit():
    engine = toy()
    serve(engine, PREFIX)
    _, steps = evict(engine)
    assert steps[0].swaps_out == ((3, 0), (2, 1), (1, 2), (0, 3)), "the end of the prefix was given up first"
    assert engine.scheduler.swap_space.host.num_cached == engine.scheduler.num_offloaded == 4
    again, steps = serve(engine, PREFIX)
    assert (again.num_cached_tokens, engine.scheduler.num_host_hits) == (16, 16)
    assert [source for source, _ in steps[0].swaps_in] == [3, 2, 1, 0] and steps[0].num_scheduled_tokens == 1


def test_what_is_left_on_the_device_is_hit_there_and_the_rest_on_the_host():
    engine = toy()
    serve(engine, PREFIX)
    serve(engine, prompt(14, 500))  # takes two free blocks and the last two of the prefix
    again, steps = serve(engine, PREFIX)
    assert (again.num_cached_tokens, engine.scheduler.num_host_hits) == (16, 8)
    assert len(steps[0].swaps_in) == 2


def test_what_comes_back_is_findable_on_the_device_again():
    engine = toy(num_device_blocks=10, max_model_len=40)
    serve(engine, PREFIX)
    serve(engine, prompt(38, 500))
    serve(engine, PREFIX)
    again, steps = serve(engine, PREFIX)
    assert (again.num_cached_tokens, engine.scheduler.num_host_hits) == (16, 16), "loaded once, hit twice"
    assert not steps[0].swaps_in


def test_a_block_that_came_back_is_not_copied_again_when_it_is_evicted():
    engine = toy()
    for _ in range(3):
        serve(engine, PREFIX)
        evict(engine)
    copied = [host for step in engine.steps for _, host in step.swaps_out]
    assert len(copied) == len(set(copied)) == 8, "four of the prefix, four of the other's five: its first is kept"
    assert engine.scheduler.num_host_hits == 2 * 16 + 2 * 16


def test_nothing_goes_to_the_host_unless_asked_for():
    engine = toy(kv_offloading_size=0)
    for _ in range(2):
        serve(engine, PREFIX)
        evict(engine)
    assert not any(step.swaps_out or step.swaps_in for step in engine.steps)


def test_of_requests_that_begin_alike_one_loads_the_prefix_and_the_next_hits_it():
    engine = toy(num_device_blocks=11)
    serve(engine, PREFIX)
    serve(engine, prompt(22, 500)), serve(engine, prompt(22, 700))
    requests = [engine.add([*PREFIX, i], max_tokens=2) for i in range(2)]
    run_all(engine, requests)
    assert [request.num_cached_tokens for request in requests] == [16, 16]
    assert engine.scheduler.num_host_hits == 16


def test_the_host_gives_up_first_what_was_evicted_longest_ago():
    engine = toy(num_host_blocks=9)
    serve(engine, PREFIX), evict(engine)  # 4 blocks on the host
    serve(engine, PREFIX)  # hit there; 5 of the other prompt on the host
    serve(engine, prompt(22, 700)), serve(engine, prompt(22, 900))  # the prefix known, 5 new ones
    assert engine.scheduler.swap_space.host.num_cached == 9
    again, _ = serve(engine, PREFIX)
    assert again.num_cached_tokens == 16
    again, _ = serve(engine, prompt(22, 500))
    assert again.num_cached_tokens == 0


# ---- together with preemption, forks, failures


def test_swapped_requests_take_the_room_of_evicted_blocks_and_never_lose_theirs_to_them():
    device, space = BlockPool(6), None
    space = SwapSpace(device, 3)
    blocks = device.allocate(3)
    for i, block_id in enumerate(blocks):
        assert space.offload(block_id, bytes([i])) == [(block_id, i)]
    others = device.allocate(3)
    held, copies = space.swap_out(others[:2], 2)
    assert copies == [(3, 0), (4, 1)], "what was evicted first is overwritten"
    assert space.offload(others[2], b"new") == [(5, 2)]
    assert space.swap_out(others, 3) is not None
    assert space.offload(blocks[0], b"newer") == [], "the host is full of what requests hold"
    space.host.check([held, [*held, 2]])


def test_evicted_blocks_that_a_swapped_request_has_on_the_host_need_no_copy():
    device = BlockPool(3)
    space = SwapSpace(device, 3)
    blocks = device.allocate(2)
    held, _ = space.swap_out(blocks, 2)
    assert space.offload(blocks[0], b"a") == [] and space.host.match([b"a"]) == [held[0]]
    space.host.free(held)
    assert (space.host.num_cached, space.host.num_used) == (1, 0)
    assert space.offload(blocks[1], b"b") == [] and space.host.match([b"b"]) == [held[1]]
    assert space.host.num_cached == 2
    space.host.check([])


def test_without_swap_space_preempted_requests_are_computed_again_from_what_the_host_has():
    engine = toy(num_device_blocks=7, max_model_len=28, swap_space=0, num_host_blocks=20)
    requests = engine.add(prompt(14), max_tokens=9), engine.add(prompt(11, 200), max_tokens=9)
    run_all(engine, requests)
    assert requests[1].num_preemptions > 0 and engine.scheduler.num_swapped_out == 0


def test_a_sibling_that_is_preempted_while_the_shared_prefix_is_on_its_way_leaves_it_to_the_others():
    engine = toy(num_device_blocks=3, max_model_len=12)
    serve(engine, prompt(9))
    serve(engine, prompt(10, 500))
    first, steps = serve(engine, prompt(9), n=3, seed=1, max_tokens=3)
    assert first.num_cached_tokens == 8 and len(steps[0].swaps_in) == 2
    assert steps[0].num_preempted == 1


def test_after_a_failed_step_nothing_on_the_host_is_hit():
    engine = toy()
    serve(engine, PREFIX), evict(engine)
    engine.device.host_blocks.clear()
    engine.scheduler.rewind()
    again, _ = serve(engine, PREFIX)
    assert again.num_cached_tokens == 0


def test_a_reset_of_the_prefix_cache_forgets_what_is_on_the_host():
    engine = toy()
    serve(engine, PREFIX), evict(engine)
    assert engine.scheduler.reset_prefix_cache()
    again, _ = serve(engine, PREFIX)
    assert again.num_cached_tokens == 0


def test_the_wanted_log_probabilities_of_a_prompt_are_computed_whatever_the_host_has():
    engine = toy()
    serve(engine, PREFIX), evict(engine)
    request = engine.add(PREFIX, max_tokens=2, prompt_logprobs=1)
    step = engine.schedule()
    assert step.requests[0].start == 0 and not step.swaps_in and request.num_cached_tokens == 0


# ---- mutations: each must turn random load red


def index_under_a_wrong_digest(patch):
    offload = SwapSpace.offload
    patch.setattr(SwapSpace, "offload", lambda self, block_id, digest: offload(self, (block_id + 1) % 12, digest))


def keep_the_hosts_index_while_its_blocks_are_overwritten(patch):
    forget = BlockPool._forget

    def kept(self, block_id):
        if self.evict is not None:
            forget(self, block_id)
        else:
            self._num_cached -= block_id in self._block_to_digest

    patch.setattr(BlockPool, "_forget", kept)


def load_without_holding(patch):
    share = BlockPool.share
    patch.setattr(BlockPool, "share", lambda self, ids: share(self, [] if self.evict is None else ids))


def swap_in_before_swapping_out(patch):
    swap_out, swap_in = ToyDevice._swap_out, ToyDevice._swap_in
    patch.setattr(ToyDevice, "_swap_in", swap_out), patch.setattr(ToyDevice, "_swap_out", swap_in)


@pytest.mark.parametrize(
    "mutation",
    [
        index_under_a_wrong_digest,
        keep_the_hosts_index_while_its_blocks_are_overwritten,
        load_without_holding,
        swap_in_before_swapping_out,
        swap_in_nothing,
        swap_out_what_the_step_has_written,
    ],
    ids=lambda mutation: mutation.__name__,
)
def test_a_mutation_of_offloading_is_caught(mutation, monkeypatch):
    mutation(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, IndexError, KeyError, ValueError)):
        for seed in (2, 4, 5):
            serve_random(
                300, seed=seed, max_num_batched_tokens=10, max_in_flight=2, num_host_blocks=8, kv_offloading_size=1,
                swap_space=0,
            )  # fmt: skip


# ---- an engine that keeps them


def conversations():
    """Twelve prompts in three groups with a prefix each, in an order in which each group was evicted before it is back:
    the pool holds one."""
    prompts = tiny.prompts(12, least=40, most=40, seed=5)
    return [prompts[i % 3][:33] + prompts[i][: 3 + i % 5] for i in range(12)]


@pytest.fixture
def engine():
    settings = SETTINGS | {"block_size": 4, "num_device_blocks": 16, "max_num_seqs": 2, "max_model_len": 64}
    with Engine(tiny.model_directory(), **settings | {"kv_offloading_size": 0.001}) as engine:
        yield engine


def test_a_prefix_that_was_evicted_comes_back_from_the_host_and_the_tokens_are_the_same(engine):
    for token_ids in conversations():
        [output] = engine.generate([token_ids], GREEDY, use_tqdm=False)
        assert output.outputs[0].token_ids == tiny.naive_greedy(token_ids, GREEDY.max_tokens)
        engine.check()
    stats = engine.stats()
    assert stats["num_host_hit_tokens"] == 9 * 32 and stats["num_prefix_hit_tokens"] == 9 * 32
    assert stats["num_blocks_offloaded"] == stats["host_blocks_cached"] > 30


def test_the_hosts_memory_is_divided_as_told(engine):
    report = engine.memory_report()
    in_swap_space = 2 * 16
    assert report.num_host_blocks == in_swap_space + int(0.001 * 2**30) // report.bytes_per_block
