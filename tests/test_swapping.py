"""Blocks go to the host and come back: the same bits, in few calls, while steps run; 500 requests in little room."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

import tiny
from jaxpaged import Engine, SamplingParams, runner
from jaxpaged.batch import DROPPED
from jaxpaged.kv_cache import HostBlocks, gather_blocks, pool_specs, scatter_blocks, swap_spec
from same_tokens import GREEDY, SEEDED, SETTINGS, assert_same, run
from test_compiled_steps import BLOCK_SIZE, MODEL, layer_pool_bytes, size_of

# ---- bits


def random_bits(specs, seed=0):
    """A pool of random bit patterns, but for NaN and infinity, for which not all exponent bits may be set."""
    rng = np.random.default_rng(seed)

    def pool(spec):
        bytes_ = np.frombuffer(rng.bytes(size_of(spec)), np.uint8).reshape(-1, spec.dtype.itemsize).copy()
        bytes_[:, -1] &= 0b1011_1111
        return jnp.asarray(bytes_.view(spec.dtype).reshape(spec.shape))

    return jax.tree.map(pool, specs)


def bits(array) -> np.ndarray:
    return np.asarray(array).view(f"u{array.dtype.itemsize}")


@pytest.mark.parametrize(
    ("dtype", "backend"), [("float32", "xla"), ("bfloat16", "xla"), ("float16", "xla"), ("bfloat16", "pallas_tpu")]
)
def test_swapped_blocks_come_back_bit_equal_and_no_other_block_changes(dtype, backend):
    kv = random_bits(pool_specs(MODEL, 12, 4, dtype, backend))
    before = [bits(pool).copy() for pool in jax.tree.leaves(kv)]
    host = HostBlocks(swap_spec(kv, 6))
    host.store(np.array([5, 0, 3]), jax.jit(gather_blocks)(kv, np.array([7, 2, 11, 12])))
    host.store(np.array([1]), jax.jit(gather_blocks)(kv, np.array([4, 12, 12, 12])))
    host.land()
    content_c = host.load(np.array([3, 5, 1]), 4)
    kv = jax.jit(scatter_blocks, donate_argnums=0)(kv, np.array([0, 9, 2, DROPPED]), content_c)
    came_from = {0: 11, 9: 7, 2: 4}
    for pool, old in zip(jax.tree.leaves(kv), before, strict=True):
        for block in range(13):
            np.testing.assert_array_equal(bits(pool)[block], old[came_from.get(block, block)])


def test_blocks_that_are_overwritten_on_the_host_hold_what_was_stored_last():
    kv = random_bits(pool_specs(MODEL, 12, 4, "float32", "xla"))
    host = HostBlocks(swap_spec(kv, 2))
    for block in range(10):
        host.store(np.array([0]), jax.jit(gather_blocks)(kv, np.array([block])))
    [first, *_] = jax.tree.leaves(kv)
    np.testing.assert_array_equal(bits(host.load(np.array([0]), 1))[0, 0], bits(first)[9])


def test_a_swap_to_the_device_is_in_place_and_one_to_the_host_takes_what_it_moves():
    for num_blocks in (4000, 8000):
        kv, ids = pool_specs(MODEL, num_blocks, BLOCK_SIZE, "float32", "xla"), jax.ShapeDtypeStruct((8,), jnp.int32)
        scatter = jax.jit(scatter_blocks, donate_argnums=0).lower(kv, ids, swap_spec(kv, 8)).compile()
        gather = jax.jit(gather_blocks).lower(kv, ids).compile()
        assert scatter.memory_analysis().alias_size_in_bytes == size_of(kv)
        assert gather.memory_analysis().output_size_in_bytes == size_of(swap_spec(kv, 8))
        for compiled in (scatter, gather):
            assert compiled.memory_analysis().temp_size_in_bytes < layer_pool_bytes(4000) / 10


# ---- an engine that swaps

POOL = {"num_device_blocks": 28, "block_size": 4, "max_num_seqs": 16, "preemption_mode": "swap", "num_decode_steps": 1}
PROMPTS = tiny.prompts(16, least=20, most=70, seed=9)
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2)


@pytest.fixture
def engine():
    with Engine(tiny.model_directory(), **POOL) as engine:
        yield engine


def serve(engine) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in engine.generate(PROMPTS, PARAMS, use_tqdm=False)]


def test_k_and_v_of_swapped_requests_come_back_bit_equal(engine, monkeypatch):
    runner, on_host, num_compared = engine._runner, {}, 0
    swap_out, swap_in = runner._swap_out, runner._swap_in

    def content(block):
        return [bits(pool)[block].copy() for pool in jax.tree.leaves(runner._kv)]

    def watched_out(swap):
        on_host.update(
            {host: content(block) for host, block in zip(swap.host_blocks.tolist(), swap.device_block_c, strict=False)}
        )
        swap_out(swap)

    def watched_in(swap, **rest):
        nonlocal num_compared
        swap_in(swap, **rest)
        for host, block in zip(swap.host_blocks.tolist(), swap.device_block_c, strict=False):
            np.testing.assert_array_equal(content(block), on_host[host])
            num_compared += 1

    monkeypatch.setattr(runner, "_swap_out", watched_out)
    monkeypatch.setattr(runner, "_swap_in", watched_in)
    serve(engine)
    assert num_compared > 10


def test_no_step_waits_for_a_swap_to_the_host(engine, monkeypatch):
    """What is taken in has always arrived; pieces, not blocks, are moved."""
    host, landed = engine._runner._host_blocks, []
    land_oldest = host._land_oldest

    def watched():
        landed.append((len(host._staged[0][0]), host._staged[0][1].is_ready()))
        land_oldest()

    monkeypatch.setattr(host, "_land_oldest", watched)
    serve(engine)
    num_blocks = engine.stats()["num_blocks_swapped_out"]
    assert num_blocks > 30 and sum(size for size, _ in landed) == num_blocks
    assert len(landed) < num_blocks / 2
    assert sum(not is_ready for _, is_ready in landed) <= len(landed) // 10


def test_a_swapped_request_that_is_aborted_leaves_the_others_their_tokens(engine):
    ids = [engine.add_request(prompt, PARAMS) for prompt in PROMPTS]
    aborted, outputs = None, {}
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in engine.step() if output.finished}
        swapped = [request for request in engine._scheduler.waiting if request.host_block_ids]
        if swapped and aborted is None:
            aborted = swapped[0].id
            engine.abort(aborted)
        engine.check()
    assert aborted is not None and engine.stats()["host_blocks_used"] == 0
    for i, request_id in enumerate(ids):
        if request_id != aborted:
            assert outputs[request_id].outputs[0].token_ids == tiny.naive_greedy(PROMPTS[i], 24)


def test_after_a_step_that_failed_swapped_requests_are_computed_again(engine, monkeypatch):
    for prompt in PROMPTS:
        engine.add_request(prompt, PARAMS)
    outputs = {}
    while not any(request.host_block_ids for request in engine._scheduler.waiting):
        outputs |= {output.request_id: output for output in engine.step()}
    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "wait", lambda drawn: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in engine.step()}
        engine.check()
    assert [o.outputs[0].token_ids for _, o in sorted(outputs.items(), key=lambda item: int(item[0]))] == [
        tiny.naive_greedy(prompt, 24) for prompt in PROMPTS
    ]


def test_blocks_may_go_by_way_of_pinned_memory_as_on_gpus_and_tpus(monkeypatch):
    """Which the tests' CPU does not need, but can have."""
    pinned, kinds = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host"), set()
    monkeypatch.setattr(runner, "pinned_host", lambda device: pinned)
    with Engine(tiny.model_directory(), **POOL) as engine:
        host = engine._runner._host_blocks
        store = host.store
        monkeypatch.setattr(host, "store", lambda blocks, x: kinds.add(x.sharding.memory_kind) or store(blocks, x))
        tokens = serve(engine)
        assert engine.stats()["num_blocks_swapped_in"] > 10
    assert kinds == {"pinned_host"}
    assert tokens == [tiny.naive_greedy(prompt, 24) for prompt in PROMPTS]


