"""Laws of scripts/generate.py, mostly on a fake engine whose tokens depend on prompt, seed and position alone.

Run as a program, this file is generate.py on the fake engine, for tests that kill or interrupt it.
"""

import contextlib
import gzip
import hashlib
import importlib.util
import json
import os
import pty
import random
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

import jaxpaged
import tiny
from jaxpaged.config import EngineConfig
from jaxpaged.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from jaxpaged.sampling_params import RequestOutputKind, SamplingParams

ROOT = Path(__file__).parent.parent
MAX_MODEL_LEN = 64


def load_script():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "scripts" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["generate"] = module
    spec.loader.exec_module(module)
    return module


sys.path.insert(0, str(ROOT / "scripts"))
generate = load_script()


class FakeEngine:
    """Gives each of the first `max_num_seqs` requests one token a step. A model named "slow" sleeps in each step."""

    def __init__(self, model, *, tokenizer=None, **settings):
        if model == "missing":
            raise ValueError("model 'missing' is not known; give a directory")
        self.model, self.settings = model, EngineConfig(**settings)
        self.requests, self.most_unfinished, self.num_steps, self.num_tokens, self.is_closed = {}, 0, 0, 0, False

    def add_request(self, prompt, sampling_params, request_id=None):
        token_ids = list(prompt.encode()) if isinstance(prompt, str) else list(prompt)
        if len(token_ids) >= MAX_MODEL_LEN:
            raise ValueError(f"the prompt has {len(token_ids)} tokens; max_model_len={MAX_MODEL_LEN}")
        assert sampling_params.output_kind is RequestOutputKind.FINAL_ONLY
        self.requests[request_id] = (prompt, token_ids, sampling_params, [], time.monotonic())
        self.most_unfinished = max(self.most_unfinished, sum(r[2].n for r in self.requests.values()))
        return request_id

    def encode_chat(self, messages):
        if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
            raise ValueError("messages must be a list of objects with role and content")
        return list("".join(f"<{m['role']}>{m['content']}" for m in messages).encode())

    def has_unfinished_requests(self):
        return bool(self.requests)

    def step(self):
        self.num_steps += 1
        if self.model == "slow":
            time.sleep(0.005)
        if self.model == "interrupts" and self.num_steps == 20:
            signal.raise_signal(signal.SIGINT)
        finished = []
        for request_id in list(self.requests)[: self.settings.max_num_seqs]:
            prompt, token_ids, params, generated, arrival = self.requests[request_id]
            generated.append(len(generated))
            self.num_tokens += params.n
            if len(generated) == params.max_tokens:
                del self.requests[request_id]
                finished.append(self.output(request_id, prompt, token_ids, params, arrival))
        return finished

    def output(self, request_id, prompt, token_ids, params, arrival):
        completions = []
        for child in range(params.n):
            draws = random.Random(hashlib.sha256(f"{token_ids}{params.seed}{child}".encode()).digest())
            drawn = [draws.randrange(97, 123) for _ in range(params.max_tokens)]
            logprobs = None if params.logprobs is None else [{t: Logprob(-0.5, 1, chr(t))} for t in drawn]
            completions.append(
                CompletionOutput(
                    index=child,
                    text="".join(map(chr, drawn)) + "\u2028é",
                    token_ids=drawn,
                    finish_reason="length",
                    logprobs=logprobs,
                    cumulative_logprob=None if logprobs is None else -0.5 * len(drawn),
                )
            )
        now, own = time.monotonic(), [None, *({t: Logprob(-0.25, 2, chr(t))} for t in token_ids[1:])]
        return RequestOutput(
            request_id=request_id,
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=token_ids,
            outputs=completions,
            finished=True,
            prompt_logprobs=None if params.prompt_logprobs is None else own,
            num_cached_tokens=self.num_steps,
            metrics=RequestMetrics(
                arrival_time=arrival, first_scheduled_time=arrival, first_token_time=now, finished_time=now
            ),
        )

    def stats(self):
        return {
            "num_generated_tokens": self.num_tokens,
            "peak_blocks_used": 7,
            "num_blocks": 10,
            "prefix_hit_rate": 0.25,
        }

    def last_step_stats(self):
        return {"step": self.num_steps, "num_running": len(self.requests)}

    def memory_report(self):
        return "MEMORY REPORT"

    def close(self):
        self.is_closed = True


