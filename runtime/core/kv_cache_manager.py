"""Block tables of the running requests, on top of the pool and the prefix cache."""

from collections.abc import Sequence

from vcli.runtime.core.block_pool import BlockPool
from vcli.runtime.core.prefix_cache import PrefixCache, extend_block_hashes
from vcli.runtime.core.request import Request


class KVCacheManager:
    """Gives blocks to requests and takes them back; the only owner of block tables.

    A table covers token i of its request by block i // block_size, row i % block_size. Only full
    blocks whose rows are written are shared, so nobody writes into a block with two holders.
    """

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool) -> None:
        self.block_size = block_size
        self._pool = BlockPool(num_blocks)
        self._prefixes = PrefixCache() if enable_prefix_caching else None
        self._tables: dict[int, list[int]] = {}

    @property
    def num_blocks(self) -> int:
        """All blocks."""
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request holds; their content may still be findable."""
        return self._pool.num_free

    @property
    def has_prefix_cache(self) -> bool:
        """Whether prefixes are looked up at all."""
        return self._prefixes is not None

    def block_table(self, request: Request) -> Sequence[int]:
        """Blocks that the request holds, in the order of its tokens."""
        return self._tables[request.number]

    def find_prefix(self, request: Request) -> list[int]:
        """Blocks that hold the beginning of the request's tokens; nothing is held yet.

        At least one token is left out, since the model has to run for the next one.
        """
        if self._prefixes is None:
            return []
        num_full = (request.num_tokens - 1) // self.block_size
        extend_block_hashes(request.block_hashes, request.token_ids, self.block_size, num_full)
        return self._prefixes.find(request.block_hashes[:num_full])

    def blocks_to_admit(self, prefix: Sequence[int], num_tokens: int) -> int:
        """Free blocks that a request of `num_tokens` would use up, prefix blocks included."""
        num_idle = sum(1 for block_id in prefix if self._pool.ref_count(block_id) == 0)
        return self._blocks_for(num_tokens) - len(prefix) + num_idle

    def admit(self, request: Request, prefix: Sequence[int], num_tokens: int) -> None:
        """Start the request's table: `prefix`, and new blocks to cover `num_tokens` tokens.

        The caller has compared `blocks_to_admit` with `num_free_blocks`.
        """
        if request.number in self._tables:
            raise ValueError(f"request number {request.number} has a table already")
        # Hold the prefix first: taking new blocks could otherwise overwrite it.
        for block_id in prefix:
            self._pool.hold(block_id)
        new = self._take(self._blocks_for(num_tokens) - len(prefix))
        self._tables[request.number] = [*prefix, *new]
        request.num_shared_blocks = len(prefix)

    def extend(self, request: Request, num_tokens: int) -> list[int] | None:
        """Blocks appended so that the table covers `num_tokens`; None if too few are free."""
        table = self._tables[request.number]
        num_missing = self._blocks_for(num_tokens) - len(table)
        if num_missing <= 0:
            return []
        if num_missing > self._pool.num_free:
            return None
        new = self._take(num_missing)
        table.extend(new)
        return new

    def share_full_blocks(self, request: Request) -> None:
        """Make the blocks findable that are full of confirmed tokens."""
        if self._prefixes is None:
            return
        num_full = request.num_confirmed_tokens // self.block_size
        if num_full <= request.num_shared_blocks:
            return
        extend_block_hashes(request.block_hashes, request.token_ids, self.block_size, num_full)
        table = self._tables[request.number]
        for index in range(request.num_shared_blocks, num_full):
            self._prefixes.insert(request.block_hashes[index], table[index])
        request.num_shared_blocks = num_full

    def free(self, request: Request) -> None:
        """Take all blocks back; the last of them will be reused first, the beginning last."""
        for block_id in reversed(self._tables.pop(request.number)):
            keep = self._prefixes is not None and block_id in self._prefixes
            self._pool.release(block_id, keep_content=keep)

    def reset_prefix_cache(self) -> int:
        """Forget all prefixes; running requests keep their blocks. Gives how many were known."""
        return 0 if self._prefixes is None else self._prefixes.clear()

    def check_integrity(self) -> None:
        """Compare tables, reference counts, free list and prefixes with each other.

        Raises:
            RuntimeError: what disagrees.
        """
        expected = [0] * self._pool.num_blocks
        for number, table in self._tables.items():
            if len(set(table)) != len(table):
                raise RuntimeError(f"request number {number} holds a block twice: {table}")
            for block_id in table:
                expected[block_id] += 1
        self._pool.check_integrity(expected)
        if self._prefixes is not None:
            self._prefixes.check_integrity()

    def _take(self, num_blocks: int) -> list[int]:
        taken = self._pool.take(num_blocks)
        if self._prefixes is not None:
            for block_id in taken:
                self._prefixes.forget(block_id)
        return taken

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
