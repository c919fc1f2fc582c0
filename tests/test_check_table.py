"""scripts/check_table.py: a table also of results that were cut off, and of all kinds of lines."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
from check_table import found, read, table

ATTENTION = {"decode": "64x1024", "backend": "pallas_gpu", "us": 90.0, "floor_us": 63.0, "of_floor": 0.7}
ATTENTION |= {"gb_s": 3000.0, "tflop_s": 12.0}


def test_each_stage_has_its_row_and_what_it_found_below():
    lines = [
        {"stage": "numerics", "limit_s": 75},
        {"result": "equal", "backend": "pallas_gpu"},
        {"result": "differs", "backend": "pallas_gpu", "dtype": "float32", "why": "outputs differ by 1"},
        {"equal": 1, "differs": 1, "refused": 0},
        {"stage": "numerics", "status": 1, "seconds": 9},
        {"stage": "attention", "limit_s": 60},
        ATTENTION,
        {"not_timed": ["1x1024", "8x1024"]},
        {"stage": "attention", "status": 124, "seconds": 60},
        {"stage": "decode_8b", "limit_s": 60},
    ]
    assert table(lines).splitlines() == [
        "numerics              WRONG after 9 s",
        "    differs: pallas_gpu float32: outputs differ by 1",
        "    1 cases equal the oracle, 1 differ, 0 refused",
        "attention             cut off after 60 s",
        "    pallas_gpu  decode 64x1024             90.0 µs    70% of floor     3000 GB/s    12.0 TFLOP/s",
        "    not timed: 1x1024 8x1024",
        "decode_8b             has not ended",
    ]


def test_a_line_that_was_cut_short_is_left_out():
    assert read('{"stage": "device", "limit_s": 20}\n{"stage": "dev') == [{"stage": "device", "limit_s": 20}]
    assert read("") == [] and table([]) == ""


def test_decodes_say_how_far_they_are_from_the_floor_and_where_time_goes():
    decode = {"requests": 64, "step_ms": 4.2, "floor_ms": 3.0, "of_floor": 0.714, "output_tok_s": 15238.0}
    decode |= {"launch_ms": 0.3, "steps_per_call": 8.0}
    assert (
        found(decode) == "  64 requests:    4.200 ms a step, 1.40 × the floor, 15238 tok/s, launch 0.30 ms for 8 steps"
    )
    timeline = {"requests": 64, "timeline_ms": {"attention": 0.5, "gaps": 1.25}}
    assert found(timeline) == "  64 requests: attention 0.50, gaps 1.25 ms"
    assert found({"backend": "xla", "decode": "1x2", "error": "does not fit"}) == "xla 1x2: does not fit"


def test_comparisons_say_how_far_they_are_apart():
    line = {"logprobs": "drawn", "dtype": "float32", "tokens": 48, "largest": 2e-6, "mean": 1e-7, "bound": 1e-4}
    start = "logprobs of 48 tokens (drawn, float32): off by 2.0e-06"
    assert found(line | {"equal": True}) == f"{start} at most, 1.0e-07 on average"
    assert found(line | {"equal": False}) == f"{start}, more than 0.0001"
    tokens = {"tokens": 96, "differing": [3], "equal": False, "why": "token 5: 7 ≠ 8"}
    assert found(tokens) == "96 greedy tokens, different in 1 requests: token 5: 7 ≠ 8"