class Runner:
    """Runs the script in-process in a folder of its own, keeping the engines that it made."""

    def __init__(self, folder):
        self.folder, self.engines = folder, []

    def __call__(self, prompts, *flags, name="prompts.txt", output="out.jsonl"):
        path = self.folder / name
        path.write_bytes(prompts if isinstance(prompts, bytes) else prompts.encode())
        argv = ["--prompts", str(path), *flags]
        return generate.main(argv + (["--output", str(self.folder / output)] if output else []), self.make)

    def make(self, model, **settings):
        self.engines.append(FakeEngine(model, **settings))
        return self.engines[-1]

    def rows(self, output="out.jsonl"):
        return sorted(read_rows(self.folder / output), key=lambda row: row["index"])


def read_rows(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def without_metrics(rows):
    return [{k: v for k, v in row.items() if k != "metrics"} for row in rows]


@pytest.fixture
def run(tmp_path):
    return Runner(tmp_path)


def jsonl(*records):
    return "".join(json.dumps(record) + "\n" for record in records)


def test_each_line_yields_a_row_with_its_line_number(run, capsys):
    assert run("alpha\nbeta\ngamma", "--max-tokens", "3") == 0
    rows = run.rows()
    assert [(row["index"], row["prompt"]) for row in rows] == [(1, "alpha"), (2, "beta"), (3, "gamma")]
    assert rows[0].keys() == {
        *("index", "prompt", "text", "token_ids", "finish_reason", "stop_reason", "num_prompt_tokens"),
        *("num_generated_tokens", "seed", "metrics"),
    }
    assert rows[0]["num_prompt_tokens"] == 5 and rows[0]["num_generated_tokens"] == len(rows[0]["token_ids"]) == 3
    assert rows[0]["finish_reason"] == "length" and rows[0]["text"].endswith("\u2028é")
    assert rows[0]["metrics"].keys() == {"queue_s", "first_token_s", "total_s", "num_cached_tokens", "num_preemptions"}
    assert run.engines[0].is_closed
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("MEMORY REPORT\n3 requests, 0 errors; 14 tokens in, 9 tokens out in ")
    assert err.endswith("peak 7 of 10 blocks used; prefix-hit rate 25.0%\n")


def test_quiet_leaves_stderr_empty(run, capsys):
    assert run("alpha\n", "--quiet") == 0
    assert capsys.readouterr() == ("", "")


def test_windows_line_ends_and_a_byte_order_mark_are_no_part_of_a_prompt(run):
    assert run(b"\xef\xbb\xbfalpha\r\nbeta\x0b\xc2\x85gamma\r\n") == 0
    assert [row["prompt"] for row in run.rows()] == ["alpha", "beta\x0b\x85gamma"]


def test_lines_that_cannot_be_served_become_error_rows_and_the_others_are_served(run, capsys):
    status = run(b"alpha\n\n   \n\xff\xfe\n" + b"x" * 100 + b"\nomega\n")
    rows = run.rows()
    assert status == 1
    assert [row["index"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert ["error" in row for row in rows] == [False, True, True, True, True, False]
    for row, words in zip(rows[1:5], ("is empty", "is empty", "not UTF-8", "100 tokens"), strict=True):
        assert words in row["error"]
    assert rows[3]["prompt"] is None and rows[4]["prompt"] == "x" * 100
    assert "6 requests, 4 errors" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"prompt": "a"', "broken JSON"),
        ("", "empty"),
        ("[" * 100_000, "broken JSON"),
        ('["a"]', "must be an object"),
        ("3", "must be an object"),
        ("{}", "no prompt"),
        ('{"prompt": ""}', "not empty"),
        ('{"prompt": 3}', "not empty"),
        ('{"prompt": "\\ud800"}', "not UTF-8"),
        ('{"prompt": "a", "messages": []}', "exactly one of"),
        ('{"prompt": "a", "max_token": 3}', "unknown keys ['max_token']"),
        ('{"prompt": "a", "output_kind": 1}', "unknown keys ['output_kind']"),
        ('{"prompt": "a", "temperature": -1}', "temperature=-1"),
        ('{"prompt": "a", "temperature": "hot"}', "temperature='hot'"),
        ('{"prompt": "a", "temperature": NaN}', "temperature=nan"),
        ('{"prompt": "a", "stop_token_ids": [[1]]}', "list"),
        ('{"prompt": "a", "flat_logprobs": true}', "not supported yet"),
        ('{"prompt_token_ids": "abc"}', "list of whole numbers"),
        ('{"prompt_token_ids": [1, true]}', "list of whole numbers"),
        ('{"messages": "hello"}', "messages must be"),
    ],
)
def test_a_bad_jsonl_line_becomes_an_error_row_that_says_why(run, line, words):
    assert run(line + '\n{"prompt": "fine"}\n', name="prompts.jsonl") == 1
    bad, good = run.rows()
    assert words in bad["error"] and bad["index"] == 1
    assert good["prompt"] == "fine" and "error" not in good


def test_a_jsonl_line_has_text_token_ids_or_messages_and_its_own_sampling(run):
    messages = [{"role": "user", "content": "hi"}]
    lines = jsonl(
        {"prompt": "alpha", "max_tokens": 2, "seed": 5},
        {"prompt_token_ids": [1, 2, 3]},
        {"messages": messages, "n": 2, "temperature": 0.5},
    )
    assert run(lines, "--max-tokens", "4", name="prompts.jsonl") == 0
    text, ids, chat = run.rows()
    assert (text["prompt"], text["seed"], len(text["token_ids"])) == ("alpha", 5, 2)
    assert (ids["prompt"], ids["prompt_token_ids"], ids["num_prompt_tokens"]) == (None, [1, 2, 3], 3)
    assert (chat["prompt"], chat["messages"], chat["num_prompt_tokens"]) == (None, messages, len("<user>hi"))
    assert "outputs" not in text


def test_with_n_above_one_all_completions_are_in_the_row(run):
    assert run("alpha\n", "--n", "3", "--max-tokens", "4") == 0
    [row] = run.rows()
    assert [one["index"] for one in row["outputs"]] == [0, 1, 2]
    assert len({one["text"] for one in row["outputs"]}) == 3
    assert row["text"] == row["outputs"][0]["text"] and row["num_generated_tokens"] == 12


def test_logprobs_are_in_the_row_when_asked_for(run):
    assert run("alpha\n", "--logprobs", "1", "--prompt-logprobs", "0", "--max-tokens", "2") == 0
    [row] = run.rows()
    own = {"token_id": ord("l"), "logprob": -0.25, "rank": 2, "decoded_token": "l"}
    assert row["prompt_logprobs"][:2] == [None, [own]] and len(row["prompt_logprobs"]) == 5
    token_id = row["token_ids"][0]
    candidate = {"token_id": token_id, "logprob": -0.5, "rank": 1, "decoded_token": chr(token_id)}
    assert row["logprobs"][0] == [candidate] and row["cumulative_logprob"] == -1.0


def test_chat_makes_each_text_prompt_a_user_message(run):
    assert run("hi\n", "--chat") == 0
    [row] = run.rows()
    assert (row["prompt"], row["num_prompt_tokens"]) == ("hi", len("<user>hi"))


def test_an_unseeded_line_has_a_seed_made_of_the_run_seed_and_its_index(run):
    lines = jsonl({"prompt": "same"}, {"prompt": "same"}, {"prompt": "same", "seed": 3}, {"prompt": "same", "seed": -1})
    for seed in (0, 1):
        assert run(lines, "--seed", str(seed), name="p.jsonl", output=f"{seed}.jsonl") == 0
    zero, one = run.rows("0.jsonl"), run.rows("1.jsonl")
    assert zero[2]["seed"] == one[2]["seed"] == 3
    seeds = [row["seed"] for row in (*zero[:2], zero[3], *one[:2], one[3])]
    assert seeds == [generate.derive_seed(seed, index) for seed in (0, 1) for index in (1, 2, 4)]
    assert len(set(seeds)) == 6 and all(0 <= seed < 2**63 for seed in seeds)
    assert zero[0]["text"] != zero[1]["text"]


def test_without_output_texts_are_printed_in_order_as_soon_as_possible(run, capsys):
    lines = jsonl(*({"prompt": f"p{i}", "max_tokens": 9 - i} for i in range(8)), {"prompt": ""})
    assert run(lines, "--quiet", name="p.jsonl", output=None) == 1
    out = capsys.readouterr().out
    assert [line for line in out.split("\n") if line.startswith("[")] == [f"[{i + 1}] p{i}" for i in range(8)] + [
        "[9] "
    ]
    assert "error: prompt='' must be" in out

    printed = []
    put = generate.print_in_order(printed.append)
    put({"index": 2, "prompt": "b", "text": "B"})
    assert printed == []
    put({"index": 1, "prompt": "a", "outputs": [{"index": 0, "text": "A"}, {"index": 1, "text": "Z"}]})
    assert printed == ["[1] a\n(0) A\n(1) Z\n", "[2] b\nB\n"]


def test_a_bounded_number_of_requests_is_in_the_engine(run):
    prompts = "".join(f"prompt {i}\n" for i in range(100))
    assert run(prompts, "--max-num-seqs", "4") == 0
    assert run.engines[0].most_unfinished == 8
    assert len(run.rows()) == 100
    assert run(prompts, "--max-num-seqs", "4", "--n", "3", output="n.jsonl") == 0
    assert run.engines[1].most_unfinished == 9


def test_the_stats_file_has_one_record_a_step(run, tmp_path):
    assert run("a\nb\n", "--max-tokens", "5", "--stats-file", str(tmp_path / "stats.jsonl")) == 0
    assert [record["step"] for record in read_rows(tmp_path / "stats.jsonl")] == [1, 2, 3, 4, 5]


def test_every_supported_sampling_parameter_and_engine_setting_is_a_flag():
    dests = {action.dest: action for action in generate.build_parser()._actions}
    sampling = {f.name for f in generate.fields(SamplingParams) if not f.metadata.get("unsupported")} - {"output_kind"}
    engine = {f.name for f in generate.fields(EngineConfig)} - {"logits_processors", "logits_processor_counts"}
    assert sampling | engine <= dests.keys()
    assert not {"flat_logprobs", "output_kind"} & dests.keys()
    for name in sampling | engine:
        assert "(default: " in dests[name].help
    for name in sampling - {"seed"}:
        assert not dests[name].help.startswith("(default")


def test_flags_have_the_types_of_their_fields():
    argv = ["--prompts", "p", "--stop", "a", "b", "--stop", "c", "--stop-token-ids", "3", "4", "--max-tokens", "none"]
    argv += ["--block-size", "32", "--no-detokenize", "--enable-prefix-caching", "--top-k", "-1", "--swap-space", "0.5"]
    argv += ["--logit-bias", '{"5": -1.5}', "--bad-words", "a b", "c", "--allowed-token-ids", "3"]
    argv += ["--structured-outputs", '{"regex": "a+"}']
    args = generate.build_parser().parse_args(argv)
    assert args.structured_outputs == {"regex": "a+"}
    assert (args.logit_bias, args.bad_words, args.allowed_token_ids) == ({"5": -1.5}, ["a b", "c"], [3])
    assert (args.stop, args.stop_token_ids, args.max_tokens) == (["a", "b", "c"], [3, 4], None)
    assert (args.block_size, args.detokenize, args.enable_prefix_caching) == (32, False, True)
    assert (args.top_k, args.swap_space, args.quantization) == (-1, 0.5, None)
    assert generate.build_parser().parse_args(["--prompts", "p", "--block-size", "auto"]).block_size == "auto"


def test_flags_reach_the_engine(run):
    assert run("a\n", "--block-size", "8", "--no-enable-prefix-caching", "--max-num-seqs", "3") == 0
    assert run.engines[0].settings == EngineConfig(block_size=8, enable_prefix_caching=False, max_num_seqs=3)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--temperature", "9"], "temperature=9.0 must be in [0, 2]"),
        (["--n", "2", "--temperature", "0"], "n must be 1"),
        (["--max-num-seqs", "0"], "max_num_seqs=0"),
        (["--max-tokens", "many"], "'many' must be int|none"),
        (["--block-size", "big"], "'big' must be int|auto"),
        (["--temp", "0"], "unrecognized arguments"),
        (["--model", "missing"], "model 'missing' is not known"),
        (["--resume", "--overwrite"], "not both"),
        (["--stats-file", "no/such/folder/s.jsonl"], "No such file or directory"),
    ],
)
def test_wrong_usage_exits_with_2_and_says_what_is_wrong(run, capsys, flags, words):
    with pytest.raises(SystemExit) as exit_info:
        run("a\n", *flags)
    assert exit_info.value.code == 2
    assert words in capsys.readouterr().err


