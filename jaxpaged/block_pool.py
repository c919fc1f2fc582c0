"""Who owns which block of KV memory.

Every block is in exactly one state:
  referenced  at least one request holds it; `ref_counts[block]` says how many;
  cached      nobody holds it, but the prefix index knows its content: a later prompt may take it up again;
  free        nobody holds it and its content means nothing.
Free and cached blocks wait in one queue. Blocks are taken from its head; free blocks enter at the head, cached ones
at the tail, so that content that could still be hit is overwritten last, in the order in which it was given up.
"""

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

ROOT_DIGEST = bytes(32)


def block_digest(parent: bytes, token_ids: Sequence[int], context: bytes) -> bytes:
    """Names the content of a full block: sha256(parent digest ‖ tokens as little-endian int32 ‖ context).

    `context` holds whatever else K and V depend on: weights version, adapter, salt.
    """
    return hashlib.sha256(parent + np.asarray(token_ids, "<i4").tobytes() + context).digest()


class BlockPool:
    """The blocks 0 … num_blocks − 1. All operations cost O(blocks concerned)."""

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        self._queue: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._digest_to_block: dict[bytes, int] = {}
        self._block_to_digest: dict[int, bytes] = {}
        self._num_cached = 0

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can give out: free and cached ones."""
        return len(self._queue)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds and the prefix index knows."""
        return self._num_cached

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds."""
        return self.num_blocks - len(self._queue)

    def allocate(self, num_blocks: int) -> list[int]:
        """Takes blocks from the head of the queue; what the index knew of them is forgotten.

        RuntimeError when fewer are available; ask `num_available` first.
        """
        if num_blocks > len(self._queue):
            raise RuntimeError(f"{num_blocks} blocks wanted, {len(self._queue)} of {self.num_blocks} available")
        block_ids = [self._queue.popitem(last=False)[0] for _ in range(num_blocks)]
        for block_id in block_ids:
            self._forget(block_id)
            self.ref_counts[block_id] = 1
        return block_ids

    def share(self, block_ids: Iterable[int]):
        """Adds one reference to each block, taking it out of the queue where it was the first."""
        for block_id in block_ids:
            if self.ref_counts[block_id] == 0:
                del self._queue[block_id]
                self._num_cached -= block_id in self._block_to_digest
            self.ref_counts[block_id] += 1

    def free(self, block_ids: Sequence[int]):
        """Drops one reference to each block of a request, given in token order.

        The tail goes back before the head, so that the start of a prompt stays in the index longest.
        """
        given_up = []
        for block_id in reversed(block_ids):
            if self.ref_counts[block_id] == 0:
                raise RuntimeError(f"block {block_id} is freed, but nobody holds it")
            self.ref_counts[block_id] -= 1
            if self.ref_counts[block_id] == 0:
                given_up.append(block_id)
        for block_id in given_up:
            self._queue[block_id] = None
            self._num_cached += block_id in self._block_to_digest
        for block_id in reversed(given_up):
            if block_id not in self._block_to_digest:
                self._queue.move_to_end(block_id, last=False)

    def index(self, block_id: int, digest: bytes):
        """Makes a full block findable. Where another block has the digest already, that one stays."""
        if digest not in self._digest_to_block and block_id not in self._block_to_digest:
            self._digest_to_block[digest] = block_id
            self._block_to_digest[block_id] = digest

    def match(self, digests: Iterable[bytes]) -> list[int]:
        """Blocks of the longest prefix of `digests` that the index knows. Takes no reference."""
        block_ids = []
        for digest in digests:
            block_id = self._digest_to_block.get(digest)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def num_unheld(self, block_ids: Iterable[int]) -> int:
        """How many of the blocks nobody holds: `share` would take them out of the queue."""
        return sum(self.ref_counts[block_id] == 0 for block_id in block_ids)

    def reset_index(self) -> bool:
        """Forgets all cached content. False, and nothing done, while any block is held."""
        if self.num_used:
            return False
        self._digest_to_block.clear()
        self._block_to_digest.clear()
        self._num_cached = 0
        return True

    def check(self, page_tables: Iterable[Sequence[int]]):
        """RuntimeError unless the books are right.

        free + referenced + cached = total; reference counts equal the number of page tables that hold a block;
        the index and its inverse agree.
        """
        held = Counter(block_id for page_table in page_tables for block_id in page_table)
        wrong = [
            (block_id, count, held[block_id])
            for block_id, count in enumerate(self.ref_counts)
            if count != held[block_id]
        ]
        if wrong:
            raise RuntimeError(
                f"blocks whose reference count differs from the page tables (block, count, holders): {wrong}"
            )
        queued = set(self._queue)
        cached = {block_id for block_id in queued if block_id in self._block_to_digest}
        free, referenced = len(queued) - len(cached), len(held)
        if free + referenced + len(cached) != self.num_blocks or queued & set(held):
            raise RuntimeError(
                f"free {free} + referenced {referenced} + cached {len(cached)} ≠ {self.num_blocks} blocks; "
                f"queued and held: {sorted(queued & set(held))}"
            )
        if len(cached) != self._num_cached:
            raise RuntimeError(f"{len(cached)} blocks are cached, but the pool counts {self._num_cached}")
        if {block: digest for digest, block in self._digest_to_block.items()} != self._block_to_digest:
            raise RuntimeError("the prefix index and its inverse differ")

    def _forget(self, block_id: int):
        digest = self._block_to_digest.pop(block_id, None)
        if digest is not None:
            del self._digest_to_block[digest]
            self._num_cached -= 1
