"""Memory stays what the report says: on the device in a run at every limit, on the host while requests come and go."""

import gc
from dataclasses import replace

import jax

import tiny
from jaxpaged import Engine, SamplingParams
from same_tokens import GREEDY, SEEDED

SETTINGS = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "num_device_blocks": 14, "block_size": 8}
SETTINGS |= {"max_model_len": 80, "max_logprobs": 20, "num_decode_steps": 2, "kv_offloading_size": 0.001}


def params_of_all_kinds() -> list[SamplingParams]:
    """All that takes memory of its own: log-probabilities, of prompts too; counts and masks; grammars; siblings."""
    return [
        replace(GREEDY, prompt_logprobs=20, logprobs=20),
        replace(SEEDED, n=3, logprobs=20),
        replace(SEEDED, presence_penalty=0.5, repetition_penalty=1.2, logit_bias={5: 1.0}, min_tokens=3),
        replace(GREEDY, structured_outputs={"regex": "[a-z]{30,}"}, ignore_eos=False),
    ]


def test_a_run_at_all_limits_takes_no_more_of_the_device_than_the_report_says():
    gc.collect()
    before, most, num_tokens = sum(a.nbytes for a in jax.live_arrays()), 0, 0
    prompts = tiny.prompts(8, least=40, most=60, seed=31)
    with Engine(tiny.model_directory(), tokenizer=tiny.CharsTokenizer(), **SETTINGS) as engine:
        for prompt, params in zip(prompts, 2 * params_of_all_kinds(), strict=True):
            engine.add_request(prompt, params)
        while engine.has_unfinished_requests():
            assert all(output.error is None for output in engine.step())
            most = max(most, sum(a.nbytes for a in jax.live_arrays()) - before)
            step = engine.last_step_stats()
            num_tokens = max(num_tokens, step["num_prefill_tokens"] + step["num_decode_tokens"])
        report, stats = engine.memory_report(), engine.stats()
    assert (num_tokens, stats["peak_blocks_used"]) == (32, 14), "budget and pool were full"
    assert stats["num_preemptions"] > 2 and stats["num_blocks_offloaded"] > 5
    taken = report.weights + report.kv_pool + report.state + report.adjustments
    assert taken < most <= taken + report.staging + report.temporaries


def test_requests_that_are_done_leave_nothing_on_the_host():
    prompts = tiny.prompts(8, least=4, most=30, seed=32)
    params = [replace(params, max_tokens=4, structured_outputs=None) for params in 2 * params_of_all_kinds()]
    with Engine(tiny.model_directory(), **SETTINGS) as engine:
        num_objects = []
        for _ in range(5):
            engine.generate(prompts, params, use_tqdm=False)
            engine.reset_prefix_cache()
            gc.collect()
            num_objects.append(len(gc.get_objects()))
    assert num_objects[-1] - num_objects[1] < 24, "fewer than one object for each of the 24 requests in between"
