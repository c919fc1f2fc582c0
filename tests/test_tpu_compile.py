"""Compiled for TPUs by libtpu, without one: kernels and whole steps, updated in place, with nothing big copied.

By default one target and few programs; with `--every-mode` all targets, pairs of axis values and all models. Chosen by
`-m tpu_compile`, a missing libtpu is a failure; else these tests are skipped then.
"""

import json
import subprocess
import sys

import pytest

from compiled_programs import ROOT, compiled, need
from test_plan import TINYLLAMA

pytestmark = pytest.mark.tpu_compile

SCRIPT = ("scripts/compile_for_tpu.py",)
QUICK, ALL = ["v5e:2x2"], ["v5e:2x2", "v6e:2x2", "v5p:2x2x1", "tpu7x:2x2x1"]
NUM_BLOCKS = (15000, 60000)


def pytest_generate_tests(metafunc):
    is_full = metafunc.config.getoption("every_mode")
    if "fault" in metafunc.fixturenames:
        faults = [("pool", target, step) for target in ALL for step in ("decode", "prefill")]
        faults.append(("weights", "tpu7x:2x2x1", "decode"))
        metafunc.parametrize(("fault", "target", "step"), faults if is_full else faults[:1])
    elif "target" in metafunc.fixturenames:
        metafunc.parametrize("target", ALL if is_full else QUICK)


@pytest.fixture(autouse=True)
def libtpu(request):
    need("libtpu", "tpu_compile", "pip install .[tpu], Python 3.12 or newer", request.config)


def test_the_kernel_compiles_for_all_kinds_of_heads_blocks_dtypes_and_masks_in_place(target, request):
    which = "pairs" if request.config.getoption("every_mode") else "once"
    for case in compiled(SCRIPT, target, "--kernels", which):
        assert case["alias_bytes"] == case["donated_bytes"], case
        assert case["copies"] == [] and case["kernels"] == (1 if case["shape"].startswith("decode") else 2), case


def is_in_place(case: dict) -> bool:
    """Whether a step's temporaries hold no layer of the pool, and nothing of a pool's or a weight's shape is copied."""
    return case["temp_bytes"] < case["layer_pool_bytes"] and case["copies"] == []


def test_whole_steps_update_the_pool_in_place_and_copy_neither_it_nor_weights(target, request):
    """With four times as many blocks alias bytes grow by just the pool; more cannot be said of them, because row state
    is padded on a TPU. Temporaries do not grow with it. They are what XLA does not keep in VMEM: for v5e the same, for
    the others a choice of activations that it makes anew for each program, which may be 1 % of the pool's growth."""
    models = [] if request.config.getoption("every_mode") else ["--models", "TinyLlama-1.1B"]
    cases = compiled(SCRIPT, target, "--steps", "2", "--blocks", *map(str, NUM_BLOCKS), *models)
    num_kernels = {"decode": 2, "prefill": 4}
    for small, large in zip(cases[::2], cases[1::2], strict=True):
        assert small["step"] == large["step"] and (small["blocks"], large["blocks"]) == NUM_BLOCKS
        growth = large["donated_bytes"] - small["donated_bytes"]
        assert large["alias_bytes"] - small["alias_bytes"] == growth
        assert (growth > 0) == (small["step"] not in ("draw", "swap_out"))
        allowed = 0 if target.startswith("v5e") else growth / 100
        assert large["temp_bytes"] - small["temp_bytes"] <= allowed, (small, large)
        for case in (small, large):
            assert 0 <= case["alias_bytes"] - case["donated_bytes"] < 2**16, case
            assert is_in_place(case), case
            assert case["kernels"] == num_kernels.get(case["step"], 0)


def test_a_copy_planted_in_a_whole_step_is_noticed(fault, target, step):
    """Of the pool; and of weights, as XLA makes it for a TPU 7x of its own accord, unless it is told not to."""
    options = ("--steps", "2", "--models", "TinyLlama-1.1B", "--kinds", step, "--blocks", str(NUM_BLOCKS[0]))
    (case,) = compiled(("tests/compile_with_planted_copy.py", "compile_for_tpu", fault), target, *options)
    assert not is_in_place(case), case


def test_a_plan_takes_temporaries_from_the_compiler(tmp_path):
    """Of one of two devices that share a model."""
    small = {"num_hidden_layers": 1, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 512}
    (tmp_path / "config.json").write_text(json.dumps(TINYLLAMA | small | {"head_dim": 64, "num_attention_heads": 4}))
    command = [sys.executable, "scripts/plan.py", "--model", str(tmp_path), "--device", "v5e", "--json"]
    command += ["--num-devices", "2", "--max-num-batched-tokens", "64", "--max-num-seqs", "8", "--max-model-len", "256"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr[-2000:]
    plan = json.loads(run.stdout)
    assert not plan["are_temporaries_estimated"] and 2**14 < plan["report"]["temporaries"] < 2**24


def test_a_copy_outside_of_fusions_is_noticed(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from compile_for_tpu import copies_in

    copy = "  %copy.1 = bf16[64,16]{0,1:T(8,128)(2,1)} copy(%p)"
    assert copies_in(f"ENTRY %main {{\n{copy}\n}}", [(16, 64)]) == [copy.strip()]
    assert copies_in(f"ENTRY %main {{\n{copy}\n}}", [(16, 65)]) == []
    assert copies_in(f"%fused_computation.1 (p: bf16[64,16]) -> bf16[64,16] {{\n{copy}\n}}", [(16, 64)]) == []
