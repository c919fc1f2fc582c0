"""What "the same tokens" means, and the runs that are compared.

Equal token for token in float32, and the chosen tokens' log-probabilities within 1e-4. A first difference is allowed
only where the two best candidates differ by less than 1e-4 in the run compared with; it is printed, and at most one
request in 200 may have one.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any

import tiny
from jaxpaged import Engine, RequestOutput, SamplingParams
from jaxpaged.runner import device_facts

NEAR_TIE = 1e-4
LOGPROB_TOLERANCE = 1e-4
MAX_TOKENS = 24

GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=2)
SEEDED = SamplingParams(
    temperature=1.0, top_p=0.9, top_k=40, seed=1234, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=2
)


@dataclass(frozen=True)
class Run:
    """Outputs in the order of the prompts, the engine's counters, and the records of all steps."""

    outputs: list[RequestOutput]
    stats: dict[str, Any]
    steps: list[dict[str, Any]]

    @property
    def most_tokens_in_a_step(self) -> int:
        return max(s["num_prefill_tokens"] + s["num_decode_tokens"] for s in self.steps)


SETTINGS = {"max_num_seqs": 64, "num_device_blocks": 512, "block_size": 16, "num_decode_steps": 1}
"""What `run` takes where nothing else is given."""


def run(prompts, params, *, order=None, repeat=1, engine=None, **settings) -> Run:
    """Serves the prompts, in `order` where given, `repeat` times (outputs of the last time); the books are checked
    after each step."""
    settings = SETTINGS | settings
    engine = engine or Engine(tiny.model_directory(), **settings)
    all_params = params if isinstance(params, list) else [params] * len(prompts)
    order = list(range(len(prompts))) if order is None else order
    steps, outputs = [], {}
    for _ in range(repeat):
        ids = {engine.add_request(prompts[i], all_params[i]): i for i in order}
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    outputs[ids[output.request_id]] = output
            steps.append(engine.last_step_stats())
            engine.check()
    stats = engine.stats()
    engine.close()
    assert stats["blocks_used"] == 0
    assert settings["num_decode_steps"] == 1 or max(s["num_decode_steps"] for s in steps) > 1
    return Run([outputs[i] for i in range(len(prompts))], stats, steps)


def assert_same(actual: list[RequestOutput], expected: list[RequestOutput]):
    """AssertionError unless the outputs are the same (see above)."""
    assert len(actual) == len(expected)
    exceptions = sum(
        _has_near_tie(a.outputs[i], e.outputs[i])
        for a, e in zip(actual, expected, strict=True)
        for i in range(len(e.outputs))
    )
    assert exceptions <= len(expected) // 200, f"{exceptions} near ties in {len(expected)} requests"


def _has_near_tie(actual, expected) -> bool:
    """Whether there is a first difference, at a near tie; AssertionError for any other."""
    for i, (a, e) in enumerate(zip(actual.token_ids, expected.token_ids, strict=True)):
        if a != e:
            best, second = sorted((p.logprob for p in expected.logprobs[i].values()), reverse=True)[:2]
            print(f"first difference at token {i}: {a} for {e}, the best two differ by {best - second:.2e}")
            assert best - second < NEAR_TIE, f"token {i}: {a} ≠ {e}, the best two differ by {best - second:.2e}"
            return True
        difference = abs(actual.logprobs[i][a].logprob - expected.logprobs[i][e].logprob)
        assert difference < LOGPROB_TOLERANCE, f"token {i}: logprobs differ by {difference:.2e}"
    return False


@functools.cache
def batch_prompts() -> list[list[int]]:
    """64 prompts of 1 to 70 tokens; eight of the second half start like ones of the first half."""
    prompts = tiny.prompts(64, seed=3)
    for i in range(32, 64, 4):
        prompts[i] = max(prompts[i - 32 : i - 28], key=len)[:40] + prompts[i][:20]
    return prompts


def all_params(kind: str) -> list[SamplingParams]:
    """Greedy for all prompts, or seeded draws, each with a seed of its own."""
    if kind == "greedy":
        return [GREEDY] * 64
    return [replace(SEEDED, seed=100 + i) for i in range(64)]


@functools.cache
def alone(kind: str) -> list[RequestOutput]:
    """Each prompt in an engine that runs one request at a time, without prefix caching."""
    return run(
        batch_prompts(),
        all_params(kind),
        max_num_seqs=1,
        enable_prefix_caching=False,
        num_device_blocks=64,
        num_decode_steps=1,
    ).outputs


def check_kernel_in_engine(directory, backend: str, facts: dict, monkeypatch, interpret=lambda run: run()):
    """The engine on a kernel for a device that is not there yields the tokens of the XLA form.

    With a prefix found again, a request preempted, and several decode steps in a call. `facts`: those of the device;
    `interpret` calls what runs on the kernel.
    """
    prompts = [p[:n] for p, n in zip(tiny.prompts(3, least=40, most=40, seed=4), (20, 12, 5), strict=True)]
    prompts.append(prompts[0] + prompts[1])
    params = replace(GREEDY, max_tokens=14)
    settings = {"max_num_seqs": 2, "num_device_blocks": 4, "block_size": 16, "max_model_len": 64, "dtype": "float32"}
    settings |= {"max_num_batched_tokens": 16, "num_decode_steps": 2, "warmup": "lazy"}

    def run_on(backend: str) -> Run:
        engine = Engine(directory, **settings)
        assert engine.config.attention_backend == backend
        return run(prompts, params, engine=engine, **settings)

    expected, real_facts = run_on("xla"), device_facts()
    monkeypatch.setattr("jaxpaged.engine.device_facts", lambda: replace(real_facts, **facts))
    actual = interpret(functools.partial(run_on, backend))
    assert actual.stats["num_preemptions"] > 0 and actual.stats["num_prefix_hit_tokens"] > 0
    assert_same(actual.outputs, expected.outputs)
