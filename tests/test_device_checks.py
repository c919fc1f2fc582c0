"""scripts/tpu_check.sh and gpu_check.sh, in small on a CPU: their stages run, say how they ended, and what they printed
stays. By default the one for GPUs: they share most."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import tiny

SCRIPTS = Path(__file__).parent.parent / "scripts"
STAGES = {
    "tpu": ["device", "numerics", "tokens", "attention", "step", "throughput"],
    "gpu": [
        "device", "numerics", "tokens", "logprobs_bf16", "logprobs_random", "decode_attention", "prefill_attention",
        "decode_1b", "decode_8b", "decode_1b_one_graph",
    ],
}  # fmt: skip
LIMIT_S = {"gpu": 8 * 60}


def started(device, folder, *options, python=sys.executable):
    environment = os.environ | {"PYTHON": str(python), "MODEL": tiny.model_directory()}
    environment["JAX_COMPILATION_CACHE_DIR"] = jax.config.jax_compilation_cache_dir
    environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    command = [str(SCRIPTS / f"{device}_check.sh"), *options, str(folder)]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, **streams, env=environment, start_new_session=True)


def lines_of(text):
    return [json.loads(line) for line in text.splitlines()]


def pytest_generate_tests(metafunc):
    if "run_device" in metafunc.fixturenames:
        metafunc.parametrize("run_device", list(STAGES) if metafunc.config.getoption("every_mode") else ["gpu"])


def test_each_stage_runs_in_order_says_how_it_ended_and_a_table_is_last(run_device, tmp_path):
    device = run_device
    process = started(device, tmp_path, "--small")
    printed, errors = process.communicate()
    assert process.returncode == 0, errors
    lines = lines_of(printed)
    assert lines == lines_of((tmp_path / "results.jsonl").read_text())
    names = [line["stage"] for line in lines if "limit_s" in line]
    assert names == STAGES[device]
    assert [(line["stage"], line["status"]) for line in lines if "status" in line] == [(name, 0) for name in names]
    printed_by, stage = {name: [] for name in names}, None
    for line in lines:
        stage = line.get("stage", stage)
        if "stage" not in line:
            printed_by[stage].append(line)
    check_common(printed_by, f"pallas_{device}")
    (check_tpu if device == "tpu" else check_gpu)(printed_by)
    table = (tmp_path / "table.txt").read_text()
    assert errors.endswith(table)
    assert [row.split()[0] for row in table.splitlines() if not row.startswith(" ")] == names


def check_common(printed_by, kernel):
    assert printed_by["device"][0]["platform"] == "cpu"
    *cases, counts = printed_by["numerics"]
    assert counts["equal"] == len(cases) > 0
    assert all(case["interpreted"] and case["backend"] == kernel for case in cases)
    run, prompt, drawn, _, tokens = printed_by["tokens"]
    assert run["tokens"] == drawn["tokens"] == tokens["tokens"] == 16 and prompt["tokens"] > 0
    assert tokens["differing"] == [] and prompt["equal"] and drawn["equal"] and tokens["equal"]


def check_tpu(printed_by):
    assert {line["backend"] for line in printed_by["attention"]} == {"xla", "pallas_tpu"}
    assert printed_by["step"][0]["step_ms"] > 0 and printed_by["throughput"][0]["output_tok_s"] > 0


def check_gpu(printed_by):
    assert len(printed_by["logprobs_random"]) == 3
    for name in ("decode_attention", "prefill_attention"):
        assert [line["backend"] for line in printed_by[name]] == ["pallas_gpu"]
    for name in ("decode_1b", "decode_8b", "decode_1b_one_graph"):
        prefill, decode, timeline = printed_by[name]
        assert prefill["floor_tok_s"] > 0 and decode["requests"] == timeline["requests"] == 2
        assert decode["of_floor"] == pytest.approx(decode["floor_ms"] / decode["step_ms"], rel=0.1)
        ms = timeline["timeline_ms"]
        assert ms["attention"] > 0 and ms["matmul"] > 0
        assert ms["gaps"] == pytest.approx(decode["step_ms"] - ms["busy"], abs=0.002)


@pytest.mark.parametrize("device", LIMIT_S)
def test_no_stage_is_given_more_than_what_is_left_of_the_time(device, tmp_path):
    """The total is below what is promised, and stages get no more than the rest of it."""
    script = (SCRIPTS / f"{device}_check.sh").read_text()
    total_s = int(re.search(r"^total_s=(\d+)$", script, re.MULTILINE)[1])
    # The rest is for the table, what has to be killed, and a second for each stage that comes too late.
    assert total_s + 30 <= LIMIT_S[device]
    copy = tmp_path / "scripts"
    copy.mkdir()
    (copy / "some_check.sh").write_text(
        'default_folder=x\ntotal_s=2\n. "$(dirname "$0")/check_stages.sh"\n'
        "stage long 60 sleep 30\nstage late 60 sleep 30\n"
    )
    (copy / "check_stages.sh").write_text((SCRIPTS / "check_stages.sh").read_text())
    command = ["bash", str(copy / "some_check.sh"), str(tmp_path / "out")]
    printed = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"MODEL": "none"}).stdout
    lines = [(line["stage"], line.get("limit_s"), line.get("status")) for line in lines_of(printed)]
    assert lines == [("long", 2, None), ("long", None, 124), ("late", 1, None), ("late", None, 124)]


@pytest.mark.parametrize("device", STAGES)
def test_where_there_is_no_such_device_that_is_said_and_nothing_else_is_tried(device, tmp_path):
    process = started(device, tmp_path)
    printed, errors = process.communicate()
    assert process.returncode == 1 and f"this is no {device} but: cpu" in errors
    begun, facts, ended = lines_of(printed)
    assert (begun["stage"], facts["platform"], ended["status"]) == ("device", "cpu", 1)


@pytest.mark.parametrize("device", STAGES)
def test_stages_go_on_after_one_that_failed_and_the_status_tells(device, tmp_path):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\ncase "$*" in *check_attention*) echo "it differs" >&2; exit 1;; esac\necho "{}"\n')
    python.chmod(0o755)
    process = started(device, tmp_path, python=python)
    printed, errors = process.communicate()
    statuses = [(line["stage"], line["status"]) for line in lines_of(printed) if "status" in line]
    assert statuses == [(name, int(name == "numerics")) for name in STAGES[device]]
    assert process.returncode == 1 and errors == "it differs\n{}\n"


def test_what_was_printed_before_the_end_is_there_when_it_is_cut_off(tmp_path):
    process = started("gpu", tmp_path, "--small")
    assert process.stdout is not None
    *seen, _ = [next(process.stdout) for _ in range(4)]  # the fourth may not be written yet
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert (tmp_path / "results.jsonl").read_text().startswith("".join(seen))
    assert lines_of(seen[-1])[0]["status"] == 0
