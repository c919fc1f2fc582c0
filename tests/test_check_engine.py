"""scripts/check_engine.py finds a kernel that is not quite right."""

import json
import sys
from pathlib import Path

import pytest

import tiny
from pallas_kernels import xla

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
import check_engine


@pytest.fixture
def wrong_kernel(monkeypatch):
    """The engine with backend "auto" gets scores a hundredth too large."""
    attend, is_wrong = xla.paged_attention, False

    def attend_wrongly(*arguments, scale, **options):
        return attend(*arguments, scale=scale * (1.01 if is_wrong else 1), **options)

    def make_engine(*arguments, attention_backend, **settings):
        nonlocal is_wrong
        is_wrong = attention_backend == "auto"
        return engine(*arguments, attention_backend=attention_backend, **settings)

    engine = check_engine.Engine
    monkeypatch.setattr(check_engine, "Engine", make_engine)
    monkeypatch.setattr(xla, "paged_attention", attend_wrongly)


def run(capsys, *arguments):
    status = check_engine.main(["--model", tiny.model_directory(), "--first", "1", "--max-tokens", "3", *arguments])
    return status, [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def pytest_generate_tests(metafunc):
    if "weights" in metafunc.fixturenames:
        metafunc.parametrize("weights", ["dummy", "auto"] if metafunc.config.getoption("every_mode") else ["dummy"])


def test_what_is_not_quite_right_is_found(weights, wrong_kernel, capsys):
    status, lines = run(capsys, "--load-format", weights)
    assert status == 1
    assert not any(line["equal"] for line in lines if "equal" in line)
    if weights == "dummy":
        assert len(lines) == 3  # tokens of random weights are not compared
    else:
        assert len(lines) == 5 and "logprobs differ" in lines[-1]["why"]
