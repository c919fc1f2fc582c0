"""scripts/bench_step.py on a small model: its parts are there, and what it prints adds up."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import tiny

SCRIPT = Path(__file__).parent.parent / "scripts" / "bench_step.py"


@pytest.mark.parametrize("quantization", [[], ["--quantization", "int8"]])
def test_the_parts_of_a_step_are_timed_and_have_floors(quantization):
    sizes = ["--decode", "2x20", "--prefill", "1x32", "--repeat", "2", "--dtype", "float32"]
    command = [sys.executable, str(SCRIPT), "--model", str(tiny.model_directory()), *sizes, *quantization]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    decode, prefill = map(json.loads, printed.splitlines())
    assert (decode["decode"], prefill["prefill"]) == ("2x20", "1x32")
    for line in (decode, prefill):
        parts = [line[f"{name}_ms"] for name in ("attention", "matmul", "head", "elementwise")]
        assert min(parts) > 0
        assert line["step_ms"] == pytest.approx(sum(parts) + line["rest_ms"], abs=0.05)
        floors = line["floors_ms"]
        assert floors["step"] == pytest.approx(sum(floors.values()) - floors["step"], abs=0.05)
        assert line["bandwidth_gb_s"] > 0 and line["peak_gflop_s"] > 0
