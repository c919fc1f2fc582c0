"""Laws of scripts/bench_throughput.py, against a peer that is a few lines of Python."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import psutil
import pytest

import tiny
from jaxpaged import Engine
from jaxpaged.checkpoints import open_model
from test_checkpoints import write_gguf

SCRIPTS = Path(__file__).parent.parent / "scripts"
WORKLOADS = SCRIPTS / "workloads"


def load_script():
    spec = importlib.util.spec_from_file_location("bench_throughput", SCRIPTS / "bench_throughput.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


sys.path.insert(0, str(SCRIPTS))
bench = load_script()

FAKE_PEER = """\
import json, sys
arguments = sys.argv[1:]
print(json.dumps({"peer": "fake", "arguments": arguments}), flush=True)
for line in sys.stdin:
    run = json.loads(line)
    if "dies" in arguments:
        sys.exit(7)
    max_tokens = [n - ("lazy" in arguments) for n in run["max_tokens"]]
    arrivals = [[[0.5, 1], [0.5 + n, n - 1]] for n in max_tokens]
    token_ids = [[5] * n for n in max_tokens]
    print(json.dumps({"seconds": 4.0, "arrivals": arrivals, "token_ids": token_ids}), flush=True)
"""


FAKE_LLAMA_SERVER = """\
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

if "--version" in sys.argv:
    print("version: 0.1 (abc)\\nbuilt with nothing")
    sys.exit()

class Handler(BaseHTTPRequestHandler):
    def log_message(self, *arguments):
        pass

    def do_GET(self):
        self.answer([b"{}"])

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["temperature"] == 0 and body["ignore_eos"] and not body["cache_prompt"]
        tokens = [len(body["prompt"]) + i for i in range(body["n_predict"])]
        events = [{"tokens": [token]} for token in tokens] + [{"stop": True, "tokens": []}]
        self.answer([b"data: " + json.dumps(event).encode() + b"\\n\\n" for event in events])

    def answer(self, parts):
        self.send_response(200)
        self.end_headers()
        for part in parts:
            self.wfile.write(part)

port = int(sys.argv[sys.argv.index("--port") + 1])
ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def write_program(path, source):
    path.write_text(f"#!{sys.executable}\n{source}")
    path.chmod(0o755)
    return path


def fake_peer(tmp_path, *arguments):
    path = tmp_path / "fake.py"
    path.write_text(FAKE_PEER)
    return bench.Peer([sys.executable, str(path), *arguments], {})


def workload(prompts, max_tokens):
    return bench.Workload("w", prompts, max_tokens, 0.0, True)


# ---- workloads and figures


