"""Laws of scripts/plot_run.py."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "plot_run.py"


def load_script():
    spec = importlib.util.spec_from_file_location("plot_run", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


plot_run = load_script()


def record(step, **changes):
    """A step of 10 prefill and 3 decode tokens in a pool of 20 blocks."""
    counts = {"num_prefill_tokens": 10, "num_decode_tokens": 3, "num_prefill_requests": 1, "num_decode_requests": 3}
    blocks = {"blocks_used": 8, "blocks_cached": 2, "blocks_free": 10}
    rest = {"num_waiting": 5, "num_preempted": 0, "step": step, "time": 0.5 * step + 0.25, "duration_s": 0.25}
    return counts | blocks | rest | changes


def write(path, records):
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


def area(patch):
    """(heights above the baseline, edges) of a filled step patch."""
    values, edges, baseline = patch.get_data()
    return list(values - baseline), list(edges)


@pytest.mark.parametrize(("by", "edges"), [("time", [0.0, 0.5, 1.0, 1.25]), ("step", [0, 1, 2, 3])])
def test_the_panels_show_what_the_records_say(tmp_path, by, edges):
    records = [
        record(0),
        record(1, num_prefill_tokens=0, num_decode_tokens=4, num_preempted=2),
        record(2, num_waiting=0),
    ]
    figure = plot_run.draw(plot_run.read_steps(write(tmp_path / "s.jsonl", records)), "s.jsonl", by)
    tokens, requests, blocks = figure.axes
    assert [area(p) for p in tokens.patches] == [([3, 4, 3], edges), ([10, 0, 10], edges)]
    assert [area(p)[0] for p in requests.patches[:2]] == [[3, 3, 3], [1, 1, 1]]
    assert list(requests.patches[2].get_data().values) == [5, 5, 0]
    assert [area(p)[0] for p in blocks.patches] == [[8] * 3, [2] * 3, [10] * 3]
    assert list(blocks.lines[0].get_xdata()) == [edges[1]]
    labels = [[text.get_text() for text in axes.get_legend().get_texts()] for axes in figure.axes]
    assert labels == [
        ["decode", "prefill"],
        ["decoding", "prefilling", "waiting"],
        ["used", "cached", "free", "preemption\n(2 in all)"],
    ]
    assert [axes.get_ylabel() for axes in figure.axes] == ["tokens in a step", "requests", "blocks of the pool"]
    assert figure.get_suptitle() == "s.jsonl: 3 steps, 30 tokens, 1.2 s"


def test_the_script_writes_a_picture(tmp_path):
    for num_steps in (1, 50):
        stats = write(tmp_path / "s.jsonl", [record(step) for step in range(num_steps)])
        assert plot_run.main([str(stats), str(tmp_path / "out.png")]) == 0
        assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
        (tmp_path / "out.png").unlink()


def test_thinning_keeps_means_of_counts_and_sums_of_preemptions():
    steps = {name: np.arange(7.0) for name in ("start", "end", *plot_run.COUNTS)}
    thinned = plot_run.thin(steps, most=3)
    assert (thinned["start"].tolist(), thinned["end"].tolist()) == ([0, 3, 6], [2, 5, 6])
    assert thinned["blocks_used"].tolist() == [1, 4, 6]
    assert thinned["num_preempted"].tolist() == [3, 12, 6]
    for name, values in plot_run.thin(steps, most=7).items():
        assert values.tolist() == steps[name].tolist()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "has no steps"),
        ('{"step": 0', "line 1, is no record of a step"),
        (json.dumps(record(0)) + "\n3\n", "line 2, is no record of a step"),
        ('{"step": 0}\n', "line 1, has no 'time'"),
        (json.dumps(record(1)) + "\n" + json.dumps(record(0)) + "\n", "times that go back"),
        (b"\xff\xfe", "can't decode"),
    ],
)
def test_a_broken_stats_file_exits_with_2_and_says_what_is_wrong(tmp_path, capsys, content, words):
    stats = tmp_path / "s.jsonl"
    stats.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert plot_run.main([str(stats), str(tmp_path / "out.png")]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out.png").exists()


def test_unusable_files_exit_with_2(tmp_path, capsys):
    assert plot_run.main([str(tmp_path / "none.jsonl"), str(tmp_path / "out.png")]) == 2
    assert "No such file" in capsys.readouterr().err
    stats = write(tmp_path / "s.jsonl", [record(0)])
    assert plot_run.main([str(stats), str(tmp_path / "out.unknown")]) == 2
    assert "unknown" in capsys.readouterr().err


def test_without_matplotlib_the_error_gives_the_command(tmp_path):
    stats = write(tmp_path / "s.jsonl", [record(0)])
    (tmp_path / "matplotlib").mkdir()
    (tmp_path / "matplotlib" / "__init__.py").write_text("raise ModuleNotFoundError(\"No module named 'matplotlib'\")")
    command = [sys.executable, str(SCRIPT), str(stats), str(tmp_path / "out.png")]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == "plot_run.py: error: No module named 'matplotlib'; pip install 'jaxpaged[plot]'\n"