def test_costs_are_measured_where_they_decide():
    with Engine(tiny.model_directory(), **POOL | {"preemption_mode": "auto"}) as engine:
        assert engine._scheduler.costs is None
        serve(engine)
        costs = engine._scheduler.costs
        assert 0 < costs.per_token < 1 and 0 < costs.per_block < 1


def test_costs_are_not_measured_where_swapping_is_forced(engine):
    serve(engine)
    assert engine._scheduler.costs is None


def test_an_engine_that_recomputes_takes_no_host_memory():
    with Engine(tiny.model_directory(), **POOL | {"preemption_mode": "recompute"}) as engine:
        assert engine.memory_report().num_host_blocks == 0
        tokens = serve(engine)
        assert engine.stats()["num_preemptions"] > 0 == engine.stats()["num_blocks_swapped_out"]
    assert tokens == [tiny.naive_greedy(prompt, 24) for prompt in PROMPTS]


# ---- 500 requests in a pool of 5 % of what they want

NUM_PROMPTS = 340
"""A quarter of them with n = 3: 500 requests and more."""


def many():
    prompts = tiny.prompts(NUM_PROMPTS, least=4, most=40, seed=21)
    for i in range(NUM_PROMPTS // 2, NUM_PROMPTS, 5):
        prompts[i] = prompts[i - NUM_PROMPTS // 2][:24] + prompts[i][:15]
    params = [
        replace(GREEDY, max_tokens=16 + i % 9)
        if i % 4 < 2
        else replace(SEEDED, seed=i, max_tokens=16 + i % 9, n=3 if i % 4 == 3 else 1)
        for i in range(NUM_PROMPTS)
    ]
    return prompts, params


SMALL = {"block_size": 8, "max_num_seqs": 48, "max_num_batched_tokens": 96}


def num_blocks_wanted() -> int:
    return sum(p.n * -(-(len(prompt) + p.max_tokens) // 8) for prompt, p in zip(*many(), strict=True))


@functools.cache
def without_preemption():
    """Ten prompts at a time, in the same pool, so that steps are compiled once for all of these tests."""
    prompts, params = many()
    engine = Engine(tiny.model_directory(), **SETTINGS | SMALL | {"num_device_blocks": num_blocks_wanted() // 20})
    ids, outputs = {}, {}
    for i in range(NUM_PROMPTS):
        ids[engine.add_request(prompts[i], params[i])] = i
        while len(ids) - len(outputs) == 10 or (i == NUM_PROMPTS - 1 and engine.has_unfinished_requests()):
            outputs |= {ids[output.request_id]: output for output in engine.step() if output.finished}
    assert engine.stats()["num_preemptions"] == 0
    engine.close()
    return [outputs[i] for i in range(NUM_PROMPTS)]


def pytest_generate_tests(metafunc):
    """Each value once, or each pair of them."""
    if "caching" in metafunc.fixturenames:
        pairs = [("swap", True), ("recompute", False)]
        if metafunc.config.getoption("every_mode"):
            pairs += [("swap", False), ("recompute", True)]
        metafunc.parametrize(("mode", "caching"), pairs)


def test_500_requests_in_a_pool_of_5_percent_of_what_they_want_yield_the_same_tokens(mode, caching):
    prompts, params = many()
    settings = SMALL | {"num_device_blocks": num_blocks_wanted() // 20}
    result = run(prompts, params, **settings, enable_prefix_caching=caching, preemption_mode=mode)
    assert sum(p.n for p in params) >= 500 and result.stats["num_preemptions"] > 20
    assert (result.stats["num_blocks_swapped_in"] > 20) == (mode == "swap")
    assert_same(result.outputs, without_preemption())
