"""The kernel for decodes on Hopper GPUs, interpreted, against the oracle.

Mosaic's interpreter runs warpgroups in threads, looks for races between what they read and write, counts the phases of
barriers, and fills memory with NaN. It multiplies at once: that a product has not ended, and what it reads, it does not
see, nor that writes must be committed for it. The merge of the splits is interpreted as in `test_gpu_attention.py`.
"""

import dataclasses
import functools
import sys
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from jax.experimental.pallas import mosaic_gpu as plgpu

import same_tokens
import tiny
from jaxpaged import Engine
from jaxpaged.runner import device_facts
from pallas_kernels.gpu import mosaic_decode as kernel
from pallas_kernels.gpu import triton
from pallas_kernels.gpu.layout import pack, unpack
from ragged import SCALE, TOLERANCE, compare, make_batch

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
import check_attention
from covering import covering

pytestmark = pytest.mark.interpret

STATIC = ("scale", "sliding_window", "soft_cap", "num_splits", "num_stages")
attend = jax.jit(kernel.paged_attention, static_argnames=STATIC)


@pytest.fixture(autouse=True)
def interpreted(request, monkeypatch):
    """Both lowerings are interpreted."""
    if not hasattr(plgpu, "InterpretGPUParams"):
        is_chosen = "interpret" in request.config.option.markexpr
        (pytest.fail if is_chosen else pytest.skip)(f"needs jax 0.11 or newer, this is {jax.__version__}")
    interpreter = plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan")
    monkeypatch.setattr(plgpu, "kernel", functools.partial(plgpu.kernel, interpret=interpreter))
    monkeypatch.setattr(triton.pl, "pallas_call", functools.partial(triton.pl.pallas_call, interpret=True))


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", covering(AXES, 2 if metafunc.config.getoption("every_mode") else 1), ids=str)


def check(batch, dtype="bfloat16", **options):
    compare(batch, attend, pack, unpack, dtype=dtype, **options)
    assert not interpret_pallas_call.get_races().races_found


EDGES = [0, 1, 15, 16, 17, 62, 63, 64, 65, 126, 127, 128]
"""Lengths around the edges of blocks of 16 and chunks of 64 tokens."""


@settings(max_examples=4, deadline=None)
@given(
    before=st.lists(st.sampled_from(EDGES), min_size=1, max_size=3),
    gone=st.sets(st.integers(0, 2), max_size=1),
    num_shared=st.integers(0, 2),
    num_splits=st.sampled_from([1, 2]),
    seed=st.integers(0, 99),
)
def test_decodes_match_the_oracle_without_a_race(before, gone, num_shared, num_splits, seed):
    """With rows between them that are not there, prefixes of shared blocks, fewer chunks than splits, and a ring that
    holds a chunk and a half."""
    lengths = [(max(n, 16 * num_shared), 1) for n in before]
    batch = make_batch(
        lengths, block_size=16, head_dim=64, tokens=4, requests=4, num_shared=num_shared, seed=seed, num_heads=4
    )
    batch.context_len_b[[i for i in gone if i < len(before) - 1]] = 0
    check(batch, num_splits=num_splits, num_stages=3)


AXES = {
    "heads": [(4, 2), (3, 3), (9, 1), (64, 1)],
    "head_dim": [128, 64, 256],
    "block_size": [16, 64, 32],
    "dtype": ["bfloat16", "float16"],
    "mask": [{"sliding_window": 40}, {"soft_cap": 1.5}, {"sliding_window": 70, "soft_cap": 3.0}, {}],
}


def test_each_kind_of_heads_block_dtype_and_mask_matches_the_oracle(case):
    """Each value of each axis at least once, with `--every-mode` in all pairs; with the sizes that are chosen by
    default."""
    sizes = {"block_size": case["block_size"], "head_dim": case["head_dim"]}
    n, k = case["heads"]
    batch = make_batch([(100, 1), (0, 1), (158, 1)], tokens=3, num_heads=n, num_kv_heads=k, **sizes)
    check(batch, case["dtype"], **case["mask"])


def test_a_case_that_a_gpu_is_asked_first_is_right_here():
    case = check_attention.cases("mosaic_gpu", "once")[0]
    assert case["shape"] == "decode" and check_attention.error_in("mosaic_gpu", case, seed=0) < TOLERANCE["bfloat16"]


