"""The built-in model against Hugging Face: SmolLM2-135M-Instruct in float32, greedy, on the prompts of W2."""

import json
from pathlib import Path

import pytest

from jaxpaged import LLM, Engine, SamplingParams

ROOT = Path(__file__).parent.parent
GOLDENS = ROOT / "tests" / "data" / "goldens"
WORKLOAD = json.loads((ROOT / "scripts" / "workloads" / "W2.json").read_text())
GREEDY = json.loads((GOLDENS / "W2_first16_hf_f32_greedy.json").read_text())
TOP5 = json.loads((GOLDENS / "top5.json").read_text())["requests"]
MODEL = "smollm2-135m-instruct"


SETTINGS = {"dtype": "float32", "max_num_seqs": 8, "num_device_blocks": 400, "max_num_batched_tokens": 512}


@pytest.fixture(scope="module")
def engine():
    with Engine(MODEL, **SETTINGS) as engine:
        yield engine


def greedy(max_tokens, **rest):
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **rest)


def test_all_tokens_equal_hugging_faces(engine, request):
    """Of 8 requests the first 64, with `--every-mode` all of 16."""
    num_requests, most_tokens = (16, 1000) if request.config.getoption("every_mode") else (8, 64)
    params = [greedy(min(n, most_tokens)) for n in WORKLOAD["max_tokens"][:num_requests]]
    outputs = engine.generate(WORKLOAD["prompt_token_ids"][:num_requests], params, use_tqdm=False)
    goldens = [token_ids[:most_tokens] for token_ids in GREEDY["output_token_ids"][:num_requests]]
    assert [output.outputs[0].token_ids for output in outputs] == goldens


def test_log_probabilities_agree_with_hugging_faces(engine):
    prompts = [request["prompt_token_ids"] for request in TOP5.values()]
    params = [greedy(len(request["output_token_ids"]), logprobs=5) for request in TOP5.values()]
    outputs = engine.generate(prompts, params, use_tqdm=False)
    for output, golden in zip(outputs, TOP5.values(), strict=True):
        completion = output.outputs[0]
        assert completion.token_ids == golden["output_token_ids"]
        for ours, ids, theirs in zip(completion.logprobs, golden["top5_ids"], golden["top5_logprobs"], strict=True):
            for token_id, logprob in zip(ids, theirs, strict=True):
                if token_id in ours:  # a near tie may put another token in fifth place
                    assert ours[token_id].logprob == pytest.approx(logprob, abs=1e-3)
            assert len(set(ids) & ours.keys()) >= 4


def test_a_small_pool_and_budget_preempt_and_chunk_and_yield_the_same_tokens():
    """Four requests of W2 want more blocks than the pool has, and prompts more tokens than the budget."""
    prompts, num_tokens = WORKLOAD["prompt_token_ids"][:4], 32
    params, settings = [greedy(num_tokens)] * 4, {"max_model_len": 320, "max_num_seqs": 4}
    with Engine(MODEL, dtype="float32", num_device_blocks=20, max_num_batched_tokens=16, **settings) as engine:
        outputs = engine.generate(prompts, params, use_tqdm=False)
        engine.check()
        assert engine.stats()["num_preemptions"] > 0
    for output, golden in zip(outputs, GREEDY["output_token_ids"][:4], strict=True):
        num_known = min(num_tokens, len(golden))
        assert output.outputs[0].token_ids[:num_known] == golden[:num_known]


def test_the_example_that_vllms_users_know_runs():
    llm = LLM(model=MODEL, **SETTINGS)
    prompts = ["hi my name is", "today is a beautiful summer day", "hello there"]
    outputs = llm.generate(prompts, SamplingParams(temperature=0.8, top_p=0.95, max_tokens=50))
    assert [o.prompt for o in outputs] == prompts
    assert all(o.outputs[0].text.strip() and o.outputs[0].finish_reason in ("stop", "length") for o in outputs)
    llm.close()


def test_a_chat_answers_the_question(engine):
    messages = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    output = engine.chat(messages, SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)[0]
    assert "Paris" in output.outputs[0].text
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].token_ids[-1] == 2 and "<|im_end|>" not in output.outputs[0].text
