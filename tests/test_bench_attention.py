"""scripts/bench_attention.py on tiny shapes: each is timed with each backend, and its floor is arithmetic."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from jaxpaged.config import ModelConfig

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
import bench_attention
from bench_attention import Rates, Shape

MODEL = ModelConfig(
    vocab_size=1, hidden_size=1, intermediate_size=1, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=64,
    max_position_embeddings=64, rms_norm_eps=1e-5, rope_theta=1e4,
)  # fmt: skip
SIZES = ["--heads", "4x2", "--head-dim", "64", "--dtype", "float32", "--repeat", "1", "--calls", "2"]


def bench(*arguments):
    command = [sys.executable, bench_attention.__file__, *SIZES, "--rate-size", "4", *arguments]
    process = subprocess.run(command, capture_output=True, text=True)
    return process, [json.loads(line) for line in process.stdout.splitlines()]


def test_each_shape_is_timed_with_the_xla_form_and_with_the_interpreted_kernel():
    process, lines = bench("--interpret", "tpu", "--decode", "2x40", "--prefill", "1x20@30")
    assert process.returncode == 0, process.stderr
    names = [(line.get("decode"), line.get("prefill"), line["backend"]) for line in lines]
    assert names == [
        ("2x40", None, "xla"), ("2x40", None, "pallas_tpu"), (None, "1x20@30", "xla"), (None, "1x20@30", "pallas_tpu"),
    ]  # fmt: skip
    for line in lines:
        shape = Shape.parse(line.get("decode") or line["prefill"], is_decode="decode" in line)
        assert (line["bytes"], line["flops"]) == (shape.num_bytes(MODEL, 4), shape.num_flops(MODEL))
        floor_us = max(line["bytes"] / line["copy_gb_s"] / 1e3, line["flops"] / line["matmul_tflop_s"] / 1e6)
        assert line["floor_us"] == pytest.approx(floor_us, rel=0.05, abs=0.01)
        assert line["of_floor"] == pytest.approx(line["floor_us"] / line["us"], rel=0.05, abs=0.002)
        assert line["gb_s"] == pytest.approx(line["bytes"] / line["us"] / 1e3, rel=0.05, abs=0.01)
        assert line["interpreted"] and line["device"] and line["jax"] and line["calls"] == 2
    assert process.stderr.count("pallas_tpu") == 2 and "of floor" in process.stderr


def test_no_shape_is_begun_after_the_limit_and_what_is_left_is_named():
    process, lines = bench("--decode", "2x40", "2x41", "--backends", "xla", "--limit-s", "0")
    assert lines == [{"not_timed": ["2x40", "2x41"]}]
    assert process.returncode == 0


def test_a_backend_that_cannot_run_has_a_line_that_says_so_and_the_others_are_timed():
    process, lines = bench("--decode", "2x40", "--backends", "pallas_tpu", "xla")
    assert process.returncode == 1
    assert "needs a TPU" in lines[0]["error"] and lines[0]["backend"] == "pallas_tpu"
    assert lines[1]["backend"] == "xla" and lines[1]["us"] > 0


@pytest.mark.parametrize(("text", "num_new", "context"), [("2x7", 7, 7), ("3x5@9", 5, 9), ("2x6", 1, 6)])
def test_the_floor_counts_bytes_that_must_move_and_pairs_that_see_each_other(text, num_new, context):
    shape = Shape.parse(text, is_decode=num_new == 1)
    assert (shape.num_new, shape.context) == (num_new, context)
    pairs = sum(key <= query for query in range(context - num_new, context) for key in range(context))
    old = context - num_new
    rows_moved = 2 * (old + 2 * num_new)  # K and V: old ones read, new ones read and written
    num_bytes = shape.num_requests * (rows_moved * 2 * 64 + 2 * num_new * 4 * 64) * 2
    assert shape.num_bytes(MODEL, 2) == num_bytes
    assert shape.num_flops(MODEL) == shape.num_requests * pairs * 4 * 64 * 2 * 2
    assert Rates(copy=10.0, matmul=1e30).floor(shape, MODEL, 2) == num_bytes / 10


@pytest.mark.parametrize("text", ["", "3", "0x5", "2x5@4", "2x5@", "2x5x6", "axb"])
def test_what_is_no_shape_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError):
        Shape.parse(text, is_decode=False)
