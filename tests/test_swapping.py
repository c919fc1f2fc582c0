"""Preempted requests on the host: what comes back is what went, once for all who share it, or it is computed again."""

from dataclasses import replace

import jax
import numpy as np
import pytest

import tiny
from jaxpaged import Engine, SamplingParams
from same_tokens import all_params, alone, assert_same, batch_prompts, run

POOL = {"num_device_blocks": 28, "block_size": 4}


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("kind", ["greedy", "seeded"])
def test_requests_swapped_again_and_again_yield_the_same_tokens(kind, caching):
    result = run(
        batch_prompts(), all_params(kind), **POOL, enable_prefix_caching=caching, preemption_mode="swap",
        num_decode_steps=1 if caching else 8,
    )  # fmt: skip
    assert result.stats["num_preemptions"] >= 20
    assert result.stats["num_blocks_swapped_out"] > 100
    assert 0 < result.stats["num_blocks_swapped_in"] <= result.stats["num_blocks_swapped_out"]
    assert result.stats["host_blocks_used"] == 0
    assert max(output.metrics.num_preemptions for output in result.outputs) >= 2
    assert_same(result.outputs, alone(kind))
