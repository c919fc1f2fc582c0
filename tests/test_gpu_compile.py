"""Compiled for NVIDIA GPUs, without one: kernels and whole steps, updated in place, with nothing big copied.

By default few programs; with `--every-mode` pairs of axis values and all models, for all targets. Chosen by
`-m gpu_compile`, a missing compiler is a failure; else these tests are skipped then.
"""

import pytest

from compiled_programs import compiled, need

pytestmark = pytest.mark.gpu_compile

SCRIPT = ("scripts/compile_for_gpu.py",)
KERNEL_TARGETS = ["a100", "l4", "h200", "b200"]
"""Compute capabilities 8.0, 8.9, 9.0 and 10.0."""
QUICK_STEPS, ALL_STEPS = ["h200"], ["t4", *KERNEL_TARGETS]
QUICK_KERNELS = ["a100", "h200"]
NUM_BLOCKS = (15000, 60000)
MOST_LAUNCHES = 15
"""Kernels of a layer: 13 for an H200, one or two more where less is fused."""


def pytest_generate_tests(metafunc):
    is_full = metafunc.config.getoption("every_mode")
    if "kernel_target" in metafunc.fixturenames:
        metafunc.parametrize("kernel_target", KERNEL_TARGETS if is_full else QUICK_KERNELS)
    if "step_target" in metafunc.fixturenames:
        metafunc.parametrize("step_target", ALL_STEPS if is_full else QUICK_STEPS)


@pytest.fixture(autouse=True)
def cuda_compiler(request):
    how = "pip install --no-deps jax-cuda12-plugin jax-cuda12-pjrt nvidia-cuda-nvcc-cu12, Python 3.12 or newer"
    for package in ("jax_cuda12_plugin", "jax_plugins.xla_cuda12"):
        need(package, "gpu_compile", how, request.config)


def test_the_kernel_compiles_for_all_kinds_of_heads_blocks_dtypes_and_masks_in_place(kernel_target, request):
    """In registers, with the products that the target has for 16 bits."""
    which = "pairs" if request.config.getoption("every_mode") else "once"
    for case in compiled(SCRIPT, kernel_target, "--kernels", which):
        assert case["alias_bytes"] == case["donated_bytes"] and case["copies"] == [], case
        is_split = "merge_splits_kernel" in case["ptxas"]
        is_decode, is_float32 = case["shape"].startswith("decode"), case["dtype"] == "float32"
        assert case["kernels"] == 1 + is_split and (is_decode or not is_split), case
        assert is_split or case["shape"] != "decode of 2", case
        assert all(kernel["spilled_bytes"] == 0 for kernel in case["ptxas"].values()), case
        products = {"mma.sync", "wgmma", "tcgen05.mma"} & set(case["ptxas"]["paged_attention_kernel"]["instructions"])
        assert bool(products) is not is_float32, case


MOSAIC = ("--backend", "mosaic_gpu")
MOSAIC_KERNEL = "decode_kernel_mosaic_gpu_kernel"


def test_the_kernel_for_hopper_decodes_compiles_for_all_that_it_takes_without_a_spill(request):
    """With copies by TMA and products by wgmma."""
    which = "pairs" if request.config.getoption("every_mode") else "once"
    for case in compiled(SCRIPT, "h200", *MOSAIC, "--kernels", which):
        assert case["alias_bytes"] == case["donated_bytes"] and case["copies"] == [], case
        assert case["kernels"] == len(case["ptxas"]) and set(case["ptxas"]) <= {MOSAIC_KERNEL, "merge_splits_kernel"}
        assert len(case["ptxas"]) == 2 or case["shape"] != "decode of 2", case
        assert all(kernel["spilled_bytes"] == 0 for kernel in case["ptxas"].values()), case
        assert {"wgmma", "cp.async.bulk.tensor"} <= set(case["ptxas"][MOSAIC_KERNEL]["instructions"]), case


