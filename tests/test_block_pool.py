"""The books of KV memory: exact block ids, exact order of the free block queue, exact digests."""

import hashlib
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpaged.block_pool import BlockPool, block_digest

A, B, C, D = (bytes([i]) * 32 for i in range(4))


def queue(pool):
    return list(pool._queue)


def test_a_new_pool_gives_out_its_blocks_in_order_of_their_ids():
    pool = BlockPool(4)
    assert pool.allocate(3) == [0, 1, 2]
    assert pool.allocate(1) == [3]
    assert (pool.num_available, pool.num_used, pool.num_cached) == (0, 4, 0)


def test_a_digest_is_sha256_of_parent_tokens_as_little_endian_int32_and_context():
    root = hashlib.sha256(bytes(32) + struct.pack("<3i", 1, 2, 70000) + b"(0, None, None)").digest()
    assert block_digest(bytes(32), [1, 2, 70000], b"(0, None, None)") == root
    child = hashlib.sha256(root + struct.pack("<3i", 5, 6, 7) + b"(0, None, None)").digest()
    assert block_digest(root, [5, 6, 7], b"(0, None, None)") == child


def test_a_digest_depends_on_parent_each_token_their_order_and_context():
    digests = [
        block_digest(A, [1, 2], b""),
        block_digest(B, [1, 2], b""),
        block_digest(A, [2, 1], b""),
        block_digest(A, [1, 3], b""),
        block_digest(A, [1, 2], b"adapter"),
    ]
    assert len(set(digests)) == len(digests)


def test_freed_blocks_without_content_go_to_the_head_tail_of_the_request_first():
    pool = BlockPool(5)
    pool.free(pool.allocate(3))
    assert queue(pool) == [2, 1, 0, 3, 4]


def test_freed_blocks_with_content_go_to_the_end_and_the_tail_is_reused_before_the_head():
    pool = BlockPool(5)
    blocks = pool.allocate(3)
    for block_id, digest in zip(blocks, (A, B, C), strict=True):
        pool.index(block_id, digest)
    pool.free(blocks)
    assert queue(pool) == [3, 4, 2, 1, 0]
    assert pool.num_cached == 3


def test_the_last_partial_block_of_a_freed_request_is_reused_at_once():
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    pool.index(blocks[0], A)
    pool.free(blocks)
    assert queue(pool) == [1, 2, 3, 0]


def test_content_is_found_until_its_block_is_given_away():
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    pool.index(blocks[0], A)
    pool.index(blocks[1], B)
    pool.free(blocks)
    assert pool.match([A, B]) == [0, 1]
    assert pool.allocate(2) == [2, 1]
    assert pool.match([A, B]) == [0]
    assert pool.allocate(1) == [0]
    assert pool.match([A, B]) == []
    pool.check([[2, 1], [0]])


def test_a_match_ends_at_the_first_digest_that_is_not_known():
    pool = BlockPool(3)
    pool.allocate(3)
    pool.index(0, A)
    pool.index(2, C)
    assert pool.match([A, B, C]) == [0]
    assert pool.match([C, A]) == [2, 0]


def test_of_two_blocks_with_one_digest_the_first_stays_in_the_index():
    pool = BlockPool(3)
    pool.allocate(2)
    pool.index(0, A)
    pool.index(1, A)
    assert pool.match([A]) == [0]
    pool.free([1])
    assert queue(pool) == [1, 2], "the second block's content is not known: it is free, not cached"
    pool.free([0])
    assert queue(pool) == [1, 2, 0]


def test_a_shared_block_is_held_until_its_last_holder_lets_go():
    pool = BlockPool(2)
    pool.allocate(1)
    pool.share([0])
    pool.free([0])
    pool.check([[0]])
    assert pool.num_used == 1
    pool.free([0])
    pool.check([])
    assert pool.num_used == 0


def test_sharing_a_cached_block_takes_it_out_of_the_queue_and_keeps_its_content():
    pool = BlockPool(3)
    pool.allocate(1)
    pool.index(0, A)
    pool.free([0])
    assert pool.num_unheld([0, 1]) == 2
    pool.share([0])
    assert pool.num_unheld([0, 1]) == 1
    assert (queue(pool), pool.num_cached) == ([1, 2], 0)
    assert pool.match([A]) == [0]


