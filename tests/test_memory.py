"""Sizes of the KV pool: the reference point exactly, each rule at its edge."""

from dataclasses import replace

import pytest

from jaxpaged.config import GIB, DeviceFacts, EngineConfig, ModelConfig, resolve
from jaxpaged.memory import (
    MemoryReport,
    block_bytes,
    blocks_for,
    check_host_memory,
    decide_num_device_blocks,
    decide_num_host_blocks,
    fit_max_model_len,
    kv_block_shape,
    num_host_blocks,
    swap_staging_bytes,
)

TINYLLAMA = ModelConfig(
    vocab_size=32000,
    hidden_size=2048,
    intermediate_size=5632,
    num_layers=22,
    num_heads=32,
    num_kv_heads=4,
    head_dim=64,
    max_position_embeddings=2048,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    dtype="bfloat16",
)
GPU = DeviceFacts(
    platform="gpu",
    kind="a GPU",
    num_cores=8,
    total_memory=16 * GIB,
    memory_limit=15 * GIB,
    memory_in_use=GIB,
    host_memory=64 * GIB,
    jax_version="0.0",
    has_native_bf16=True,
    compute_capability=8.0,
)
CPU = replace(GPU, platform="cpu", kind="a CPU", memory_in_use=0, has_native_bf16=False)
PER_BLOCK = 360_448


def num_blocks(device=GPU, *, weights=0, temporaries=0, state=0, **settings):
    config = resolve(EngineConfig(**settings), TINYLLAMA, device)
    return decide_num_device_blocks(config, TINYLLAMA, device, weights=weights, temporaries=temporaries, state=state)


def test_a_block_of_tinyllama_takes_16384_bytes_a_layer_and_360448_in_all():
    assert block_bytes(replace(TINYLLAMA, num_layers=1), 16, "bfloat16") == 16_384
    assert block_bytes(TINYLLAMA, 16, "bfloat16") == block_bytes(TINYLLAMA, 16, "float16") == PER_BLOCK
    assert block_bytes(TINYLLAMA, 16, "float32") == 2 * PER_BLOCK
    assert block_bytes(TINYLLAMA, 8, "float16") == PER_BLOCK // 2


