"""From a scheduled step to arrays: exact contents, padding that touches nothing, buckets."""

import numpy as np
import pytest

from jaxpaged.batch import DROPPED, build, make_buckets, pick_bucket
from jaxpaged.config import EngineConfig
from jaxpaged.step_data import NOT_DRAWN, ON_DEVICE, ScheduledRequest, ScheduledStep, StartedRow

SCRATCH = 99
CONFIG = EngineConfig(block_size=4, max_model_len=30, max_num_seqs=6, max_num_batched_tokens=64)
BUCKETS = make_buckets(CONFIG)


def scheduled(row, start, token_ids, *, first_new_block=0, new_block_ids=(), num_draws=1, num_logprobs=None):
    return ScheduledRequest(
        request_id=f"r{row}",
        row=row,
        start=start,
        token_ids=tuple(token_ids),
        first_new_block=first_new_block,
        new_block_ids=tuple(new_block_ids),
        num_draws=num_draws,
        is_prefill=True,
        num_logprobs=num_logprobs,
    )


def started(row, block_ids, seed=0):
    sampling = {"temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "num_prompt_tokens": 3}
    return StartedRow(row=row, block_ids=tuple(block_ids), seed=seed, child=2, stop_ids=(2, 41), **sampling)


def arrays(step):
    return build(step, BUCKETS, SCRATCH)


def test_a_prefill_packs_tokens_one_request_after_another():
    inputs = arrays(ScheduledStep(requests=(scheduled(5, 0, [1, 2, 3]), scheduled(2, 8, [ON_DEVICE]))))
    assert not inputs.is_decode
    assert (inputs.num_requests, inputs.num_tokens) == (2, 4)
    assert inputs.token_t.tolist() == [1, 2, 3, -1] + [0] * 12
    assert inputs.row_b.tolist() == [5, 2]
    assert inputs.query_start_b1.tolist() == [0, 3, 4]
    assert inputs.context_len_b.tolist() == [3, 9]


def test_padded_requests_have_length_zero_and_the_row_of_nobody():
    inputs = arrays(ScheduledStep(requests=tuple(scheduled(row, 4, [7, 8]) for row in (0, 1, 3))))
    assert inputs.row_b.tolist() == [0, 1, 3, 6, 6, 6]
    assert inputs.query_start_b1.tolist() == [0, 2, 4, 6, 6, 6, 6]
    assert inputs.context_len_b.tolist() == [6, 6, 6, 0, 0, 0]


def test_a_step_of_one_token_each_is_a_decode_with_as_many_tokens_as_requests():
    inputs = arrays(ScheduledStep(requests=tuple(scheduled(row, 9, [ON_DEVICE]) for row in (4, 0, 1))))
    assert inputs.is_decode
    assert inputs.token_t.tolist() == [-1, -1, -1, 0]
    assert inputs.row_b.tolist() == [4, 0, 1, 6]
    assert inputs.query_start_b1.tolist() == [0, 1, 2, 3, 3]
    assert inputs.context_len_b.tolist() == [10, 10, 10, 0]


def test_each_request_of_a_decode_has_its_number_of_draws_and_padding_has_none():
    draws = {4: 8, 0: 3, 1: 0}
    requests = tuple(scheduled(row, 9, [ON_DEVICE], num_draws=n) for row, n in draws.items())
    assert arrays(ScheduledStep(requests=requests)).num_draws_b.tolist() == [8, 3, 0, 0]


def test_all_that_is_sent_is_int32():
    inputs = arrays(
        ScheduledStep(
            requests=(scheduled(1, 0, [1, 2], new_block_ids=[3]),), started=(started(0, [1]),), copies=((1, 2),)
        )
    )
    sent = [inputs.token_t, inputs.row_b, inputs.query_start_b1, inputs.context_len_b, inputs.num_draws_b]
    sent += [inputs.row_updates.stop_id_us]
    sent += [inputs.row_updates.row_u, inputs.row_updates.page_table_up, inputs.row_updates.child_u]
    sent += [inputs.row_updates.top_k_u, inputs.copies.source_c, inputs.copies.target_c]
    sent += [inputs.block_updates.row_w, inputs.block_updates.column_w, inputs.block_updates.block_w]
    assert {array.dtype for array in sent} == {np.dtype(np.int32)}
    rows = inputs.row_updates
    assert {a.dtype for a in (rows.temperature_u, rows.top_p_u, rows.min_p_u)} == {np.dtype(np.float32)}
    assert rows.seed_u2.dtype == np.uint32


def test_a_step_without_changes_sends_none():
    inputs = arrays(ScheduledStep(requests=(scheduled(1, 5, [ON_DEVICE]),)))
    assert (inputs.row_updates, inputs.block_updates, inputs.copies) == (None, None, None)


def test_started_rows_bring_blocks_and_parameters_and_unused_entries_point_to_the_scratch_block():
    step = ScheduledStep(
        requests=(scheduled(3, 0, [1], new_block_ids=[11]),), started=(started(3, [10, 11], 2**63 + 2**32 + 5),)
    )
    rows = arrays(step).row_updates
    assert rows.row_u.tolist() == [3] + [DROPPED] * 7
    assert rows.page_table_up.shape == (8, 8)
    assert rows.page_table_up[0].tolist() == [10, 11] + [SCRATCH] * 6
    assert rows.seed_u2[0].tolist() == [2**31 + 1, 5]
    assert (rows.child_u[0], rows.top_k_u[0]) == (2, 7)
    assert rows.stop_id_us[0].tolist() == [2, 41] + [NOT_DRAWN] * 6
    assert (rows.temperature_u[0], rows.top_p_u[0], rows.min_p_u[0]) == tuple(np.float32([0.5, 0.9, 0.1]))


def test_released_rows_point_to_the_scratch_block_and_draw_greedily():
    step = ScheduledStep(requests=(scheduled(1, 5, [ON_DEVICE]),), started=(started(2, [7]),), released=(0, 4))
    rows = arrays(step).row_updates
    assert rows.row_u.tolist() == [2, 0, 4] + [DROPPED] * 5
    assert (rows.page_table_up[1:3] == SCRATCH).all()
    assert rows.temperature_u[1:3].tolist() == [0, 0] and rows.top_p_u[1:3].tolist() == [1, 1]


def test_blocks_added_to_a_row_are_single_entries_and_rows_just_started_need_none():
    step = ScheduledStep(
        requests=(
            scheduled(1, 5, [1, 2, 3, 4, 5], first_new_block=2, new_block_ids=[20, 21]),
            scheduled(2, 0, [1], first_new_block=0, new_block_ids=[22]),
            scheduled(0, 4, [1], first_new_block=1, new_block_ids=[23]),
        ),
        started=(started(2, [22]),),
    )
    updates = arrays(step).block_updates
    entries = list(zip(updates.row_w.tolist(), updates.column_w.tolist(), updates.block_w.tolist(), strict=True))
    assert entries[:3] == [(1, 2, 20), (1, 3, 21), (0, 1, 23)]
    assert all(row == DROPPED for row, _, _ in entries[3:]) and len(entries) == 8


def test_all_copies_of_a_step_are_one_list_with_targets_out_of_range_as_padding():
    copies = arrays(ScheduledStep(requests=(scheduled(1, 5, [1]),), copies=((3, 8), (3, 9)))).copies
    assert copies.source_c.tolist() == [3, 3] + [0] * 6
    assert copies.target_c.tolist() == [8, 9] + [DROPPED] * 6


@pytest.mark.parametrize(("size", "padded"), [(1, 8), (8, 8), (9, 64), (64, 64), (65, 512)])
def test_updates_are_padded_to_powers_of_8(size, padded):
    buckets = make_buckets(EngineConfig(block_size=4, max_model_len=30))
    step = ScheduledStep(requests=(scheduled(1, 5, [1]),), copies=tuple((0, i) for i in range(size)))
    assert len(build(step, buckets, SCRATCH).copies.source_c) == padded


@pytest.mark.parametrize(
    ("asked", "width"), [([None, None], 20), ([0, None], 20), ([2, 5], 20), ([21, None], 30), ([1, -1], 30)]
)
def test_logprobs_are_as_many_as_the_request_with_the_most_asks_for(asked, width):
    buckets = make_buckets(EngineConfig(block_size=4, max_model_len=30, max_logprobs=30))
    requests = tuple(scheduled(i, 3, [1], num_logprobs=n) for i, n in enumerate(asked))
    inputs = build(ScheduledStep(requests=requests), buckets, SCRATCH)
    assert inputs.num_logprobs == width
    assert inputs.has_logprobs == (asked != [None, None])


@pytest.mark.parametrize(("max_logprobs", "sizes"), [(0, (0,)), (5, (5,)), (20, (20,)), (30, (20, 30))])
def test_the_widths_of_logprobs_end_at_the_most_that_may_be_asked_for(max_logprobs, sizes):
    config = EngineConfig(block_size=4, max_model_len=30, max_logprobs=max_logprobs)
    assert make_buckets(config).logprobs == sizes


# ---- buckets


def test_the_buckets_of_the_default_settings():
    buckets = make_buckets(EngineConfig(block_size=16, max_model_len=2048, dtype="float32"))
    assert buckets.requests == (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
    assert buckets.tokens == (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
    assert buckets.prefill_requests(16) == (1, 4, 16)
    assert buckets.prefill_requests(256) == (4, 16, 64, 256)
    assert buckets.prefill_requests(2048) == (32, 128, 256)
    assert buckets.updates == (8, 64, 512)
    assert buckets.max_draws == 8
    assert (buckets.max_blocks, buckets.num_rows, buckets.padding_row) == (128, 257, 256)


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 5, 7, 8, 20, 100, 256, 1000])
@pytest.mark.parametrize("budget", [1, 2, 17, 100, 2048])
@pytest.mark.parametrize(
    ("settings", "least"),
    [({"dtype": "float32"}, 1), ({"dtype": "bfloat16"}, 2), ({"dtype": "float32", "quantization": "int8"}, 2)],
)
def test_every_step_within_the_settings_has_a_bucket_and_single_rows_are_float32(max_num_seqs, budget, settings, least):
    settings |= {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": budget}
    buckets = make_buckets(EngineConfig(block_size=4, max_model_len=30, **settings))
    for sizes in (buckets.requests, buckets.tokens, *map(buckets.prefill_requests, buckets.tokens)):
        assert list(sizes) == sorted(set(sizes)) and sizes[0] >= least
    most_requests = min(max_num_seqs, budget)
    assert all(pick_bucket(n, buckets.requests, "requests") >= n for n in range(1, most_requests + 1))
    for num_tokens in buckets.tokens:
        most = min(most_requests, num_tokens)
        assert pick_bucket(most, buckets.prefill_requests(num_tokens), "requests") >= most
    assert pick_bucket(budget, buckets.tokens, "tokens") >= budget


def test_at_most_a_third_of_a_bucket_is_padding():
    buckets = make_buckets(EngineConfig(block_size=16, max_model_len=2048))
    for sizes, least in ((buckets.requests, 9), (buckets.tokens, 17)):
        for size in range(least, sizes[-1] + 1):
            assert 3 * (pick_bucket(size, sizes, "") - size) <= pick_bucket(size, sizes, "")


def test_the_smallest_bucket_that_holds_a_size_is_picked():
    assert [pick_bucket(size, (2, 4, 8), "requests") for size in (1, 2, 3, 4, 5, 8)] == [2, 2, 4, 4, 8, 8]


def test_a_size_outside_the_buckets_is_an_error():
    with pytest.raises(ValueError, match="9 requests do not fit the largest bucket, 8"):
        pick_bucket(9, (2, 4, 8), "requests")
    with pytest.raises(ValueError, match="65 tokens do not fit the largest bucket, 64"):
        arrays(ScheduledStep(requests=(scheduled(0, 0, range(65)),)))
