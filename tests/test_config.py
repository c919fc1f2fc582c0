"""Settings: wrong ones are refused by name, "auto" becomes a value once."""

from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest

from jaxpaged.config import DeviceFacts, EngineConfig, ModelConfig, RopeScaling, attention_notice, resolve

MODEL = ModelConfig(
    vocab_size=100,
    hidden_size=8,
    intermediate_size=12,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=2,
    max_position_embeddings=128,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
)
CPU = DeviceFacts(
    platform="cpu",
    kind="a CPU",
    num_cores=2,
    total_memory=2**33,
    memory_limit=2**32,
    memory_in_use=0,
    host_memory=2**33,
    jax_version="0.0",
    has_native_bf16=False,
    compute_capability=0,
)
TPU = replace(CPU, platform="tpu", kind="TPU v5e", has_native_bf16=True)
AMPERE = replace(CPU, platform="gpu", kind="an A100", has_native_bf16=True, compute_capability=8.0)
HOPPER = replace(AMPERE, kind="an H200", jax_version="0.11.2", compute_capability=9.0)
TURING = replace(CPU, platform="gpu", kind="Tesla T4", has_native_bf16=False, compute_capability=7.5)


@pytest.mark.parametrize(
    ("name", "value", "legal"),
    [
        ("dtype", "int8", "'auto', 'float32', 'float16', 'bfloat16'"),
        ("seed", 2**64, "64 bits"),
        ("seed", -(2**63) - 1, f"must be {-(2**63)} or more"),
        ("seed", 1.5, "whole number"),
        ("block_size", 0, "must be 1 or more"),
        ("block_size", "big", "whole number"),
        ("max_model_len", 1, "give 2 or more"),
        ("max_model_len", 0, "must be 1 or more"),
        ("max_model_len", "auto", "whole number"),
        ("max_num_seqs", 0, "must be 1 or more"),
        ("max_num_seqs", True, "whole number"),
        ("max_num_seqs", None, "whole number"),
        ("max_num_batched_tokens", 0, "must be 1 or more"),
        ("max_num_batched_tokens", 16.0, "whole number"),
        ("gpu_memory_utilization", 0, r"\(0, 1\]"),
        ("gpu_memory_utilization", 1.01, r"\(0, 1\]"),
        ("gpu_memory_utilization", float("nan"), r"\(0, 1\]"),
        ("gpu_memory_utilization", "most", "must be a number"),
        ("kv_cache_memory_bytes", 0, "must be 1 or more"),
        ("num_device_blocks", -1, "must be 1 or more"),
        ("swap_space", -1, "GiB, 0 or more"),
        ("swap_space", float("inf"), "GiB, 0 or more"),
        ("swap_space", float("nan"), "GiB, 0 or more"),
        ("swap_space", None, "must be a number"),
        ("kv_offloading_size", -1, "GiB, 0 or more"),
        ("kv_offloading_size", "much", "must be a number"),
        ("enable_prefix_caching", 1, "True or False"),
        ("attention_backend", "flash", "'auto', 'xla', 'pallas_tpu', 'pallas_gpu', 'mosaic_gpu'"),
        ("load_format", "pt", "'safetensors', 'gguf', 'orbax', 'dummy'"),
        ("quantization", "int4", "None, 'int8'"),
        ("max_logprobs", -2, "must be -1 or more"),
        ("warmup", "no", "'lazy', 'full'"),
        ("max_num_seqs", 10**11, "must be 65536 or less"),
        ("num_decode_steps", 10**12, "must be 1024 or less"),
    ],
)
def test_a_wrong_setting_is_refused_by_name_with_its_value_and_what_is_legal(name, value, legal):
    with pytest.raises(ValueError, match=rf"^{name}={value!r}.*{legal}".replace("+", r"\+")):
        EngineConfig(**{name: value})