def test_whole_steps_with_the_kernel_for_hopper_have_it_in_decodes_alone_and_stay_in_place():
    options = ("--steps", "2", "--models", "TinyLlama-1.1B", "--kinds", "decode", "prefill")
    decode, prefill = compiled(SCRIPT, "h200", *MOSAIC, *options, "--blocks", str(NUM_BLOCKS[0]))
    for case, kernel in ((decode, MOSAIC_KERNEL), (prefill, "paged_attention_kernel")):
        assert case["alias_bytes"] == case["donated_bytes"] and is_in_place(case), case
        assert set(case["ptxas"]) == {kernel} and case["kernels"] == 2, case
        assert case["ptxas"][kernel]["spilled_bytes"] == 0, case


def test_whole_steps_update_the_pool_in_place_and_copy_neither_it_nor_weights(step_target, request):
    """On a GPU too old for the kernels in the XLA form."""
    is_full = request.config.getoption("every_mode")
    few = [] if is_full else ["--models", "TinyLlama-1.1B", "--kinds", "decode", "prefill", "swap_out", "swap_in"]
    cases = compiled(SCRIPT, step_target, "--steps", "2", "--blocks", *map(str, NUM_BLOCKS), *few)
    for small, large in zip(cases[::2], cases[1::2], strict=True):
        assert small["step"] == large["step"] and (small["blocks"], large["blocks"]) == NUM_BLOCKS
        assert small["temp_bytes"] == large["temp_bytes"]
        for case in (small, large):
            assert case["alias_bytes"] == case["donated_bytes"], case
            assert is_in_place(case), case
            assert all(kernel["spilled_bytes"] == 0 for kernel in case["ptxas"].values()), case
            has_kernels = step_target != "t4" and case["step"] in ("decode", "prefill")
            assert ("paged_attention_kernel" in case["ptxas"]) == has_kernels, case
            assert case["kernels"] == 2 * len(case["ptxas"]), case
            if has_kernels:
                check_launches(case)


def check_launches(case: dict):
    """A layer is four products, attention and its merge, two writes, the rotation, two norms, and what is added or
    multiplied between; all layers are in one command buffer. For decodes the host waits between steps, not layers."""
    thunks = case["thunks"]
    assert len(thunks["layer"]) <= MOST_LAUNCHES and "kCopy" not in thunks["layer"], case
    assert max(thunks["command_buffers"]) >= case["layers"] * len(thunks["layer"]), case
    assert case["step"] == "decode" or (thunks["waits"] == [] and len(thunks["command_buffers"]) == 1), case


def test_a_decode_step_is_one_command_buffer_where_loops_may_be_in_one():
    """That is asked for by flags: sorts by CUB, which XLA takes where there is a GPU, cannot be in one. The host then
    waits for nothing, and launches once for all tokens of a call."""
    options = ("--steps", "1", "--models", "TinyLlama-1.1B", "--kinds", "decode", "draw")
    flags = "--xla_gpu_enable_command_buffer=+WHILE --xla_gpu_enable_cub_radix_sort=false"
    for case in compiled(SCRIPT, "h200", *options, xla_flags=flags):
        thunks = case["thunks"]
        assert (len(thunks["command_buffers"]), thunks["waits"], thunks["outside"]) == (1, [], 0), case


def is_in_place(case: dict) -> bool:
    """Whether a step's temporaries hold no layer of the pool, and nothing of a pool's or a weight's shape is copied."""
    return case["temp_bytes"] < case["layer_pool_bytes"] and case["copies"] == []


def test_a_copy_planted_in_a_whole_step_is_noticed():
    options = ("--steps", "2", "--models", "TinyLlama-1.1B", "--kinds", "prefill", "--blocks", str(NUM_BLOCKS[0]))
    (case,) = compiled(("tests/compile_with_planted_copy.py", "compile_for_gpu", "pool"), "h200", *options)
    assert not is_in_place(case), case