def test_wrong_files_exit_with_2(run, tmp_path, capsys):
    for argv in (["--prompts", "no_such_file"], ["--prompts", __file__, "--resume"], ["--prompts", str(tmp_path)]):
        with pytest.raises(SystemExit, match="2"):
            generate.main(argv, run.make)
    with pytest.raises(SystemExit, match="2"):
        run("a\n", output="prompts.txt")
    assert "must be different files" in capsys.readouterr().err
    assert (tmp_path / "prompts.txt").read_text() == "a\n"


def test_rows_that_are_there_are_kept_unless_overwriting_is_asked_for(run, capsys):
    assert run("a\nb\n") == 0
    before = run.rows()
    with pytest.raises(SystemExit, match="2"):
        run("c\n")
    assert "--resume" in capsys.readouterr().err and run.rows() == before
    with pytest.raises(SystemExit, match="2"):
        run("c\n", "--overwrite", "--model", "missing")
    assert run.rows() == before
    assert run("c\n", "--overwrite") == 0
    assert [row["prompt"] for row in run.rows()] == ["c"]


@pytest.mark.parametrize(
    "tail",
    [b"", b'{"index": 2, "te', b'{"index": 2, "text": "x"}', b'{"index": 2, "te\n', b"\x00\xff", b'"' + b"x" * 10_000],
)
def test_a_resumed_file_equals_that_of_an_uninterrupted_run(run, tmp_path, tail):
    prompts = b"alpha\n\nbeta\n\xff\ngamma\n"
    assert run(prompts, output="whole.jsonl") == 1
    assert run(prompts) == 1
    lines = (tmp_path / "out.jsonl").read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line)["index"] in (1, 4)]
    (tmp_path / "out.jsonl").write_bytes(b"".join(kept) + tail)
    assert run(prompts, "--resume") == 1
    assert (tmp_path / "out.jsonl").read_bytes().startswith(b"".join(kept))
    assert without_metrics(run.rows()) == without_metrics(run.rows("whole.jsonl"))


