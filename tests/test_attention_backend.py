"""Which kernel the attention of a step is given to."""

import os
import subprocess
import sys
from dataclasses import replace

import jax
import numpy as np
import pytest

from compiled_programs import ROOT
from jaxpaged import attention
from jaxpaged.config import EngineConfig, ModelConfig
from pallas_kernels.gpu import mosaic_decode, paged_attention
from pallas_kernels.gpu.layout import HeadMajorKV

SIZES = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 128}


@pytest.mark.parametrize(
    ("is_decode", "changed", "taken"),
    [
        (True, {}, mosaic_decode),
        (False, {}, paged_attention),
        (True, {"dtype": "float32"}, paged_attention),
        (True, {"kv_dtype": "int8"}, paged_attention),
        (True, {"head_dim": 80}, paged_attention),
    ],
)
def test_decodes_that_fit_take_the_kernel_for_hopper_and_all_else_the_other_one(is_decode, changed, taken, monkeypatch):
    calls = []
    for module in (mosaic_decode, paged_attention):
        monkeypatch.setattr(
            module, "paged_attention", lambda *arguments, module=module, **options: calls.append((module, options))
        )
    sizes = SIZES | {"dtype": "bfloat16", "kv_dtype": "bfloat16"} | changed
    h, k = sizes["head_dim"], sizes["num_kv_heads"]
    new = [jax.ShapeDtypeStruct((4, heads, h), sizes["dtype"]) for heads in (sizes["num_heads"], k, k)]
    pool = jax.ShapeDtypeStruct((9, k, 16, h), sizes["kv_dtype"])
    batch = (None, None, None, None)
    attention.paged_attention(
        *new, HeadMajorKV(pool, pool), *batch, backend="mosaic_gpu", scale=0.5, is_decode=is_decode
    )
    assert calls == [(taken, {"scale": 0.5} | ({} if taken is mosaic_decode else {"is_decode": is_decode}))]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, None),
        ({"head_dim": 64, "block_size": 64, "dtype": "float16", "kv_dtype": "float16", "num_heads": 128}, None),
        ({"dtype": "float32"}, "not in float32"),
        ({"kv_dtype": "int8"}, "bfloat16 like the queries, not in int8"),
        ({"head_dim": 96}, "head_dim must be 64, 128 or 256, not 96"),
        ({"block_size": 8}, "block_size must be 16, 32 or 64, not 8"),
        ({"num_heads": 130}, "can serve 64 query heads, not 65"),
    ],
)
def test_what_the_kernel_for_hopper_does_not_take_has_a_reason(changed, reason):
    case = SIZES | {"dtype": "bfloat16", "kv_dtype": "bfloat16", "block_size": 16} | changed
    why_not = mosaic_decode.why_not(**case)
    assert why_not is None if reason is None else reason in why_not


def test_a_call_that_does_not_fit_is_an_error_with_the_reason():
    pool = jax.ShapeDtypeStruct((9, 2, 16, 80), "bfloat16")
    new = [jax.ShapeDtypeStruct((4, heads, 80), "bfloat16") for heads in (8, 2, 2)]
    ints = [jax.ShapeDtypeStruct(shape, np.int32) for shape in ((5,), (4,), (4, 4), ())]
    with pytest.raises(ValueError, match="cannot be used: head_dim must be 64, 128 or 256, not 80"):
        jax.eval_shape(lambda *a: mosaic_decode.paged_attention(*a, scale=1.0), *new, HeadMajorKV(pool, pool), *ints)


def test_an_engine_whose_decodes_do_not_take_the_kernel_that_was_asked_for_says_why():
    model = ModelConfig(
        vocab_size=64, hidden_size=1024, intermediate_size=64, num_layers=1,
        max_position_embeddings=128, rms_norm_eps=1e-5, rope_theta=10000.0, **SIZES,
    )  # fmt: skip
    config = EngineConfig(attention_backend="mosaic_gpu", dtype="bfloat16", block_size=16)
    assert attention.decode_notice(config, model) is None
    notice = attention.decode_notice(replace(config, dtype="float32"), model)
    assert notice is not None and notice.endswith("as well: it computes in bfloat16 and float16, not in float32")
    assert attention.decode_notice(replace(config, dtype="float32", attention_backend="pallas_gpu"), model) is None


@pytest.mark.parametrize("backend", ["pallas_tpu", "pallas_gpu"])
def test_under_a_mesh_each_device_computes_the_heads_that_it_has(backend):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(str(ROOT / name) for name in (".", "scripts", "tests"))}
    command = [sys.executable, "tests/attention_on_two_devices.py", backend]
    process = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=120)
    assert process.returncode == 0, process.stderr[-2000:]