def test_the_workloads_in_the_repository_can_be_read_and_their_twins_have_the_same_shape():
    for name in ("W1", "W2", "W3", "W4"):
        one, twin = (bench.read_workload(WORKLOADS / f"{name}{end}.json") for end in ("", "_warm"))
        assert one.name == name and one.temperature == 0 and one.ignore_eos
        assert list(map(len, one.prompts)) == list(map(len, twin.prompts)) and one.max_tokens == twin.max_tokens
        assert one.prompts != twin.prompts
    assert sum(bench.read_workload(WORKLOADS / "W2.json").max_tokens) == 3657


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"prompt_token_ids": [[1]]}, "no max_tokens, temperature, ignore_eos"),
        ([{"prompt_token_ids": [[1]]}], "no prompt_token_ids, max_tokens, temperature, ignore_eos"),
        ({"prompt_token_ids": 1, "max_tokens": [1], "temperature": 0, "ignore_eos": True}, "must be lists"),
        (
            {"prompt_token_ids": [[1]], "max_tokens": [1, 2], "temperature": 0, "ignore_eos": True},
            "1 prompts and 2 max",
        ),
    ],
)
def test_a_file_that_is_no_workload_is_refused(tmp_path, record, words):
    (tmp_path / "w.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match=words):
        bench.read_workload(tmp_path / "w.json")


def test_each_token_counts_at_the_time_that_it_was_seen():
    run = {"seconds": 8.0, "arrivals": [[(1.0, 1), (3.0, 4)], [(2.0, 2), (4.0, 1), (6.0, 1)], [(7.0, 2)]]}
    figures = bench.figures(run, [[1] * 10, [1] * 20, [1] * 10])
    assert figures["output_tok_s"] == 11 / 8 and figures["prompt_tok_s"] == 40 / 8
    # Tokens after the first arrival: 4 in 2 s and 2 in 4 s; the third request has no time in between.
    assert figures["decode_tok_s"] == (4 / 2 + 2 / 4) / 2
    assert figures["first_token_s_p50"] == 2.0
    # Gaps: 2 0 0 0 | 0 2 2 | 0.
    assert figures["inter_token_s_p50"] == 0.0 and 1.9 < figures["inter_token_s_p99"] <= 2.0


def test_a_run_of_single_tokens_has_a_decode_rate_of_zero():
    figures = bench.figures({"seconds": 2.0, "arrivals": [[(2.0, 1)]]}, [[1]])
    assert figures["decode_tok_s"] == figures["inter_token_s_p99"] == 0.0 and figures["output_tok_s"] == 0.5


def test_a_ratio_is_the_median_over_runs_side_by_side():
    ours = [dict.fromkeys(bench.RATIOS, value) for value in (1.0, 8.0, 3.0)]
    theirs = [dict.fromkeys(bench.RATIOS, value) for value in (2.0, 2.0, 2.0)]
    ratios = bench.ratios(ours, theirs)
    assert ratios["output_tok_s"] == ratios["first_token_s_p50"] == 1.5
    assert ratios["each"]["decode_tok_s"] == [0.5, 4.0, 1.5]
    theirs[1]["decode_tok_s"] = 0.0
    assert "decode_tok_s" not in bench.ratios(ours, theirs)


def test_tokens_are_the_same_up_to_the_first_difference_of_their_request():
    assert bench.same_tokens([[1, 2, 3, 4], [5, 6]], [[1, 2, 9, 4], [5, 6]]) == 4 / 6
    assert bench.same_tokens([[1, 2]], [[1, 2]]) == 1.0
    assert bench.same_tokens([[1, 2]], [[3, 2]]) == 0.0


# ---- an engine and a peer


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    model = tiny.write_model(tmp_path_factory.mktemp("tiny"))
    with Engine(model, dtype="float32", num_device_blocks=64, max_num_seqs=4) as engine:
        yield engine


def test_a_replay_gets_every_token_of_every_request(engine):
    run, steps = bench.replay(engine, workload([[5, 6, 7], [9] * 6, [4]], [6, 1, 9]))
    assert list(map(len, run["token_ids"])) == [6, 1, 9]
    assert [sum(n for _, n in arrivals) for arrivals in run["arrivals"]] == [6, 1, 9]
    assert all(0 < at <= run["seconds"] for arrivals in run["arrivals"] for at, _ in arrivals)
    assert len({step["step"] for step in steps}) == len(steps) > 1
    figures = bench.step_figures(steps)
    assert figures["num_steps"] == len(steps) and 0 < figures["host_ms_per_step"] < 1e3 * run["seconds"]


def test_a_peer_serves_the_same_workload_and_the_lines_tell_theirs_ours_and_the_ratio(engine, tmp_path):
    record = {"prompt_token_ids": [[5, 6, 7]], "max_tokens": [5], "temperature": 0.0, "ignore_eos": True}
    for name in ("w.json", "w_warm.json"):
        (tmp_path / name).write_text(json.dumps(record))
    with fake_peer(tmp_path) as peer:
        theirs, ours, ratio = bench.measure(engine, tmp_path / "w.json", 2, peer)
    assert theirs["peer"] == "fake" and theirs["output_tok_s"] == 5 / 4 and theirs["decode_tok_s"] == 4 / 5
    assert ours["num_compiled_while_timed"] == 0 and ours["dtype"] == "float32" and ours["num_cores"] == os.cpu_count()
    assert ratio["ratio"] == "jaxpaged / fake" and len(ratio["each"]["output_tok_s"]) == 2
    assert ratio["output_tok_s"] == pytest.approx(ours["output_tok_s"] / 1.25, rel=0.01)
    assert 0 <= ratio["same_tokens"] < 1
    assert peer._process.returncode == 0


def test_a_hot_run_finds_its_prompts_in_the_prefix_cache_and_a_cold_one_does_not(engine, tmp_path, monkeypatch):
    record = {"prompt_token_ids": [list(range(5, 45))], "max_tokens": [3], "temperature": 0.0, "ignore_eos": True}
    (tmp_path / "w.json").write_text(json.dumps(record))
    (tmp_path / "w_warm.json").write_text(json.dumps(record | {"prompt_token_ids": [list(range(45, 85))]}))
    block_size, hits, before = engine.config.block_size, [], []
    warm_up = bench.warm_up

    def counted(*args, **options):
        warm_up(*args, **options)
        before.append(engine.stats()["num_prefix_hit_tokens"])

    monkeypatch.setattr(bench, "warm_up", counted)
    for is_hot in (False, True):
        bench.cold(engine)
        (line,) = bench.measure(engine, tmp_path / "w.json", 2, is_hot=is_hot)
        hits.append(engine.stats()["num_prefix_hit_tokens"] - before[-1])
        assert line["prefix"] == ("hot" if is_hot else "cold") and line["num_compiled_while_timed"] == 0
    assert hits == [0, 2 * (39 // block_size * block_size)], "of the timed runs"


def test_a_peer_that_stops_early_or_dies_is_an_error(tmp_path):
    with fake_peer(tmp_path, "lazy") as peer, pytest.raises(ValueError, match="gave 4 of 5 tokens for request 0"):
        peer.serve(workload([[1]], [5]))
    with fake_peer(tmp_path, "dies") as peer, pytest.raises(RuntimeError, match="ended with status 7"):
        peer.serve(workload([[1]], [5]))


def test_a_peer_is_told_model_dtype_and_sizes(tmp_path):
    python = write_program(tmp_path / "python", FAKE_PEER)
    model = tmp_path / "model"
    loads = [workload([[1] * 3, [1] * 9], [5, 2]), workload([[1]], [1])]
    common = ["--model", "unused", "--peer-python", str(python), "--peer-model", str(model)]
    args = bench.parse_args(["w.json", "--peer", "vllm", *common])
    with bench.start_peer(args, "bfloat16", loads, tmp_path) as peer:
        assert peer.facts["arguments"][1:] == ["vllm", "--model", str(model), "--dtype", "bfloat16"]
        assert peer.facts["dtype"] == "bfloat16"
    args = bench.parse_args(["w.json", "--peer", "llamacpp", *common, "--peer-server", "srv"])
    with bench.start_peer(args, "bfloat16", loads, tmp_path) as peer:
        sizes = ["--max-len", "11", "--max-requests", "2"]
        assert peer.facts["arguments"][1:] == ["llamacpp", "--model", str(model), "--server", "srv", *sizes]


def test_llama_cpp_is_served_over_http_and_ends_with_its_peer(tmp_path):
    server = write_program(tmp_path / "llama-server", FAKE_LLAMA_SERVER)
    options = ["--peer", "llamacpp", "--peer-server", str(server), "--peer-model", str(tmp_path / "m.gguf")]
    load = workload([[1] * 3, [2] * 7], [4, 2])
    with bench.start_peer(bench.parse_args(["w.json", *options]), "float32", [load], tmp_path) as peer:
        run = peer.serve(load)
        assert peer.facts["peer"] == "llamacpp" and peer.facts["version"] == "0.1 (abc)"
        assert run["token_ids"] == [[3, 4, 5, 6], [7, 8]]
        children = psutil.Process(peer._process.pid).children()
        assert len(children) == 1
    assert psutil.wait_procs(children, timeout=10)[1] == []


def test_the_peer_reads_the_weights_that_the_engine_reads(tmp_path):
    """A GGUF file becomes a Hugging Face directory, and a GGUF file of another type, with the same weights."""
    stored = write_gguf(tmp_path / "stored.gguf", "gqa_tied")
    directory = bench.peer_model(str(stored), "vllm", "float32", tmp_path)
    copied = bench.peer_model(str(stored), "llamacpp", "bfloat16", tmp_path)
    source, as_hf, as_gguf = (open_model(path) for path in (stored, directory, copied))
    assert source.config == as_hf.config
    expected, same, rounded = (dict(s.tensors()) for s in (source, as_hf, as_gguf))
    assert expected.keys() == same.keys() == rounded.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(same[name], array)
        np.testing.assert_allclose(rounded[name], array, rtol=2**-8)
    types = {tensor.tensor_type.name for tensor in gguf.GGUFReader(copied).tensors}
    assert types == {"F32", "BF16"}


# ---- a sweep and the host alone


def test_a_sweep_doubles_requests_then_contexts():
    points = bench.grid(256, 8192)
    assert points[:9] == [(n, 128) for n in (1, 2, 4, 8, 16, 32, 64, 128, 256)]
    assert points[9:] == [(2, context) for context in (256, 512, 1024, 2048, 4096, 8192)]
    assert bench.grid(6, 500) == [(1, 128), (2, 128), (4, 128), (2, 256)]


def test_requests_decode_together_from_the_last_first_token_to_the_last_call_but_one():
    """The tokens of the last call come as soon as those before."""
    run = {"arrivals": [[(1.0, 1), (1.5, 1), (3.0, 4), (3.1, 3)], [(2.0, 1), (3.5, 5), (3.6, 2)]]}
    assert bench.joint_decode_rate(run) == (4 + 3 + 5) / (3.5 - 2.0)


def test_a_sweep_writes_a_line_for_each_point(engine, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "grid", lambda *_: [(1, 40), (2, 40)])
    lines = bench.sweep(engine, tmp_path / "sweep.jsonl", repeat=1)
    assert [json.loads(line) for line in (tmp_path / "sweep.jsonl").read_text().splitlines()] == lines
    assert [(line["num_requests"], line["context"]) for line in lines] == [(1, 40), (2, 40)]
    for line in lines:
        assert line["decode_tok_s"] == pytest.approx(line["num_requests"] * line["decode_tok_s_per_request"], rel=0.01)
        assert line["host_ms_p50"] > 0 and line["device"] and line["jax"] and line["dtype"] == "float32"


def test_a_sweep_is_drawn_over_requests_and_over_contexts():
    machine = {"dtype": "float32", "device": "a CPU", "num_cores": 2, "jax": "0.10"}
    names = ("decode_tok_s", "decode_tok_s_per_request", "host_ms_p50")
    lines = [
        {"num_requests": n, "context": context, **{name: 100 * i + n + context for i, name in enumerate(names)}}
        | machine
        for n, context in [(4, 128), (1, 128), (2, 128), (2, 512), (2, 256)]
    ]
    axes = bench.draw(lines).axes
    assert [panel.lines[0].get_xdata().tolist() for panel in axes] == [[1, 2, 4], [128, 256, 512]] * 3
    assert axes[0].lines[0].get_ydata().tolist() == [129, 130, 132]
    assert axes[5].lines[0].get_ydata().tolist() == [330, 458, 714]
    for panel in axes:
        bottom, top = panel.get_ylim()
        assert bottom == 0 and panel.lines[0].get_ydata().max() < top, "a point lies outside its panel"
    assert [tick.get_text() for tick in axes[5].get_xticklabels()] == ["128", "256", "512"]
    assert [panel.get_ylabel()[:12] for panel in axes[::2]] == ["tokens/s", "tokens/s of ", "host ms per "]
    assert axes[0].get_figure().get_suptitle() == "decoding, float32, a CPU, 2 cores, jax 0.10"


def test_the_host_alone_tells_steps_with_new_blocks_from_steps_without():
    line = bench.host_steps(num_requests=4, context=32, num_steps=40)
    assert line["num_steps"] == 40
    parts = [line[name] for name in ("schedule_ms_p50", "build_ms_p50", "update_ms_p50")]
    assert min(parts) > 0
    assert max(parts) < line["host_ms_p50"] <= line["host_ms_p99"]
    assert line["host_ms_p50_no_new_block"] > 0 and line["host_ms_p50_all_new_blocks"] > 0


# ---- the command line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give one of workloads, --sweep"),
        (["w.json", "--host-only"], "give one of workloads, --sweep"),
        (["--host-only", "--plot", "p.png"], "--plot draws a sweep"),
        (["--host-only", "--hot-prefix"], "--hot-prefix is for workloads"),
        (["w.json", "--hot-prefix", "--peer", "hf", "--peer-python", "p"], "only vllm is run with its prefix cache"),
        (["w.json", "--repeat", "0"], "--repeat: '0' must be a whole number, 1 or more"),
        (["w.json", "--peer-python", "p"], "--peer-python without --peer"),
        (["w.json", "--peer", "vllm"], "--peer vllm needs --peer-python"),
        (["w.json", "--peer", "llamacpp", "--peer-python", "p"], "--peer llamacpp needs --peer-server"),
        (["w.json", "--peer", "hf", "--peer-python", "p", "--peer-env", "A"], "--peer-env A must be NAME=VALUE"),
        (["--sweep", "s.jsonl", "--peer", "hf", "--peer-python", "p"], "--peer serves workloads"),
    ],
)
def test_arguments_that_do_not_fit_exit_with_2_and_say_why(capsys, arguments, words):
    with pytest.raises(SystemExit) as exit_info:
        bench.parse_args(arguments)
    assert exit_info.value.code == 2
    assert words in capsys.readouterr().err


def test_a_peer_takes_greedy_workloads_only(tmp_path, capsys):
    record = {"prompt_token_ids": [[5]], "max_tokens": [5], "temperature": 0.5, "ignore_eos": True}
    (tmp_path / "hot.json").write_text(json.dumps(record))
    with pytest.raises(SystemExit, match="2"):
        bench.main([str(tmp_path / "hot.json"), "--peer", "hf", "--peer-python", "p"])
    assert "must be greedy" in capsys.readouterr().err


def test_the_twin_is_read_before_there_is_an_engine(tmp_path, monkeypatch, capsys):
    (tmp_path / "w.json").write_text((WORKLOADS / "W1.json").read_text())
    monkeypatch.setattr(bench, "Engine", None)
    with pytest.raises(SystemExit, match="2"):
        bench.main([str(tmp_path / "w.json")])
    assert "w_warm.json" in capsys.readouterr().err


def test_the_peers_script_imports_no_jax():
    code = f"import sys; sys.path.insert(0, {str(SCRIPTS)!r}); import bench_peer; print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n", done.stderr
