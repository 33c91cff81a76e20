"""Reference-counted block ids of the KV pool. Knows nothing about tokens, tensors or sequences.

A block that several owners hold is shared and must not be written; its writer takes a fresh block first
(copy-on-write, see ``scheduler.py``). Block 0 is the null block of the pool and is never handed out.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from qerl.rollout.kv_cache import NULL_BLOCK


class BlockAllocator:
    """Hands out the block ids 1..num_blocks and takes each back when its last owner frees it.

    Raises:
        ValueError: ``num_blocks`` is smaller than 1.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a block allocator needs at least 1 block, got {num_blocks}")
        self.num_blocks = num_blocks
        self.peak_used = 0
        self._ref_counts = [0] * (num_blocks + 1)
        # A stack: the block freed last is the one most likely still in a cache.
        self._free = list(range(num_blocks, NULL_BLOCK, -1))

    @property
    def num_free(self) -> int:
        """Blocks that no one holds."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks with at least one owner."""
        return self.num_blocks - len(self._free)

    def ref_count(self, block: int) -> int:
        """Number of owners of ``block``."""
        return self._ref_counts[block]

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` free blocks, each with one owner.

        Callers make room first (``num_free``), so running out is a broken invariant, not an input error.
        """
        assert count <= len(self._free), f"{count} blocks asked, {len(self._free)} free"
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._ref_counts[block] = 1
        self.peak_used = max(self.peak_used, self.num_used)
        return taken

    def share(self, blocks: Iterable[int]) -> list[int]:
        """Add one owner to each of ``blocks``; returns them as a new list, the new owner's table."""
        shared = list(blocks)
        for block in shared:
            assert self._ref_counts[block] > 0, f"block {block} is free and cannot be shared"
            self._ref_counts[block] += 1
        return shared

    def free(self, blocks: Iterable[int]) -> None:
        """Drop one owner of each of ``blocks``; those without owners become free."""
        for block in blocks:
            assert self._ref_counts[block] > 0, f"block {block} is freed twice"
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._free.append(block)

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Compare the reference counts with ``tables``, the block tables of every owner.

        Raises:
            AssertionError: a block is lost, held twice by one owner, free though owned, or miscounted.
        """
        owners: Counter[int] = Counter()
        for table in tables:
            assert len(set(table)) == len(table), f"a block occurs twice in one table: {table}"
            owners.update(table)
        assert owners[NULL_BLOCK] == 0, "the null block is owned"
        free = set(self._free)
        assert len(free) == len(self._free), "a block is twice in the free list"
        for block in range(1, self.num_blocks + 1):
            counted, held = self._ref_counts[block], owners[block]
            assert counted == held, f"block {block} has {held} owners but a count of {counted}"
            assert (block in free) == (held == 0), f"block {block} with {held} owners: free={block in free}"
