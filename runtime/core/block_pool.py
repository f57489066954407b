"""Which KV blocks are free, and in which order free blocks are taken again.

The pool knows numbers only: no requests, no hashes. All operations are O(1) per block.

    taken first                                       taken last
    head -> worthless, ... -> released long ago, ... -> released last -> tail

A released block keeps its content until it is taken. One whose content can be found again (the
prefix cache knows it) goes to the tail, the others to the head.
"""

from collections.abc import Sequence


class BlockPool:
    """Reference counts of `num_blocks` blocks and a doubly linked list of the free ones."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one block, got {num_blocks}")
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        # Index `num_blocks` is the sentinel: its next is the head, its previous the tail.
        self._next = [*range(1, num_blocks + 1), 0]
        self._previous = [num_blocks, *range(num_blocks)]
        self._num_free = num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return self._num_free

    def ref_count(self, block_id: int) -> int:
        """How many requests hold the block."""
        return self._ref_counts[block_id]

    def take(self, num_blocks: int) -> list[int]:
        """Blocks to write, each held once, from the head of the free list.

        The caller checks `num_free` first and forgets what the blocks held before.
        """
        if num_blocks > self._num_free:
            raise ValueError(f"{num_blocks} blocks wanted, {self._num_free} are free")
        taken = []
        for _ in range(num_blocks):
            block_id = self._next[self.num_blocks]
            self._unlink(block_id)
            self._ref_counts[block_id] = 1
            taken.append(block_id)
        return taken

    def hold(self, block_id: int) -> None:
        """Hold a block for its content; it leaves the free list if nobody held it."""
        if self._ref_counts[block_id] == 0:
            self._unlink(block_id)
        self._ref_counts[block_id] += 1

    def release(self, block_id: int, *, keep_content: bool) -> None:
        """Give up one hold; the last one makes the block free."""
        count = self._ref_counts[block_id]
        if count < 1:
            raise ValueError(f"block {block_id} is free already")
        self._ref_counts[block_id] = count - 1
        if count == 1:
            self._link(block_id, at_tail=keep_content)

    def free_block_ids(self) -> list[int]:
        """The free blocks in the order in which they will be taken."""
        found: list[int] = []
        block_id = self._next[self.num_blocks]
        while block_id != self.num_blocks and len(found) <= self.num_blocks:
            found.append(block_id)
            block_id = self._next[block_id]
        return found

    def check_integrity(self, expected_ref_counts: Sequence[int]) -> None:
        """Compare with the counts that the holders' own tables give.

        Raises:
            RuntimeError: a leaked, lost or doubly linked block, by number.
        """
        free = self.free_block_ids()
        if len(free) != self._num_free or len(set(free)) != len(free):
            raise RuntimeError(f"free list holds {len(free)} links, counter says {self._num_free}")
        for block_id, expected in enumerate(expected_ref_counts):
            if self._ref_counts[block_id] != expected:
                raise RuntimeError(
                    f"block {block_id} counts {self._ref_counts[block_id]} holders, "
                    f"{expected} tables name it"
                )
        unheld = {block_id for block_id, count in enumerate(expected_ref_counts) if count == 0}
        if unheld != set(free):
            raise RuntimeError(f"free list differs in blocks {sorted(unheld ^ set(free))[:8]}")

    def _unlink(self, block_id: int) -> None:
        before, after = self._previous[block_id], self._next[block_id]
        self._next[before] = after
        self._previous[after] = before
        self._num_free -= 1

    def _link(self, block_id: int, *, at_tail: bool) -> None:
        sentinel = self.num_blocks
        before = self._previous[sentinel] if at_tail else sentinel
        after = sentinel if at_tail else self._next[sentinel]
        self._previous[block_id], self._next[block_id] = before, after
        self._next[before] = block_id
        self._previous[after] = block_id
        self._num_free += 1