def test_resuming_a_complete_output_makes_no_engine(run, capsys):
    assert run("a\n\n") == 1
    assert run("a\n\n", "--resume") == 1
    assert len(run.engines) == 1 and "nothing to do" in capsys.readouterr().err
    assert run("a\n", "--resume", output="new.jsonl") == run("a\n", "--resume", output="new.jsonl") == 0
    assert len(run.engines) == 2 and len(run.rows("new.jsonl")) == 1


@pytest.mark.parametrize(
    ("prompts", "flags", "words"),
    [
        ("a\nB\n", [], "prompts (sha256) was"),
        ("a\nb\n", ["--temperature", "0.5"], "temperature was 1.0, is now 0.5"),
        ("a\nb\n", ["--stop", "x"], "stop was None, is now ['x']"),
        ("a\nb\n", ["--seed", "7"], "seed was 0, is now 7"),
        ("a\nb\n", ["--chat"], "chat was False, is now True"),
        ("a\nb\n", ["--model", "other"], "model was 'smollm2-135m-instruct', is now 'other'"),
        ("a\nb\n", ["--dtype", "float32"], "dtype was 'auto', is now 'float32'"),
    ],
)
def test_resuming_with_other_inputs_or_settings_is_refused_and_names_them(run, capsys, prompts, flags, words):
    assert run("a\nb\n") == 0
    before = run.rows()
    with pytest.raises(SystemExit, match="2"):
        run(prompts, "--resume", *flags)
    err = capsys.readouterr().err
    assert words in err and err.count(" was ") == 1
    assert run.rows() == before