def test_a_dtype_is_given_by_name():
    with pytest.raises(ValueError, match=r"dtype=dtype\('float32'\) is not known; choose one of 'auto', 'float32'"):
        EngineConfig(dtype=np.dtype("float32"))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kv_cache_dtype", "fp8"),
        ("native_kernels", True),
        ("native_kernels", False),
    ],
)
def test_a_setting_that_is_not_built_yet_is_refused(name, value):
    with pytest.raises(ValueError, match=f"{name}={value!r} is not supported yet"):
        EngineConfig(**{name: value})


def test_an_unknown_setting_is_a_type_error():
    with pytest.raises(TypeError, match="tensor_parallel"):
        EngineConfig(tensor_parallel_size=2)


def test_the_size_of_the_pool_is_given_once():
    with pytest.raises(ValueError, match=r"kv_cache_memory_bytes=5 and num_device_blocks=6.*give one"):
        EngineConfig(kv_cache_memory_bytes=5, num_device_blocks=6)


def test_a_config_is_never_changed():
    with pytest.raises(FrozenInstanceError):
        EngineConfig().seed = 1


def test_resolve_turns_every_auto_into_a_value_and_leaves_its_argument_alone():
    given = EngineConfig()
    resolved = resolve(given, MODEL, CPU)
    assert given == EngineConfig()
    assert (resolved.dtype, resolved.block_size, resolved.max_model_len) == ("float32", 16, 128)
    assert (resolved.attention_backend, resolved.warmup) == ("xla", "lazy")
    assert resolve(given, MODEL, AMPERE).warmup == "full"
    assert resolve(resolved, MODEL, CPU) == resolved


def test_resolve_keeps_what_was_given():
    given = EngineConfig(dtype="bfloat16", block_size=8, max_model_len=77, attention_backend="xla", warmup="full")
    assert resolve(given, MODEL, CPU) == given


@pytest.mark.parametrize(
    ("device", "checkpoint", "dtype"),
    [
        (CPU, "bfloat16", "float32"),
        (CPU, "float32", "float32"),
        (replace(CPU, has_native_bf16=True), "float32", "bfloat16"),
        (replace(CPU, has_native_bf16=True), "float16", "bfloat16"),
        (AMPERE, "bfloat16", "bfloat16"),
        (AMPERE, "float16", "float16"),
        (AMPERE, "float32", "bfloat16"),
        (TURING, "bfloat16", "float16"),
        (TURING, "float32", "float16"),
        (TPU, "float16", "bfloat16"),
        (TPU, "float32", "bfloat16"),
    ],
)
def test_auto_dtype_is_the_faster_one_on_a_cpu_bfloat16_on_a_tpu_else_16_bit_as_checkpoint_and_device_have_it(
    device, checkpoint, dtype
):
    assert resolve(EngineConfig(), replace(MODEL, dtype=checkpoint), device).dtype == dtype


def test_max_logprobs_is_at_most_the_vocabulary_and_minus_one_is_all_of_it():
    assert resolve(EngineConfig(max_logprobs=-1), MODEL, CPU).max_logprobs == 100
    assert resolve(EngineConfig(max_logprobs=20), MODEL, CPU).max_logprobs == 20
    assert resolve(EngineConfig(max_logprobs=101), MODEL, CPU).max_logprobs == 100


def test_a_max_model_len_beyond_the_trained_positions_is_refused_unless_rope_stretches():
    assert resolve(EngineConfig(max_model_len=128), MODEL, CPU).max_model_len == 128
    with pytest.raises(ValueError, match="max_model_len=129 exceeds the 128 positions"):
        resolve(EngineConfig(max_model_len=129), MODEL, CPU)
    dynamic = replace(MODEL, rope_scaling=RopeScaling(kind="dynamic", factor=2.0))
    assert resolve(EngineConfig(max_model_len=129), dynamic, CPU).max_model_len == 129
    llama3 = replace(MODEL, rope_scaling=RopeScaling(kind="llama3", factor=2.0))
    with pytest.raises(ValueError, match="exceeds the 128 positions"):
        resolve(EngineConfig(max_model_len=129), llama3, CPU)


