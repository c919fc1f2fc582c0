"""plan.py: the reference point, the same figures as an engine on this machine, and words for what does not fit."""

import json
import sys
from pathlib import Path

import pytest

import tiny
from jaxpaged import Engine, SamplingParams
from jaxpaged.config import DeviceFacts, EngineConfig

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
import plan

TINYLLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32000, "hidden_size": 2048,
    "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32, "num_key_value_heads": 4,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "torch_dtype": "bfloat16",
    "hidden_act": "silu", "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def tinyllama(tmp_path_factory):
    path = tmp_path_factory.mktemp("tinyllama") / "config.json"
    path.write_text(json.dumps(TINYLLAMA))
    return str(path)


def as_json(capsys, *argv, is_estimate=True):
    assert plan.main([*argv, "--json"] + ["--estimate"] * is_estimate) == 0
    return json.loads(capsys.readouterr().out)


def test_tinyllama_on_a_t4_gives_the_reference_point(tinyllama, capsys):
    given = as_json(capsys, "--model", tinyllama, "--device", "t4", "--kv-cache-memory-bytes", "11663015936")
    assert given["dtype"] == "float16"
    report = given["report"]
    assert (report["num_device_blocks"], report["num_host_blocks"]) == (32_357, 11_915)
    assert (report["bytes_per_block"], report["bytes_per_token"]) == (360_448, 22_528)
    assert report["weights"] == 2 * 1_100_048_384


@pytest.mark.parametrize("device", plan.DEVICES)
def test_the_parts_sum_to_the_devices_limit_of_which_the_engine_fills_its_share(tinyllama, capsys, device):
    report = as_json(capsys, "--model", tinyllama, "--device", device, "--gpu-memory-utilization", "0.8")["report"]
    parts = ("weights", "kv_pool", "temporaries", "state", "adjustments", "staging", "other", "free")
    assert sum(report[name] for name in parts) == report["limit"]
    assert report["free"] - (report["limit"] - int(0.8 * report["limit"])) + report["bytes_per_block"] >= 0
    assert report["free"] < 0.2 * report["limit"] + 1


def test_a_decode_step_reads_weights_and_contexts_once(tinyllama, capsys):
    given = as_json(capsys, "--model", tinyllama, "--device", "a100", "--context", "1000")
    weights, kv = given["report"]["weights"], 1000 * 22_528
    assert [floor["batch"] for floor in given["decode_floors"]] == list(plan.BATCH_SIZES)
    for floor in given["decode_floors"]:
        seconds = (weights + floor["batch"] * kv) / 2039e9
        assert floor["ms"] == pytest.approx(1e3 * seconds)
        assert floor["tok_s"] == pytest.approx(floor["batch"] / seconds)
        assert floor["kv_part"] == pytest.approx(floor["batch"] * kv / (weights + floor["batch"] * kv))
    assert given["prefill_tok_s"] == pytest.approx(312e12 / 2 / 1_100_048_384)


def test_floors_end_where_the_pool_does(tinyllama, capsys):
    flags = ("--num-device-blocks", "600", "--max-model-len", "2048", "--context", "1000")
    given = as_json(capsys, "--model", tinyllama, "--device", "h100", *flags)
    assert [floor["batch"] for floor in given["decode_floors"]] == [1, 8]


def test_devices_share_weights_and_blocks_evenly_and_each_has_all_tokens(tinyllama, capsys):
    one = as_json(capsys, "--model", tinyllama, "--device", "v5e")
    four = as_json(capsys, "--model", tinyllama, "--device", "v5e", "--num-devices", "4")
    norms = 2 * 2048 * (2 * 22 + 1)
    assert four["report"]["weights"] == (one["report"]["weights"] - norms) // 4 + norms
    assert four["report"]["bytes_per_token"] == one["report"]["bytes_per_token"] // 4
    assert four["report"]["num_device_blocks"] > 4 * one["report"]["num_device_blocks"], "beside less of the weights"
    assert four["prefill_tok_s"] == pytest.approx(4 * one["prefill_tok_s"])
    assert four["decode_floors"][0]["ms"] == pytest.approx(one["decode_floors"][0]["ms"] / 4, rel=1e-3)
    assert plan.main(["--model", tinyllama, "--device", "v5e", "--num-devices", "2", "--estimate"]) == 0
    assert " in bfloat16 on each of 2 v5e (temporaries are an estimate)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("v5e", "--num-devices", "3"), "--num-devices 3 does not divide num_heads=32, num_kv_heads=4,"),
        (("v5e", "--num-devices", "8"), "--num-devices 8 does not divide num_kv_heads=4 of the model"),
        (("cpu", "--num-devices", "2"), "--device cpu is one device: leave --num-devices at 1"),
    ],
)
def test_a_model_that_devices_cannot_share_is_refused(tinyllama, capsys, flags, words):
    assert plan.main(["--model", tinyllama, "--device", *flags]) == 2
    assert words in capsys.readouterr().err


def test_floors_of_this_machine_are_by_what_it_was_measured_to_do(capsys):
    flags = ("--max-num-seqs", "8", "--max-num-batched-tokens", "64", "--max-model-len", "128")
    flags = ("--model", str(tiny.model_directory()), "--device", "cpu", *flags)
    assert as_json(capsys, *flags)["are_temporaries_estimated"]
    given = as_json(capsys, *flags, is_estimate=False)
    assert not given["are_temporaries_estimated"] and given["prefill_tok_s"] > given["decode_floors"][0]["tok_s"] > 0


def test_an_engine_on_this_machine_has_the_blocks_and_temporaries_that_were_planned(monkeypatch):
    settings = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 128, "num_decode_steps": 1}
    with Engine(tiny.model_directory(), **settings) as engine:
        params = SamplingParams(max_tokens=3, logprobs=20, ignore_eos=True)
        engine.generate(tiny.prompts(8, least=8, most=8), params, use_tqdm=False)
        measured, facts, model = engine.memory_report(), engine._facts, engine.model_config
    planned, is_estimate = plan.partition(model, EngineConfig(**settings), facts)
    assert not is_estimate
    sizes = ("weights", "kv_pool", "state", "adjustments", "staging", "other", "limit")
    for name in ("num_device_blocks", "num_host_blocks", *sizes):
        assert getattr(planned, name) == getattr(measured, name), name
    assert planned.temporaries == pytest.approx(measured.temporaries, rel=0.05)


def test_what_does_not_fit_is_told_with_its_parts(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(TINYLLAMA | {"num_hidden_layers": 400}))
    assert plan.main(["--model", str(tmp_path), "--device", "t4", "--estimate"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("plan.py: error: no memory is left for the KV pool: of ") and ": weights " in error


def test_the_table_marks_an_estimate_and_names_the_floors(tinyllama, capsys):
    assert plan.main(["--model", tinyllama, "--device", "v5e", "--estimate"]) == 0
    text = capsys.readouterr().out
    assert "in bfloat16 on v5e (temporaries are an estimate)" in text
    assert "device blocks: " in text and "decode of   ms a step" in text and "prefill: at most" in text


def test_the_picture_is_written(tinyllama, tmp_path, capsys):
    assert (
        plan.main(["--model", tinyllama, "--device", "h200", "--estimate", "--plot", str(tmp_path / "plan.png")]) == 0
    )
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_facts_of_a_device_that_is_not_here_are_those_of_the_table():
    facts = plan.facts_of("l4")
    assert isinstance(facts, DeviceFacts) and (facts.platform, facts.memory_in_use) == ("gpu", 0)
