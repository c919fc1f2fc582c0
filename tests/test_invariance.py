"""The same tokens alone, in any batch, in any order, chunked or not, cached or not, preempted or not."""

import functools
from dataclasses import replace

import numpy as np
import pytest

import same_tokens
import tiny
from jaxpaged import SamplingParams
from same_tokens import MAX_TOKENS, all_params, alone, assert_same, batch_prompts, run

KINDS = ("greedy", "seeded")
MODES = [(warmup, num_decode_steps) for warmup in ("lazy", "strict") for num_decode_steps in (1, 8)]


def pytest_generate_tests(metafunc):
    """With `--every-mode` each law is tried in each of them."""
    if metafunc.config.getoption("every_mode"):
        metafunc.parametrize("mode", MODES, ids=[f"{warmup}-{steps}" for warmup, steps in MODES])


@pytest.fixture
def mode(request):
    """Else with one decode step in a call of the device, for drawn tokens, and with eight, for others."""
    kind = getattr(request.node, "callspec", None) and request.node.callspec.params.get("kind")
    return "lazy", 1 if kind == "seeded" else 8


@pytest.fixture(autouse=True)
def settings_of_the_mode(mode, monkeypatch):
    for name, value in zip(("warmup", "num_decode_steps"), mode, strict=True):
        monkeypatch.setitem(same_tokens.SETTINGS, name, value)


def test_the_small_model_is_sensitive():
    """Its greedy outputs vary, and each prompt token changes them: else these tests would prove little."""
    for prompt in tiny.prompts(2, least=20, most=30, seed=1):
        output = tiny.naive_greedy(prompt, 64)
        assert len(set(output)) >= 20
        for i in range(len(prompt)):
            changed = list(prompt)
            changed[i] = 3 + (changed[i] + 50) % 250
            assert tiny.naive_greedy(changed, 8) != output[:8]


def test_greedy_tokens_equal_naive_full_attention(request):
    """Of each third request, with `--every-mode` of all."""
    pairs = list(zip(batch_prompts(), alone("greedy"), strict=True))
    for prompt, output in pairs if request.config.getoption("every_mode") else pairs[::3]:
        assert output.outputs[0].token_ids == tiny.naive_greedy(prompt, MAX_TOKENS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_of_64_yields_the_same_tokens(kind):
    result = run(batch_prompts(), all_params(kind))
    assert max(s["num_requests"] for s in result.steps) == 64
    assert_same(result.outputs, alone(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_another_order_yields_the_same_tokens(kind):
    order = np.random.default_rng(5).permutation(64).tolist()
    assert_same(run(batch_prompts(), all_params(kind), order=order, max_num_seqs=16).outputs, alone(kind))


@pytest.mark.parametrize(
    ("budget", "kind"), [*((budget, "greedy") for budget in (1, 2, 3, 15, 16, 17)), (2, "seeded"), (17, "seeded")]
)
def test_any_token_budget_yields_the_same_tokens(budget, kind):
    prompts = batch_prompts()[:20]
    result = run(prompts, all_params(kind)[:20], max_num_batched_tokens=budget)
    assert result.most_tokens_in_a_step <= budget
    num_chunks = sum(s["num_prefill_requests"] for s in result.steps)
    assert num_chunks >= 20 + max(map(len, prompts)) // budget - 1, "prompts came in chunks"
    assert_same(result.outputs, alone(kind)[:20])


@pytest.mark.parametrize("kind", ["greedy", pytest.param("seeded", marks=pytest.mark.every_mode)])
def test_steps_compiled_ahead_yield_the_same_tokens(kind):
    settings = {"max_num_seqs": 6, "max_num_batched_tokens": 16, "num_device_blocks": 30, "block_size": 8}
    result = run(batch_prompts(), all_params(kind), warmup="strict", **settings)
    assert result.stats["num_preemptions"] > 0
    assert_same(result.outputs, alone(kind))


@pytest.mark.parametrize(("block_size", "kind"), [(1, "greedy"), (8, "greedy"), (32, "greedy"), (8, "seeded")])
def test_any_block_size_yields_the_same_tokens(block_size, kind):
    result = run(batch_prompts(), all_params(kind), block_size=block_size, num_device_blocks=8192 // block_size)
    assert_same(result.outputs, alone(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_hits_in_the_prefix_cache_yield_the_same_tokens(kind):
    cold = run(batch_prompts(), all_params(kind), max_num_seqs=16)
    hot = run(batch_prompts(), all_params(kind), max_num_seqs=16, repeat=2)
    off = run(batch_prompts(), all_params(kind), max_num_seqs=16, enable_prefix_caching=False)
    assert off.stats["num_prefix_hit_tokens"] == 0 < cold.stats["num_prefix_hit_tokens"]
    assert hot.stats["num_prefix_hit_tokens"] > 16 * 64
    assert sum(output.num_cached_tokens for output in hot.outputs) > 16 * 64
    for result in (cold, hot, off):
        assert_same(result.outputs, alone(kind))


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_requests_preempted_again_and_again_yield_the_same_tokens(kind, caching):
    """Two of the four swap, and two recompute."""
    is_swap = (kind == "greedy") == caching
    result = run(
        batch_prompts(), all_params(kind), num_device_blocks=28, block_size=4, enable_prefix_caching=caching,
        preemption_mode="swap" if is_swap else "recompute",
    )  # fmt: skip
    stats = result.stats
    assert stats["num_preemptions"] >= 20
    for moved in ("num_blocks_swapped_out", "num_blocks_swapped_in"):
        assert stats[moved] > 50 if is_swap else stats[moved] == 0
    assert max(output.metrics.num_preemptions for output in result.outputs) >= 2
    assert_same(result.outputs, alone(kind))


N_PROMPTS = [prompt for prompt in batch_prompts() if len(prompt) in (1, *range(15, 60))][:8]
N_PARAMS = [
    SamplingParams(temperature=1.0, seed=i, n=3, max_tokens=12, ignore_eos=True, logprobs=2)
    for i in range(len(N_PROMPTS))
]


@functools.cache
def completions_one_prompt_at_a_time():
    return run(N_PROMPTS, N_PARAMS, max_num_seqs=3, num_device_blocks=64, num_decode_steps=1).outputs


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 7},
        {"enable_prefix_caching": False, "block_size": 8},
        {"num_device_blocks": 20, "block_size": 8, "max_num_seqs": 8},
    ],
)
def test_each_of_n_completions_is_what_it_is_in_any_batch(settings):
    result = run(N_PROMPTS, N_PARAMS, **settings)
    if settings.get("num_device_blocks") == 20:
        assert result.stats["num_preemptions"] > 0
    for output in result.outputs:
        assert len({tuple(completion.token_ids) for completion in output.outputs}) == 3
    assert_same(result.outputs, completions_one_prompt_at_a_time())


def test_the_first_of_n_completions_is_the_one_of_a_single_request():
    singles = run(N_PROMPTS, [replace(params, n=1) for params in N_PARAMS]).outputs
    for single, several in zip(singles, completions_one_prompt_at_a_time(), strict=True):
        assert single.outputs[0].token_ids == several.outputs[0].token_ids


def test_unseeded_requests_are_repeatable_by_the_engines_seed():
    params = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)

    def tokens(seed):
        return [o.outputs[0].token_ids for o in run(batch_prompts()[:8], params, seed=seed).outputs]

    assert tokens(1) == tokens(1) != tokens(2)


def test_log_probabilities_change_no_token():
    params = [SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)] * 64
    outputs = run(batch_prompts(), params).outputs
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in alone("greedy")]