def test_resuming_is_refused_when_rows_are_broken_in_the_middle_or_of_unknown_origin(run, tmp_path, capsys):
    assert run("a\nb\n") == 0
    good = (tmp_path / "out.jsonl").read_bytes()
    (tmp_path / "out.jsonl").write_bytes(b"{broken\n" + good)
    with pytest.raises(SystemExit, match="2"):
        run("a\nb\n", "--resume")
    assert "broken row in its middle, at byte 0" in capsys.readouterr().err
    for broken in ("{", "[1]", "null"):
        (tmp_path / "out.jsonl.meta.json").write_text(broken)
        with pytest.raises(SystemExit, match="2"):
            run("a\nb\n", "--resume")
        assert "out.jsonl.meta.json is broken" in capsys.readouterr().err
    (tmp_path / "out.jsonl.meta.json").unlink()
    with pytest.raises(SystemExit, match="2"):
        run("a\nb\n", "--resume")
    assert "out.jsonl.meta.json is missing" in capsys.readouterr().err
    assert (tmp_path / "out.jsonl").read_bytes() == b"{broken\n" + good


def test_a_row_is_in_the_file_whole_before_the_next_step(run, tmp_path, monkeypatch):
    num_finished, in_file = 0, []
    step = FakeEngine.step

    def watched_step(engine):
        nonlocal num_finished
        in_file.append((len(read_rows(tmp_path / "out.jsonl")), num_finished))
        outputs = step(engine)
        num_finished += len(outputs)
        return outputs

    monkeypatch.setattr(FakeEngine, "step", watched_step)
    assert run("a\nb\nc\n", "--max-num-seqs", "1", "--max-tokens", "2") == 0
    assert in_file == [(0, 0), (0, 0), (1, 1), (1, 1), (2, 2), (2, 2)]


