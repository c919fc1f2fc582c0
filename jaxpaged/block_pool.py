"""Who owns which block of KV memory, on the device and on the host.

Every block is in exactly one state:
  referenced  at least one request holds it; `ref_counts[block]` says how many;
  cached      nobody holds it, but the prefix index knows its content: a later prompt may take it up again;
  free        nobody holds it and its content means nothing.
Free and cached blocks wait in one queue. Blocks are taken from its head; free blocks enter at the head, cached ones
at the tail, so that content that could still be hit is overwritten last, in the order in which it was given up.

Preempted requests may keep their blocks in host memory, in a second pool, and what the index knows may stay there when
its block is taken: see `SwapSpace`.
"""

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

ROOT_DIGEST = bytes(32)


def block_digest(parent: bytes, token_ids: Sequence[int], context: bytes) -> bytes:
    """Names the content of a full block: sha256(parent digest ‖ tokens as little-endian int32 ‖ context).

    `context` holds whatever else K and V depend on: weights version, adapter, salt.
    """
    return hashlib.sha256(parent + np.asarray(token_ids, "<i4").tobytes() + context).digest()


class BlockPool:
    """The blocks 0 … num_blocks − 1. All operations cost O(blocks concerned).

    `generations[block]` counts how often the block was allocated: what it holds stays until that changes. Before the
    index forgets a block that is allocated, `evict` is told of it and its digest.
    """

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        self.generations = [0] * num_blocks
        self._queue: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._digest_to_block: dict[bytes, int] = {}
        self._block_to_digest: dict[int, bytes] = {}
        self._num_cached = 0
        self.evict: Callable[[int, bytes], None] | None = None

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
            self.generations[block_id] += 1
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
        self.forget_index()
        return True

    def forget_index(self):
        """Forgets all content, also of blocks that are held."""
        self._digest_to_block.clear()
        self._block_to_digest.clear()
        self._num_cached = 0

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
        digest = self._block_to_digest.get(block_id)
        if digest is not None:
            if self.evict is not None:
                self.evict(block_id, digest)
            del self._block_to_digest[block_id], self._digest_to_block[digest]
            self._num_cached -= 1


class _Twins(NamedTuple):
    """A device block and a host block with the same content, while neither is allocated again."""

    device_block: int
    device_generation: int
    host_block: int
    host_generation: int


class SwapSpace:
    """The host's blocks, and which of them hold the same as which of the device's.

    Blocks keep their content until they are allocated again, on both sides. So a block that requests share goes to
    the host once; one that comes back and leaves again without a change needs no second copy; and one that nobody has
    overwritten on the device in the meantime need not come back.

    With offloading, the host's pool has a prefix index, too: of blocks whose content was evicted from the device's.
    Requests that are swapped out take room from them, never the other way round.
    """

    def __init__(self, device: BlockPool, num_blocks: int):
        self.device = device
        self.host = BlockPool(num_blocks)
        self._on_host: dict[int, _Twins] = {}
        self._on_device: dict[int, _Twins] = {}

    def num_to_copy(self, block_ids: Iterable[int]) -> int:
        """How many of the device's blocks the host does not hold yet."""
        return sum(self._host_twin(block_id) is None for block_id in block_ids)

    def swap_out(self, block_ids: Sequence[int], num_full: int) -> tuple[list[int], list[tuple[int, int]]] | None:
        """(host blocks that are to hold them, with a reference each; copies to be made (device, host)) of a request's
        blocks. None, and nothing done, where the host has no room.

        The first `num_full` are full, never written again: only those can serve for a later `swap_out`.
        """
        twins = [self._host_twin(block_id) for block_id in block_ids]
        host_block_ids = _twins_or_new(self.host, twins, len(twins))
        if host_block_ids is None:
            return None
        copies = []
        for i, (block_id, host_block_id) in enumerate(zip(block_ids, host_block_ids, strict=True)):
            if twins[i] is None:
                copies.append((block_id, host_block_id))
                self._pair(block_id, host_block_id, is_full=i < num_full)
        return host_block_ids, copies

    def swap_in(
        self, host_block_ids: Sequence[int], num_full: int, num_blocks: int
    ) -> tuple[list[int], list[tuple[int, int]]] | None:
        """(device blocks that are to hold them, with a reference each; copies to be made (host, device)) of a request's
        host blocks, which keep their references. `num_full`: see `swap_out`.

        None, and nothing done, where the device has no room for `num_blocks` blocks in all.
        """
        twins = [self._device_twin(block_id) for block_id in host_block_ids]
        block_ids = _twins_or_new(self.device, twins, num_blocks)
        if block_ids is None:
            return None
        copies = []
        for i, (host_block_id, block_id) in enumerate(zip(host_block_ids, block_ids, strict=True)):
            if twins[i] is None:
                copies.append((host_block_id, block_id))
                self._pair(block_id, host_block_id, is_full=i < num_full)
        return block_ids, copies

    def offload(self, block_id: int, digest: bytes) -> list[tuple[int, int]]:
        """Copies to be made (device, host), so that the index of the host knows what is in a full block which is about
        to be overwritten. None where the host holds it already, or has no room.
        """
        [known] = self.host.match([digest]) or [self._host_twin(block_id)]
        held = _twins_or_new(self.host, [known], 1)
        if held is None:
            return []
        self.host.index(held[0], digest)
        self.host.free(held)  # will be overwritten last
        return [(block_id, held[0])] if known is None else []

    def forget(self):
        """After the device has lost its blocks, or copies to the host did not happen."""
        self._on_host.clear()
        self._on_device.clear()
        self.host.forget_index()

    def _pair(self, block_id: int, host_block_id: int, *, is_full: bool):
        generations = self.device.generations[block_id], self.host.generations[host_block_id]
        twins = _Twins(block_id, generations[0], host_block_id, generations[1])
        self._on_device[host_block_id] = twins
        if is_full:
            self._on_host[block_id] = twins

    def _host_twin(self, block_id: int) -> int | None:
        twins = self._on_host.get(block_id)
        return twins.host_block if twins is not None and self._are_alike(twins) else None

    def _device_twin(self, host_block_id: int) -> int | None:
        twins = self._on_device.get(host_block_id)
        return twins.device_block if twins is not None and self._are_alike(twins) else None

    def _are_alike(self, twins: _Twins) -> bool:
        return (
            self.device.generations[twins.device_block] == twins.device_generation
            and self.host.generations[twins.host_block] == twins.host_generation
        )


def _twins_or_new(pool: BlockPool, twins: Sequence[int | None], num_blocks: int) -> list[int] | None:
    """The twins, and new blocks in place of those that are None, with a reference each.

    None, and nothing done, where the pool has no room for `num_blocks` blocks in all, those included.
    """
    held = [block_id for block_id in twins if block_id is not None]
    if num_blocks - len(held) > pool.num_available - pool.num_unheld(held):
        return None
    pool.share(held)
    new = iter(pool.allocate(len(twins) - len(held)))
    return [next(new) if twin is None else twin for twin in twins]
