"""Which block holds which run of tokens, so that equal prompt beginnings are computed once.

A full block is named by a hash over its tokens and the hash of the block before it: equal hashes
mean an equal whole prefix. The hash is 256 bits of BLAKE2b, so a crafted prompt cannot hit the
blocks of another one.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b

_ROOT = b""


def extend_block_hashes(
    hashes: list[bytes], token_ids: Sequence[int], block_size: int, num_blocks: int
) -> None:
    """Append to `hashes` until the first `num_blocks` full blocks of `token_ids` have one."""
    for index in range(len(hashes), num_blocks):
        tokens = token_ids[index * block_size : (index + 1) * block_size]
        if len(tokens) != block_size:
            raise ValueError(f"block {index} is not full: {len(tokens)} of {block_size} tokens")
        parent = hashes[-1] if hashes else _ROOT
        digest = blake2b(parent, digest_size=32)
        digest.update(array("q", tokens).tobytes())
        hashes.append(digest.digest())


class PrefixCache:
    """One block for each known hash, and one hash for each known block."""

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._block_of)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._hash_of

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        """Blocks of the longest known beginning of `hashes`."""
        found = []
        for block_hash in hashes:
            block_id = self._block_of.get(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def insert(self, block_hash: bytes, block_id: int) -> None:
        """Make a full and computed block findable; the first block with a hash stays."""
        if block_hash in self._block_of or block_id in self._hash_of:
            return
        self._block_of[block_hash] = block_id
        self._hash_of[block_id] = block_hash

    def forget(self, block_id: int) -> None:
        """The block's content is about to be overwritten."""
        block_hash = self._hash_of.pop(block_id, None)
        if block_hash is not None:
            del self._block_of[block_hash]

    def clear(self) -> int:
        """Forget everything; gives how many blocks were known."""
        num_known = len(self._block_of)
        self._block_of.clear()
        self._hash_of.clear()
        return num_known

    def check_integrity(self) -> None:
        """Check that both directions agree.

        Raises:
            RuntimeError: they do not.
        """
        if self._hash_of != {block: name for name, block in self._block_of.items()}:
            raise RuntimeError("the prefix cache's two directions disagree")
