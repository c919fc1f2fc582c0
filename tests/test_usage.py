"""What cannot work as asked ends each script with exit status 2 and one line that says why, and no traceback."""

import importlib
import sys
from pathlib import Path

import pytest

import tiny

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
NO_MODEL = "model='nope' is neither a file nor a directory here"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("bench_attention.py --decode 1", "--decode: '1' must be two whole numbers, 1 or more, such as 16x250"),
        ("bench_attention.py --decode 2x5@9", "--decode: '2x5@9' must be two whole numbers"),
        ("bench_attention.py --prefill 2x5@4", "'2x5@4': the context must be 5 tokens or more"),
        ("bench_attention.py --heads 3x2", "'3x2': the query heads must be a multiple of the KV heads"),
        ("bench_attention.py --dtype nope", "dtype='nope' is not known; choose one of"),
        ("bench_decode.py --requests 0", "--requests: '0' must be a whole number, 1 or more"),
        ("bench_decode.py --model nope", NO_MODEL),
        ("bench_offloading.py --model nope", NO_MODEL),
        ("bench_preemption.py --model nope", NO_MODEL),
        ("bench_sampler.py --vocab 0", "--vocab: '0' must be a whole number, 1 or more"),
        ("bench_sampler.py --vocab 2000 999", "--vocab 999 must be 1000 or more"),
        ("bench_step.py", "give --decode or --prefill"),
        ("bench_step.py --decode foo", "--decode: 'foo' must be two whole numbers, 1 or more"),
        ("bench_step.py --decode 0x10", "--decode: '0x10' must be two whole numbers, 1 or more"),
        ("bench_step.py --model nope --decode 1x8", NO_MODEL),
        ("bench_throughput.py nope.json", "'nope.json'"),
        (f"bench_throughput.py {__file__}", f"{__file__} is no JSON ("),
        ("bench_throughput.py --host-only --model nope", NO_MODEL),
        ("bench_throughput.py --sweep nope/sweep.jsonl", "'nope/sweep.jsonl'"),
        ("check_attention.py --first 0", "--first: '0' must be a whole number, 1 or more"),
        ("check_engine.py --prompts nope", "--prompts nope is no file"),
        ("check_engine.py --dtype bfloat16 --model nope", NO_MODEL),
        ("check_table.py", "required: results.jsonl"),
        ("check_table.py nope", "'nope'"),
    ],
)
def test_what_cannot_work_is_told_in_one_line(command, words, monkeypatch, capsys):
    script, *arguments = command.split()
    assert words in error_of(script, arguments, monkeypatch, capsys)


def test_a_size_that_no_step_has_is_told(monkeypatch, capsys):
    arguments = ["--model", tiny.model_directory(), "--prefill", "999x5"]
    assert "give at most 256 requests" in error_of("bench_step.py", arguments, monkeypatch, capsys)


def error_of(script, arguments, monkeypatch, capsys):
    """The last line on stderr."""
    monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
    with pytest.raises(SystemExit, match="2"):
        importlib.import_module(script.removesuffix(".py")).main()
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(f"{script}: error: ")
    return line