def test_an_architecture_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="num_heads=4 is no multiple of num_kv_heads=3"):
        replace(MODEL, num_kv_heads=3)
    with pytest.raises(ValueError, match="head_dim=3 is odd"):
        replace(MODEL, head_dim=3)


def test_parameters_are_counted_with_norms_and_biases_and_tied_embeddings_once():
    # per layer: q 8×8, k and v 8×4 each, o 8×8, gate, up and down 8×12 each, two norms of 8
    layer = 64 + 2 * 32 + 64 + 3 * 96 + 16
    assert MODEL.num_parameters == 2 * layer + 2 * 800 + 8
    assert replace(MODEL, tie_word_embeddings=True).num_parameters == 2 * layer + 800 + 8
    # biases: q 8, k and v 4 each, o 8; gate and up 12 each, down 8
    assert replace(MODEL, attention_bias=True).num_parameters == MODEL.num_parameters + 2 * 24
    assert replace(MODEL, mlp_bias=True).num_parameters == MODEL.num_parameters + 2 * 32


FOR_TPU = replace(MODEL, num_kv_heads=2, head_dim=64, max_position_embeddings=131072)


def on_tpu(model=FOR_TPU, **settings):
    return resolve(EngineConfig(**settings), model, TPU)


def test_auto_takes_the_tpu_kernel_on_a_tpu_where_the_model_fills_its_lanes():
    assert on_tpu().attention_backend == "pallas_tpu"
    assert on_tpu(replace(FOR_TPU, head_dim=48)).attention_backend == "xla"
    assert on_tpu(attention_backend="xla").attention_backend == "xla"


def test_auto_takes_the_gpu_kernel_on_a_gpu_that_has_it():
    on = {device: resolve(EngineConfig(), MODEL, device) for device in (AMPERE, TURING)}
    assert (on[AMPERE].attention_backend, on[AMPERE].block_size) == ("pallas_gpu", 16)
    assert (on[TURING].attention_backend, on[TURING].dtype) == ("xla", "float16")
    assert resolve(EngineConfig(attention_backend="xla"), MODEL, AMPERE).attention_backend == "xla"
    assert resolve(EngineConfig(), replace(MODEL, head_dim=258), AMPERE).attention_backend == "xla"


def test_a_device_whose_kernel_is_not_taken_says_why():
    for model, device, reason in [
        (MODEL, TURING, "Tesla T4 is older than compute capability 8.0"),
        (replace(MODEL, head_dim=258), AMPERE, "head_dim=258 is above 256"),
        (replace(FOR_TPU, head_dim=48), TPU, "2 × 48 is no multiple of 64"),
    ]:
        notice = attention_notice(EngineConfig(), model, device)
        assert notice is not None and "takes 'xla'" in notice and notice.endswith(reason)
        assert attention_notice(EngineConfig(attention_backend="xla"), model, device) is None
    for model, device in [(MODEL, AMPERE), (FOR_TPU, TPU), (MODEL, CPU)]:
        assert attention_notice(EngineConfig(), model, device) is None


@pytest.mark.parametrize(
    ("settings", "size"),
    [
        ({"max_model_len": 8192}, 16),  # 256 requests × 512 blocks × 4 bytes = 512 KiB
        ({"max_model_len": 8193}, 32),
        ({"max_model_len": 32768}, 64),
        ({}, 256),
        ({"max_num_seqs": 64}, 64),
        ({"max_num_seqs": 1}, 16),
        ({"max_model_len": 8192, "block_size": 128}, 128),
        ({"attention_backend": "xla"}, 16),
    ],
)
def test_a_block_on_a_tpu_is_as_small_as_the_page_table_in_512_kib_of_scalar_memory_lets_it_be(settings, size):
    assert on_tpu(**settings).block_size == size


