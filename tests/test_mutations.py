"""The tests of invariance are worth something: each of these faults turns them red."""

import numpy as np
import pytest

from jaxpaged import batch
from jaxpaged.block_pool import BlockPool
from jaxpaged.models import layers
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.scheduler import Scheduler
from jaxpaged.step_data import StepInputs
from pallas_kernels import xla
from same_tokens import all_params, alone, assert_same, batch_prompts, run


def assert_red(**settings):
    with pytest.raises(AssertionError):
        assert_same(run(batch_prompts(), all_params("greedy"), **settings).outputs, alone("greedy"))


@pytest.fixture(autouse=True)
def sound_results_first():
    alone("greedy")


def changed(inputs: StepInputs, **arrays) -> StepInputs:
    for name, value in arrays.items():
        object.__setattr__(inputs, name, value)
    return inputs


def test_one_wrong_block_id_is_noticed(monkeypatch):
    build = batch.build

    def wrong(step, *rest):
        inputs = build(step, *rest)
        if inputs.row_updates is not None:
            table = inputs.row_updates.page_table_up
            table[0, 0] = (table[0, 0] + 1) % 512
        return inputs

    monkeypatch.setattr(batch, "build", wrong)
    assert_red()


def test_a_position_off_by_one_is_noticed(monkeypatch):
    sound = layers.rope_angles
    # A shift of all positions is no fault, for rotary embeddings are relative: decodes alone are shifted.
    monkeypatch.setattr(layers, "rope_angles", lambda p, *rest: sound(p + 1 if p.shape[0] == 64 else p, *rest))
    assert_red()


def test_a_missing_causal_mask_is_noticed(monkeypatch):
    sound = xla._attend

    def sees_the_future(carry, q, k, v, visible, **rest):
        return sound(carry, q, k, v, visible | (rest["distance_xgs"] >= -2), **rest)

    monkeypatch.setattr(xla, "_attend", sees_the_future)
    assert_red()


def test_a_missing_copy_on_fork_is_noticed(monkeypatch):
    prompts = batch_prompts()[:12]
    params = [SamplingParams(temperature=1.0, seed=i, n=3, max_tokens=12, logprobs=2) for i in range(12)]
    expected = run(prompts, params).outputs
    monkeypatch.setattr(batch, "_copies", lambda step, buckets: None)
    with pytest.raises(AssertionError):
        assert_same(run(prompts, params).outputs, expected)


def test_a_stale_prefix_hit_is_noticed(monkeypatch):
    monkeypatch.setattr(BlockPool, "_forget", lambda self, block_id: self._block_to_digest.pop(block_id, None))
    monkeypatch.setattr(Scheduler, "check", lambda self: None)
    assert_red(num_device_blocks=28, block_size=4, repeat=2)


def test_an_ignored_budget_is_noticed(monkeypatch):
    from jaxpaged import scheduler

    class Unlimited(scheduler._Plan):
        budget = property(lambda self: 10**9, lambda self, value: None)

    monkeypatch.setattr(scheduler, "_Plan", Unlimited)
    # The batch refuses a step that fits no bucket.
    with pytest.raises(ValueError, match="largest bucket"):
        run(batch_prompts(), all_params("greedy"), max_num_batched_tokens=17)


def test_a_lost_row_update_is_noticed(monkeypatch):
    build = batch.build

    def wrong(step, *rest):
        inputs = build(step, *rest)
        if inputs.block_updates is not None:
            changed(inputs.block_updates, block_w=np.zeros_like(inputs.block_updates.block_w))
        return inputs

    monkeypatch.setattr(batch, "build", wrong)
    assert_red()