def test_4_gib_of_swap_space_hold_11915_blocks_of_tinyllama():
    assert num_host_blocks(4, PER_BLOCK) == 11_915
    assert num_host_blocks(0, PER_BLOCK) == 0
    assert num_host_blocks(0.5, GIB // 4) == 2


def test_the_host_pool_holds_no_more_than_all_requests_at_full_length():
    def num_on_host(**settings):
        return decide_num_host_blocks(resolve(EngineConfig(dtype="float16", **settings), TINYLLAMA, GPU), TINYLLAMA)

    assert num_on_host() == 11_915
    assert num_on_host(max_num_seqs=3, max_model_len=100) == 3 * 7
    assert num_on_host(preemption_mode="recompute") == num_on_host(swap_space=0) == 0
    assert num_on_host(swap_space=0, kv_offloading_size=4) == 11_915
    assert num_on_host(max_num_seqs=3, max_model_len=100, kv_offloading_size=4) == 3 * 7 + 11_915


def test_11663015936_bytes_hold_32357_blocks_of_tinyllama():
    assert num_blocks(kv_cache_memory_bytes=11_663_015_936) == 32_357
    assert num_blocks(kv_cache_memory_bytes=11_663_015_935) == 32_356


def test_the_shape_of_a_block_has_as_many_elements_as_its_bytes_say():
    assert kv_block_shape("head_major", 16, 4, 64) == (4, 16, 64)
    assert block_bytes(TINYLLAMA, 16, "bfloat16") == 2 * 4 * 16 * 64 * 2 * 22
    assert kv_block_shape("packed", 16, 4, 64) == (16, 2 * 4 * 64)
    with pytest.raises(ValueError, match="'stacked' is not known"):
        kv_block_shape("stacked", 16, 4, 64)


@pytest.mark.parametrize(("tokens", "size", "blocks"), [(0, 4, 0), (1, 4, 1), (4, 4, 1), (5, 4, 2), (3, 1, 3)])
def test_tokens_take_whole_blocks(tokens, size, blocks):
    assert blocks_for(tokens, size) == blocks


def test_a_given_number_of_blocks_is_taken_as_it_is():
    assert num_blocks(num_device_blocks=7, weights=100 * GIB) == 7


def test_a_pool_that_is_larger_than_the_device_is_refused():
    blocks = 16 * GIB // PER_BLOCK
    assert num_blocks(num_device_blocks=blocks) == blocks == num_blocks(kv_cache_memory_bytes=16 * GIB)
    with pytest.raises(ValueError, match=f"num_device_blocks={blocks + 1} would take .* but a GPU has {16 * GIB}"):
        num_blocks(num_device_blocks=blocks + 1)
    with pytest.raises(ValueError, match=f"kv_cache_memory_bytes={16 * GIB + 1} would take"):
        num_blocks(kv_cache_memory_bytes=16 * GIB + 1)


def test_bytes_that_hold_no_block_are_refused_with_the_size_of_one():
    assert num_blocks(kv_cache_memory_bytes=PER_BLOCK) == 1
    with pytest.raises(ValueError, match=r"kv_cache_memory_bytes=360447 holds no block: one takes 360448 bytes"):
        num_blocks(kv_cache_memory_bytes=PER_BLOCK - 1)


def test_on_an_accelerator_the_pool_gets_limit_times_utilization_less_all_else():
    sizes = {"weights": 2 * GIB, "temporaries": 3 * 2**20, "state": 12345}
    spent = 2 * GIB + 3 * 2**20 + 12345 + GIB
    assert num_blocks(gpu_memory_utilization=0.5, **sizes) == (15 * GIB // 2 - spent) // PER_BLOCK
    assert num_blocks(gpu_memory_utilization=1, **sizes) == (15 * GIB - spent) // PER_BLOCK


def test_blocks_that_are_swapped_wait_in_device_memory_on_a_cpu_alone():
    def staging(device, **settings):
        return swap_staging_bytes(resolve(EngineConfig(**settings), TINYLLAMA, device), device.platform, PER_BLOCK)

    assert staging(CPU) == staging(CPU, swap_space=0, kv_offloading_size=1) == 3 * 4 * 32 * PER_BLOCK
    assert staging(GPU) == staging(CPU, preemption_mode="recompute") == 0


def test_on_a_cpu_the_pool_is_the_smallest_of_4_gib_two_fifths_of_memory_and_all_requests_at_full_length():
    assert num_blocks(CPU) == 4 * GIB // (2 * PER_BLOCK)
    assert num_blocks(replace(CPU, memory_limit=5 * GIB)) == int(0.4 * 5 * GIB) // (2 * PER_BLOCK)
    assert num_blocks(replace(CPU, memory_limit=5 * GIB), weights=GIB) == int(0.4 * 4 * GIB) // (2 * PER_BLOCK)
    assert num_blocks(CPU, max_num_seqs=3, max_model_len=100) == 3 * 7


@pytest.mark.parametrize("device", [GPU, CPU])
def test_no_memory_left_is_an_error_with_the_numbers(device):
    with pytest.raises(ValueError, match=f"no memory is left for the KV pool.*: weights {20 * GIB}"):
        num_blocks(device, weights=20 * GIB)


@pytest.mark.parametrize(
    ("part", "remedy"),
    [
        ("weights", "the weights: take quantization='int8'"),
        ("temporaries", "the temporaries: lower max_num_batched_tokens"),
        ("state", "the step state: lower max_num_seqs"),
    ],
)
def test_what_is_too_large_is_named_with_what_is_missing_and_what_would_help(part, remedy):
    usable = 14 * GIB - GIB
    with pytest.raises(ValueError, match=rf"one block of {PER_BLOCK} bytes {PER_BLOCK} are missing\. .*{remedy}"):
        num_blocks(gpu_memory_utilization=14 / 15, **{part: usable})


def test_max_model_len_is_lowered_to_the_pool_unless_it_was_given():
    assert fit_max_model_len(None, 64, 4, 16) == 64
    assert fit_max_model_len(64, 64, 4, 16) == 64
    assert fit_max_model_len(None, 65, 4, 16) == 64
    with pytest.raises(ValueError, match=r"max_model_len=65 needs 5 blocks of 16 tokens.*has 4 \(64 tokens\); lower"):
        fit_max_model_len(65, 65, 4, 16)


@pytest.mark.parametrize("given", [None, 8])
def test_a_pool_of_a_single_token_serves_no_request(given):
    assert fit_max_model_len(None, 8, 2, 1) == 2
    with pytest.raises(ValueError, match=r"room for 1 token, but a request needs 2 or more"):
        fit_max_model_len(given, 8, 1, 1)


def test_host_blocks_over_40_percent_of_the_host_warn_and_over_70_are_refused():
    def check(swap_space, offloading=0):
        return check_host_memory(EngineConfig(swap_space=swap_space, kv_offloading_size=offloading), 10 * GIB)

    assert check(4) is None and check(1, 3) is None
    warning = check(5)
    assert warning is not None and "swap_space=5 GiB is 50% of the host's 10.0 GiB" in warning
    warning = check(0, 5)
    assert warning is not None and "swap_space=0 + kv_offloading_size=5 GiB is 50% of the host's" in warning
    assert check(7) is not None
    with pytest.raises(ValueError, match=r"at most 70 % may be taken: lower it to 7.0"):
        check(7.1)
    assert check_host_memory(EngineConfig(swap_space=9, preemption_mode="recompute"), 10 * GIB) is None, "none is taken"
    with pytest.raises(ValueError, match=r"swap_space=4 \+ kv_offloading_size=4 GiB is 80% of the host's"):
        check(4, 4)


def report(**changes):
    sizes = {"limit": 10 * GIB, "total": 10 * GIB, "weights": 2 * GIB, "kv_pool": 5 * GIB, "temporaries": GIB}
    sizes |= {"state": 400, "adjustments": 600, "staging": 0, "other": 24}
    blocks = {"block_size": 16, "bytes_per_block": PER_BLOCK, "num_device_blocks": 1000, "num_host_blocks": 11_915}
    return MemoryReport(**(sizes | blocks | {"max_model_len": 2048, "max_num_seqs": 256} | changes))


def test_the_parts_of_the_report_sum_to_the_limit():
    r = report()
    taken = r.weights + r.kv_pool + r.temporaries + r.state + r.adjustments + r.staging + r.other
    assert taken + r.free == r.limit
    assert r.free == 2 * GIB - 1024
    assert report(staging=GIB).free == GIB - 1024


def test_the_report_says_how_many_requests_of_full_length_fit():
    assert report().max_concurrency == 1000 / 128
    assert "requests of 2,048 tokens at once: 7.81 (at most 256)" in str(report())


def test_the_report_names_blocks_on_the_device_and_on_the_host():
    text = str(report())
    assert "block: 16 tokens, 360,448 bytes (22,528 a token)" in text
    assert "device blocks: 1,000 (16,000 tokens)" in text
    assert "host blocks: 11,915 (up to 4.00 GiB of host memory)" in text


def test_the_report_says_how_to_raise_a_limit_below_95_percent_of_the_device():
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in str(report(limit=95 * GIB, total=100 * GIB))
    text = str(report(limit=75 * GIB, total=100 * GIB))
    assert "75% of the device's 100.0 GiB" in text and "XLA_PYTHON_CLIENT_MEM_FRACTION raises it" in text