@pytest.mark.parametrize(
    ("settings", "model", "message"),
    [
        ({"block_size": 16}, FOR_TPU, "block_size=16.* 256 or more for the page table of max_num_seqs=256 requests"),
        ({"block_size": 8, "max_num_seqs": 1}, FOR_TPU, "block_size=8.* a power of two, 16 or more"),
        ({"block_size": 48, "max_num_seqs": 1}, FOR_TPU, "block_size=48.* a power of two"),
        ({"dtype": "float16"}, FOR_TPU, "knows no float16"),
        ({}, replace(FOR_TPU, head_dim=48), "a multiple of 64, but the model has 2 × 48"),
    ],
)
def test_what_the_tpu_kernel_cannot_do_is_refused_before_anything_is_loaded(settings, model, message):
    with pytest.raises(ValueError, match=message):
        on_tpu(model, attention_backend="pallas_tpu", **settings)


def test_the_tpu_kernel_is_refused_elsewhere():
    with pytest.raises(ValueError, match=r"needs a TPU, but this is a CPU \(cpu\); use 'auto'"):
        resolve(EngineConfig(attention_backend="pallas_tpu"), FOR_TPU, CPU)


@pytest.mark.parametrize(
    ("model", "device", "reason"),
    [
        (MODEL, CPU, r"this is a CPU \(cpu\)"),
        (FOR_TPU, TPU, r"this is TPU v5e \(tpu\)"),
        (MODEL, TURING, "Tesla T4 is older than compute capability 8.0"),
        (replace(MODEL, head_dim=258), AMPERE, "head_dim=258 is above 256"),
    ],
)
def test_the_gpu_kernel_is_refused_where_it_cannot_be_used(model, device, reason):
    with pytest.raises(ValueError, match=f"compute capability 8.0 or newer.*, but {reason}; use 'auto'"):
        resolve(EngineConfig(attention_backend="pallas_gpu"), model, device)


def test_auto_leaves_the_kernel_for_hopper_decodes_alone_until_it_is_known_to_be_right_there(monkeypatch):
    assert resolve(EngineConfig(), MODEL, HOPPER).attention_backend == "pallas_gpu"
    monkeypatch.setattr("jaxpaged.config._AUTO_TAKES_MOSAIC_GPU", True)
    for device, backend in [(HOPPER, "mosaic_gpu"), (AMPERE, "pallas_gpu"), (TURING, "xla"), (CPU, "xla")]:
        assert resolve(EngineConfig(), MODEL, device).attention_backend == backend
    assert resolve(EngineConfig(), FOR_TPU, TPU).attention_backend == "pallas_tpu"


@pytest.mark.parametrize(
    ("model", "device", "reason"),
    [
        (MODEL, CPU, r"this is a CPU \(cpu\)"),
        (MODEL, TURING, "Tesla T4 is older"),
        (MODEL, AMPERE, "an A100 has compute capability 8.0"),
        (MODEL, replace(HOPPER, kind="a B200", compute_capability=10.0), "a B200 has compute capability 10.0"),
        (MODEL, replace(HOPPER, jax_version="0.10.2"), "this is jax 0.10.2"),
        (replace(MODEL, head_dim=258), HOPPER, "head_dim=258 is above 256"),
    ],
)
def test_the_kernel_for_hopper_decodes_is_refused_elsewhere_by_name(model, device, reason):
    with pytest.raises(ValueError, match=rf"'mosaic_gpu' needs .* 9\.x .*jax 0\.11 .*, but {reason}.*; use 'auto'"):
        resolve(EngineConfig(attention_backend="mosaic_gpu"), model, device)
    for version in ("0.11.2", "0.12.0.1"):
        config = resolve(EngineConfig(attention_backend="mosaic_gpu"), MODEL, replace(HOPPER, jax_version=version))
        assert (config.attention_backend, config.block_size) == ("mosaic_gpu", 16)
