"""What scripts/compile_for_tpu.py and compile_for_gpu.py compile."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def need(package: str, mark: str, how: str, config: pytest.Config):
    """Fails where the package is missing and the tests were chosen by `-m mark`; else skips them."""
    if importlib.util.find_spec(package) is None:
        (pytest.fail if mark in config.option.markexpr else pytest.skip)(f"{package} is not installed ({how})")


def compiled(program: tuple[str, ...], target: str, *arguments: str, xla_flags: str = "") -> list[dict]:
    """The program's lines, in a process of its own: a compiler's failed check ends the process.

    All programs are compiled, and none is skipped. `xla_flags`: what XLA is told beyond its defaults.
    """
    command = [sys.executable, *program, target, *arguments]
    environment = os.environ | {"XLA_FLAGS": xla_flags}
    environment["PYTHONPATH"] = os.pathsep.join((str(ROOT), str(ROOT / "scripts")))
    process = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    lines = [json.loads(line) for line in process.stdout.splitlines()]
    assert lines, process.stderr[-2000:]
    *cases, counts = lines
    print(target, *arguments, counts)
    assert [case for case in cases if case["result"] != "compiled"] == []
    assert process.returncode == 0, process.stderr[-2000:]
    assert counts == {"compiled": len(cases), "refused": 0, "skipped": 0} and cases
    return cases
