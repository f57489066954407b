"""From what each rank has free to one number of KV blocks for all of them."""

from collections.abc import Sequence

from vcli.runtime.messages import KVCacheConfig
from vcli.topology.errors import ConfigError, UnfitError


def plan_kv_cache(
    available_bytes: Sequence[int],
    bytes_per_block: Sequence[int],
    *,
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
    requested_bytes: int | None = None,
) -> KVCacheConfig:
    """The largest number of blocks that every rank can hold and that can ever be used.

    Both sequences are in rank order. `bytes_per_block` covers all layers of a rank; 0 for a rank
    without attention layers. `requested_bytes` is the user's own size, for the right message.

    Raises:
        UnfitError: the measured memory of a rank is too small for one sequence of max_model_len.
        ConfigError: the same for a size that the user gave.
    """
    if len(available_bytes) != len(bytes_per_block) or not available_bytes:
        raise ValueError(f"{len(available_bytes)} sizes for {len(bytes_per_block)} ranks")
    blocks_per_sequence = -(-max_model_len // block_size)
    most_usable = blocks_per_sequence * max_num_seqs
    fitting = [
        max(available, 0) // per_block if per_block > 0 else most_usable
        for available, per_block in zip(available_bytes, bytes_per_block, strict=True)
    ]
    num_blocks = min(*fitting, most_usable)
    if num_blocks < blocks_per_sequence:
        rank = fitting.index(min(fitting))
        raise _too_small(
            rank,
            available=max(available_bytes[rank], 0),
            per_block=bytes_per_block[rank],
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=max_model_len,
            requested_bytes=requested_bytes,
        )
    return KVCacheConfig(num_blocks=num_blocks, block_size=block_size)


def size_argument(num_bytes: int) -> str:
    """At least so many bytes, as a flag takes them: `512`, `13M`, `24G`."""
    for unit, unit_bytes in (("G", 2**30), ("M", 2**20), ("K", 2**10)):
        if num_bytes >= 10 * unit_bytes:
            return f"{-(-num_bytes // unit_bytes)}{unit}"
    return str(num_bytes)


def _too_small(
    rank: int,
    *,
    available: int,
    per_block: int,
    num_blocks: int,
    block_size: int,
    max_model_len: int,
    requested_bytes: int | None,
) -> ConfigError | UnfitError:
    needed = -(-max_model_len // block_size) * per_block
    message = (
        f"a sequence of max_model_len={max_model_len} tokens needs {_mib(needed)} of KV cache, "
        f"rank {rank} has {_mib(available)} ({num_blocks} blocks of {block_size} tokens, "
        f"{per_block} bytes each)"
    )
    ways = []
    if num_blocks > 0:
        ways.append(f"--max-model-len {num_blocks * block_size} or less")
    if requested_bytes is not None:
        ways.append(f"--kv-cache-memory {size_argument(needed)} or more")
        return ConfigError(message, hint=" or ".join(ways))
    ways.append(f"free memory, and --kv-cache-memory {size_argument(needed)} where it is there")
    return UnfitError(message, hint=", or ".join(ways))


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