def test_an_interrupted_run_keeps_its_rows_and_exits_with_130(run, capsys):
    prompts = "".join(f"prompt {i}\n" for i in range(50))
    flags = ["--max-num-seqs", "4", "--max-tokens", "5", "--model", "interrupts"]
    assert run(prompts, *flags) == 130
    assert len(run.rows()) == 12 and run.engines[0].is_closed
    assert "12 requests, 0 errors" in capsys.readouterr().err
    assert run(prompts, *flags, "--resume") == 130
    assert [row["index"] for row in run.rows()] == list(range(1, 25))


def script_command(*argv):
    """The command and environment that run this file, which is the script on the fake engine."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return [sys.executable, __file__, *argv], {**os.environ, "PYTHONPATH": path}


def wait_for_rows(process, output, least):
    deadline = time.monotonic() + 60
    while not output.exists() or output.read_bytes().count(b"\n") < least:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
def test_a_run_killed_again_and_again_ends_with_the_rows_of_an_uninterrupted_one(run, tmp_path, sent):
    prompts = "".join(f"prompt {i}\n" * (i != 50) or "\n" for i in range(150))
    flags = ["--max-num-seqs", "4", "--max-tokens", "5", "--seed", "3", "--model", "slow"]
    assert run(prompts, *flags, output="whole.jsonl") == 1
    output = tmp_path / "out.jsonl"
    argv = ["--prompts", str(tmp_path / "prompts.txt"), "--output", str(output), "--resume", *flags]
    command, env = script_command(*argv)
    for least in (1, 40, 80):
        process = subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL)
        wait_for_rows(process, output, least)
        process.send_signal(sent)
        assert process.wait(timeout=60) == (-sent if sent == signal.SIGKILL else 130)
    assert len(output.read_bytes().splitlines()) < 150
    assert subprocess.run(command, env=env, stderr=subprocess.DEVNULL, timeout=60).returncode == 1
    assert len(read_rows(output)) == 150
    assert without_metrics(run.rows()) == without_metrics(run.rows("whole.jsonl"))


def test_a_reader_that_stops_reading_ends_the_run_quietly(tmp_path):
    (tmp_path / "p.txt").write_text("a\n" * 500)
    command, env = script_command(
        "--prompts", str(tmp_path / "p.txt"), "--quiet", "--max-num-seqs", "1", "--model", "slow"
    )
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"[1] a\n"
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=60) == 0


def test_on_a_terminal_a_bar_shows_prompts_and_tokens_a_second(tmp_path):
    (tmp_path / "p.txt").write_text("a\n" * 40)
    argv = ["--prompts", str(tmp_path / "p.txt"), "--output", str(tmp_path / "o.jsonl"), "--model", "slow"]
    command, env = script_command(*argv, "--max-num-seqs", "2")
    terminal, its_end = pty.openpty()
    termios.tcsetwinsize(its_end, (24, 120))
    with subprocess.Popen(command, env=env, stderr=its_end) as process:
        os.close(its_end)
        shown = b""
        with contextlib.suppress(OSError):  # how Linux says that the other end is closed
            while piece := os.read(terminal, 4096):
                shown += piece
        os.close(terminal)
        assert process.wait(timeout=60) == 0
    assert b"40/40" in shown and b" tokens/s]" in shown
    assert shown.startswith(b"MEMORY REPORT") and b"40 requests, 0 errors" in shown


def test_the_engine_may_use_most_of_a_gpu_unless_the_user_says_otherwise(monkeypatch):
    monkeypatch.setitem(vars(jaxpaged), "Engine", FakeEngine)
    for before, after in (({}, "0.95"), ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"}, "0.5")):
        monkeypatch.setattr(os, "environ", before)
        assert generate.make_engine("any").model == "any"
        assert before["XLA_PYTHON_CLIENT_MEM_FRACTION"] == after


def test_help_and_wrong_usage_do_not_import_jax():
    code = "import sys, runpy\ntry: runpy.run_path(sys.argv[0], run_name='__main__')\nexcept SystemExit: pass\n"
    code = "import sys; sys.argv[:1] = [sys.argv.pop(1)]\n" + code + "assert 'jax' not in sys.modules, 'jax imported'"
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'scripts'}"}
    for argv in (["--help"], ["--prompts", __file__, "--temperature", "9"]):
        command = [sys.executable, "-c", code, str(ROOT / "scripts" / "generate.py"), *argv]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert "usage" in done.stdout or "temperature=9.0" in done.stderr


def run_script(*argv):
    """The real script on the real engine, in a process of its own."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    return subprocess.run([sys.executable, "-W", "error", *argv], env=env, capture_output=True, text=True, timeout=300)


