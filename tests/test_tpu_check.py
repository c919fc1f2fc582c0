"""scripts/tpu_check.sh, in small on a CPU: its stages run, say how they ended, and what they printed stays."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import tiny

SCRIPT = Path(__file__).parent.parent / "scripts" / "tpu_check.sh"
STAGES = ["device", "numerics", "tokens_kernel", "tokens_xla", "tokens_equal", "attention", "step", "throughput"]


def started(folder, *options, python=sys.executable):
    environment = os.environ | {"PYTHON": str(python), "MODEL": tiny.model_directory()}
    command = [str(SCRIPT), *options, str(folder)]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, **streams, env=environment, start_new_session=True)


def lines_of(text):
    return [json.loads(line) for line in text.splitlines()]


def test_each_stage_runs_in_order_and_says_how_it_ended(tmp_path):
    process = started(tmp_path, "--small")
    printed, errors = process.communicate()
    assert process.returncode == 0, errors
    lines = lines_of(printed)
    assert lines == lines_of((tmp_path / "results.jsonl").read_text())
    assert [line["stage"] for line in lines if "limit_s" in line] == STAGES
    assert [(line["stage"], line["status"]) for line in lines if "status" in line] == [(name, 0) for name in STAGES]
    printed_by, stage = {name: [] for name in STAGES}, None
    for line in lines:
        stage = line.get("stage", stage)
        if "stage" not in line:
            printed_by[stage].append(line)
    assert printed_by["device"][0]["platform"] == "cpu"
    *cases, counts = printed_by["numerics"]
    assert counts["equal"] == len(cases) > 0 and all(case["interpreted"] for case in cases)
    assert printed_by["tokens_equal"] == [{"requests": 1, "tokens": 8, "differing": []}]
    assert {line["backend"] for line in printed_by["attention"]} == {"xla", "pallas_tpu"}
    assert printed_by["step"][0]["step_ms"] > 0 and printed_by["throughput"][0]["output_tok_s"] > 0


def test_where_there_is_no_tpu_that_is_said_and_nothing_else_is_tried(tmp_path):
    process = started(tmp_path)
    printed, errors = process.communicate()
    assert process.returncode == 1 and "this is no tpu but: cpu" in errors
    begun, facts, ended = lines_of(printed)
    assert (begun["stage"], facts["platform"], ended["status"]) == ("device", "cpu", 1)


def test_stages_go_on_after_one_that_failed_and_the_status_tells(tmp_path):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\ncase "$*" in *check_tpu*) echo "it differs" >&2; exit 1;; esac\necho "{}"\n')
    python.chmod(0o755)
    process = started(tmp_path, python=python)
    printed, errors = process.communicate()
    statuses = [(line["stage"], line["status"]) for line in lines_of(printed) if "status" in line]
    assert statuses == [(name, int(name == "numerics")) for name in STAGES]
    assert process.returncode == 1 and errors == "it differs\n"


def test_what_was_printed_before_the_end_is_there_when_it_is_cut_off(tmp_path):
    process = started(tmp_path, "--small")
    assert process.stdout is not None
    *seen, _ = [next(process.stdout) for _ in range(4)]  # the fourth may not be written yet
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert (tmp_path / "results.jsonl").read_text().startswith("".join(seen))
    assert lines_of(seen[-1])[0]["status"] == 0


def test_tokens_that_differ_fail_their_stage(tmp_path):
    """The comparison of the stage, on rows that differ in one token, in a request, and not at all."""
    program = SCRIPT.read_text().split("equal_program='\n")[1].split("\n'\n")[0]
    rows = [{"index": 1, "token_ids": [5, 6]}, {"index": 2, "token_ids": [7]}]
    others = [rows, rows[:1], [rows[0], {"index": 2, "token_ids": [8]}], []]
    statuses = []
    for other in others:
        for name, content in (("a.jsonl", rows), ("b.jsonl", other)):
            (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in content))
        command = [sys.executable, "-c", program, str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
        statuses.append(subprocess.run(command, capture_output=True).returncode)
    assert statuses == [0, 1, 1, 1]