def test_a_request_yields_the_same_output_beside_any_neighbours():
    """Bit for bit."""
    together = make_batch(
        [(100, 1), (63, 1), (140, 1)], block_size=16, head_dim=64, tokens=4, requests=4, num_heads=4
    )  # fmt: skip
    arguments = [jax.numpy.asarray(x, "bfloat16") for x in (together.q_tnh, together.k_tkh, together.v_tkh)]
    kv, options = pack(*(x.astype("bfloat16") for x in together.kv)), {"num_splits": 1, "num_stages": 3, "scale": SCALE}
    out_tnh, _ = attend(*arguments, kv, *together.arguments(), **options)
    alone = dataclasses.replace(together, context_len_b=np.where(np.arange(4) == 2, together.context_len_b, 0))
    alone_tnh, _ = attend(*arguments, kv, *alone.arguments(), **options)
    np.testing.assert_array_equal(alone_tnh[2], out_tnh[2])
    assert not np.asarray(alone_tnh[:2], np.float32).any()


def careless(function, **left_out):
    """The function, traced with some calls of `plgpu` left out."""

    def call(*arguments):
        with mock.patch.multiple(plgpu, **left_out):
            return function(*arguments)

    return call


@pytest.mark.parametrize("who", ["_produce", "_consume"])
def test_who_does_not_wait_is_found_out(who, monkeypatch):
    """One that overwrites what is still read, or reads what has not come."""
    monkeypatch.setattr(kernel, who, careless(getattr(kernel, who), barrier_wait=lambda barrier: None))
    batch = make_batch([(140, 1)], block_size=64, head_dim=64, num_kv_heads=1, num_heads=1)
    fresh = jax.jit(functools.partial(kernel.paged_attention), static_argnames=STATIC)
    with pytest.raises(Exception, match=r"RACE DETECTED|phase"):
        compare(batch, fresh, pack, unpack, dtype="bfloat16", num_stages=2)
    interpret_pallas_call.reset_gpu_interpret_mode_state()


LARGEST_DIFFERENCE = 0.05
"""Of a token's log-probability in bfloat16, between two forms of attention."""


# Slots that no token has reached hold anything, and the interpreter multiplies it, before it is masked.
@pytest.mark.filterwarnings("ignore:.* encountered in matmul:RuntimeWarning")
@pytest.mark.every_mode
def test_the_engine_on_the_interpreted_kernel_yields_the_tokens_of_the_xla_form(tmp_path, monkeypatch):
    """In bfloat16: up to a token where the best two are closer than what it rounds, and with nearly its probabilities;
    prompts and decodes together and alone, two decode steps in a call."""
    monkeypatch.setattr(tiny, "CONFIG", dataclasses.replace(tiny.CONFIG, num_layers=1, head_dim=64))
    for name, value in {"num_hidden_layers": 1, "head_dim": 64}.items():
        monkeypatch.setitem(tiny.HF_CONFIG, name, value)
    monkeypatch.setattr(tiny, "tensors", tiny.tensors.__wrapped__)
    directory = str(tiny.write_model(tmp_path / "model"))
    prompts = [p[:n] for p, n in zip(tiny.prompts(3, least=40, most=40, seed=4), (20, 12, 5), strict=True)]
    params = dataclasses.replace(same_tokens.GREEDY, max_tokens=14)
    settings = {"max_num_seqs": 3, "num_device_blocks": 12, "max_model_len": 64, "dtype": "bfloat16"}
    settings |= {"max_num_batched_tokens": 16, "num_decode_steps": 2, "warmup": "lazy", "block_size": 16}

    def run_on(backend: str):
        engine = Engine(directory, attention_backend=backend, **settings)
        return same_tokens.run(prompts, params, engine=engine, **settings).outputs

    expected = run_on("xla")
    hopper = {"platform": "gpu", "has_native_bf16": True, "compute_capability": 9.0}
    facts = dataclasses.replace(device_facts(), **hopper)
    monkeypatch.setattr("jaxpaged.engine.device_facts", lambda: facts)
    taken = mock.Mock(wraps=kernel.paged_attention)
    monkeypatch.setattr(kernel, "paged_attention", taken)
    actual = run_on("mosaic_gpu")
    assert taken.called
    for one, other in zip(actual, expected, strict=True):
        check_nearly_same(one.outputs[0], other.outputs[0])


def check_nearly_same(actual, expected):
    """The same tokens with nearly the same log-probabilities, up to a near tie."""
    for i, (a, e) in enumerate(zip(actual.token_ids, expected.token_ids, strict=True)):
        if a != e:
            best, second = sorted((p.logprob for p in expected.logprobs[i].values()), reverse=True)[:2]
            assert best - second < LARGEST_DIFFERENCE, f"token {i}: {a} for {e}, which is better by {best - second}"
            return
        difference = abs(actual.logprobs[i][a].logprob - expected.logprobs[i][e].logprob)
        assert difference < LARGEST_DIFFERENCE, f"token {i}: log-probabilities differ by {difference}"
