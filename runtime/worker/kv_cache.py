"""The KV cache tensors of one rank: one for each of its decoder layers.

Layout of each: (2, num_blocks + 1, block_size, kv heads, head size). The scheduler gives out the
first `num_blocks`; the last one is the scratch block that dummy steps write to, so that they may
run while requests hold all the others.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch

from vcli.runtime.layers.attention import Attention
from vcli.topology.errors import UnfitError


def kv_bytes_per_block(layers: Sequence[Attention], block_size: int, dtype: torch.dtype) -> int:
    """Bytes that one block takes on this rank, keys and values of all its layers."""
    numbers = sum(2 * layer.num_kv_heads * layer.head_size for layer in layers)
    return numbers * block_size * dtype.itemsize


def allocate_kv_caches(
    layers: Sequence[Attention],
    *,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> list[torch.Tensor]:
    """Zeroed caches with `num_blocks` blocks and the scratch block.

    Zeroed, because attention may multiply a slot that was never written with a weight of 0, and
    0 * NaN is NaN.

    Raises:
        UnfitError: the device has not that much memory.
    """
    try:
        return [
            _zeros(
                (2, num_blocks + 1, block_size, layer.num_kv_heads, layer.head_size),
                dtype,
                device,
            )
            for layer in layers
        ]
    except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
        size = kv_bytes_per_block(layers, block_size, dtype) * (num_blocks + 1)
        raise UnfitError(
            f"{device} has no {size / 2**30:.1f} GiB for {num_blocks} KV blocks: {error}",
            hint="lower --kv-cache-memory"
            + (" or --gpu-memory-utilization" if device.type == "cuda" else ""),
        ) from error


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on a CPU a page of them takes memory only once it is written.

    torch.zeros writes every page at once: seconds, and a quarter of the machine, for a cache that
    may never fill. numpy asks the kernel for pages that are zero when they are touched.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(shape)