def test_the_script_serves_a_model_end_to_end_and_draws_the_run(tmp_path):
    prompts = tiny.prompts(12, least=1, most=40)
    lines = [{"prompt_token_ids": ids, "max_tokens": 3 + i} for i, ids in enumerate(prompts)]
    lines += [{"prompt_token_ids": [256]}, {"prompt": "text without a tokenizer"}, {"prompt_token_ids": [5] * 128}]
    lines += [{"prompt_token_ids": prompts[0], "temperature": 1.0, "n": 2, "max_tokens": 4}]
    (tmp_path / "p.jsonl").write_text(jsonl(*lines))
    argv = [
        "--prompts",
        str(tmp_path / "p.jsonl"),
        "--model",
        tiny.model_directory(),
        "--temperature",
        "0",
        "--ignore-eos",
    ]
    argv += ["--max-model-len", "128", "--num-device-blocks", "12", "--max-num-seqs", "4", "--seed", "11"]
    argv += ["--dtype", "float32"]
    script, output, stats = ROOT / "scripts" / "generate.py", tmp_path / "o.jsonl", tmp_path / "s.jsonl"
    done = run_script(script, *argv, "--output", output, "--stats-file", stats)
    assert done.returncode == 1, done.stderr
    rows = sorted(read_rows(output), key=lambda row: row["index"])
    assert [row["index"] for row in rows] == list(range(1, 17))
    for row, ids in zip(rows, prompts, strict=False):
        assert row["token_ids"] == tiny.naive_greedy(ids, row["index"] + 2)
    for row, words in zip(rows[12:15], ("vocabulary", "tokenizer", "128 tokens"), strict=True):
        assert words in row["error"]
    assert len(rows[15]["outputs"]) == 2 and rows[15]["seed"] == generate.derive_seed(11, 16)
    assert "16 requests, 3 errors" in done.stderr and " of 12 blocks used" in done.stderr

    kept = "".join(output.read_text().splitlines(keepends=True)[:5])
    output.write_text(kept + '{"index": 9, "to')
    done = run_script(script, *argv, "--output", output, "--resume", "--quiet")
    assert (done.returncode, done.stderr) == (1, "")
    assert output.read_text().startswith(kept)
    resumed = sorted(read_rows(output), key=lambda row: row["index"])
    assert without_metrics(resumed) == without_metrics(rows)

    assert sum(step["num_finished"] for step in read_rows(stats)) == 14
    done = run_script(ROOT / "scripts" / "plot_run.py", stats, tmp_path / "s.png")
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")


def test_a_profile_names_the_parts_of_a_step_on_host_and_device(tmp_path):
    (tmp_path / "p.jsonl").write_text(jsonl({"prompt_token_ids": [5, 6, 7], "max_tokens": 6}))
    argv = ["--prompts", str(tmp_path / "p.jsonl"), "--model", tiny.model_directory(), "--quiet"]
    argv += ["--max-model-len", "128", "--num-device-blocks", "12", "--max-num-seqs", "4"]
    assert generate.main([*argv, "--output", str(tmp_path / "o.jsonl"), "--profile", str(tmp_path / "trace")]) == 0
    [timeline] = (tmp_path / "trace").rglob("perfetto_trace.json.gz")
    names = {event.get("name") for event in json.loads(gzip.decompress(timeline.read_bytes()))["traceEvents"]}
    assert names >= {"schedule", "launch", "wait", "update", "detokenize"}
    [trace] = (tmp_path / "trace").rglob("*.xplane.pb")
    assert all(part in trace.read_bytes() for part in (b"attention/", b"mlp/", b"logits/", b"sample/"))


if __name__ == "__main__":
    sys.exit(generate.main(sys.argv[1:], FakeEngine))