def test_more_blocks_than_are_available_are_refused_and_nothing_is_taken():
    pool = BlockPool(3)
    pool.allocate(1)
    with pytest.raises(RuntimeError, match="3 blocks wanted, 2 of 3 available"):
        pool.allocate(3)
    pool.check([[0]])


def test_freeing_a_block_that_nobody_holds_is_an_error():
    pool = BlockPool(3)
    with pytest.raises(RuntimeError, match="block 1 is freed, but nobody holds it"):
        pool.free([1])


def test_the_index_is_forgotten_only_while_nobody_holds_a_block():
    pool = BlockPool(3)
    pool.allocate(2)
    pool.index(0, A)
    pool.index(1, B)
    pool.free([0])
    assert not pool.reset_index()
    assert (pool.match([A]), pool.num_cached) == ([0], 1)
    pool.free([1])
    assert pool.reset_index()
    assert (pool.match([A]), pool.num_cached) == ([], 0)
    pool.check([])


def break_count(pool):
    pool.ref_counts[0] += 1


def break_queue(pool):
    pool._queue[0] = None


def break_free(pool):
    del pool._queue[3]


def break_index(pool):
    pool._digest_to_block[D] = 2


def break_cached_count(pool):
    pool._num_cached += 1


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (break_count, r"\(0, 2, 1\)"),
        (break_queue, r"free 1 \+ referenced 2 \+ cached 2 ≠ 4 blocks; queued and held: \[0\]"),
        (break_free, r"free 0 \+ referenced 2 \+ cached 1 ≠ 4 blocks"),
        (break_index, "the prefix index and its inverse differ"),
        (break_cached_count, "1 blocks are cached, but the pool counts 2"),
    ],
)
def test_check_finds_what_is_wrong_with_the_books_and_gives_the_numbers(broken, message):
    pool = BlockPool(4)
    pool.index(pool.allocate(3)[0], A)
    pool.index(2, C)
    pool.free([2])
    pool.check([[0, 1]])
    broken(pool)
    with pytest.raises(RuntimeError, match=message):
        pool.check([[0, 1]])


def test_check_finds_a_page_table_with_a_block_that_is_not_its_own():
    pool = BlockPool(4)
    pool.allocate(2)
    for page_tables in ([[0, 1], [1]], [[0, 1, 2]], [[0]]):
        with pytest.raises(RuntimeError, match="reference count differs"):
            pool.check(page_tables)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.data())
def test_the_books_are_right_after_any_sequence_of_operations(data):
    pool = BlockPool(8)
    holders: list[list[int]] = []
    digest_number = 0
    content: dict[bytes, int] = {}
    for _ in range(data.draw(st.integers(1, 30))):
        operation = data.draw(st.sampled_from(["allocate", "free", "share", "index", "hit", "reset"]))
        if operation == "allocate" and pool.num_available:
            blocks = pool.allocate(data.draw(st.integers(1, pool.num_available)))
            content = {digest: block_id for digest, block_id in content.items() if block_id not in blocks}
            holders.append(blocks)
        elif operation == "free" and holders:
            pool.free(holders.pop(data.draw(st.integers(0, len(holders) - 1))))
        elif operation == "share" and holders:
            blocks = list(data.draw(st.sampled_from(holders)))
            pool.share(blocks)
            holders.append(blocks)
        elif operation == "index" and holders:
            block_id = data.draw(st.sampled_from(data.draw(st.sampled_from(holders))))
            digest, digest_number = digest_number.to_bytes(32, "little"), digest_number + 1
            if block_id not in content.values():
                content[digest] = block_id
            pool.index(block_id, digest)
        elif operation == "hit" and content:
            digest = data.draw(st.sampled_from(sorted(content)))
            assert pool.match([digest]) == [content[digest]]
            pool.share([content[digest]])
            holders.append([content[digest]])
        elif operation == "reset" and pool.reset_index():
            assert not holders
            content.clear()
        pool.check(holders)
        assert pool.num_used == len({block_id for blocks in holders for block_id in blocks})
        assert all(pool.match([digest]) == [block_id] for digest, block_id in content.items())
