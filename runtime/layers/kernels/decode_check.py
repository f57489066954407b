"""Whether this GPU decodes by `decode_hopper`: where its kernel exists and gives right numbers."""

import functools
import logging

import torch

from vcli.runtime.layers.kernels.decode_attention import paged_decode
from vcli.runtime.layers.kernels.decode_plan import DecodeTuning, DecodeWorkspace, plan_decode

logger = logging.getLogger(__name__)

#: Major number of the capability: its instructions exist nowhere else.
HOPPER = 9
NUM_KV_HEADS = 2
#: A single token, pages that end within a tile, and a context of several splits.
SEQ_LENS = (1, 133, 700)
#: Of the norms, against float32: weights are rounded to 8 bits of mantissa.
MOST_ERROR = 1e-2


@functools.cache
def decodes_by_pages(
    group: int, head_size: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> bool:
    """Compiles and tries the kernel the first time, which waits for the device.

    `group` query heads share a kv head. A kernel that fails or is wrong is named in the log, and
    not used.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != HOPPER:
        return False
    try:
        from vcli.runtime.layers.kernels.decode_hopper import can_decode

        if not can_decode(group, head_size, block_size):
            return False
        error = _error(group, head_size, block_size, dtype, device)
    except Exception as failure:  # the compiler's own errors have no common base
        logger.warning(
            "the decode attention for Hopper GPUs does not run with this Triton, "
            "the one for all GPUs is used: %s",
            str(failure) or repr(failure),
        )
        return False
    if not error <= MOST_ERROR:
        logger.warning(
            "the decode attention for Hopper GPUs is wrong here by %.2g (limit %.2g), "
            "the one for all GPUs is used",
            error,
            MOST_ERROR,
        )
        return False
    return True


def _error(
    group: int, head_size: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> float:
    """Norm of the difference to float32 over the norm."""
    generator = torch.Generator().manual_seed(0)
    num_requests, num_heads = len(SEQ_LENS), group * NUM_KV_HEADS
    num_blocks = -(-max(SEQ_LENS) // block_size)
    tables = torch.randperm(num_requests * num_blocks, generator=generator, dtype=torch.int32)
    tables = tables.view(num_requests, num_blocks)
    shape = (2, num_requests * num_blocks, block_size, NUM_KV_HEADS, head_size)
    contexts = torch.randn(
        (2, num_requests, num_blocks * block_size, NUM_KV_HEADS, head_size), generator=generator
    )
    for request, length in enumerate(SEQ_LENS):
        contexts[:, request, length:] = float("nan")
    contexts = contexts.to(dtype)
    cache = torch.empty(shape, dtype=dtype)
    cache[:, tables.flatten().long()] = contexts.view(shape)
    query = torch.randn((num_requests, num_heads, head_size), generator=generator).to(dtype)

    tuning = DecodeTuning(tile=64, num_stages=2, num_programs=8, by_pages=True)
    workspace = DecodeWorkspace(num_requests, num_heads, NUM_KV_HEADS, head_size, device, tuning)
    plan = workspace.plan(num_requests)
    plan_decode(
        plan,
        torch.arange(num_requests, dtype=torch.int32, device=device),
        torch.tensor(SEQ_LENS, dtype=torch.int32, device=device),
    )
    scale = head_size**-0.5
    output = paged_decode(query.to(device), cache.to(device), tables.to(device), plan, scale)
    expected = torch.stack(
        [
            _attention(
                query[request], contexts[0, request, :length], contexts[1, request, :length], scale
            )
            for request, length in enumerate(SEQ_LENS)
        ]
    )
    difference = output.cpu().float() - expected
    return float(difference.norm() / expected.norm())


def _attention(
    query_HE: torch.Tensor, keys_LKE: torch.Tensor, values_LKE: torch.Tensor, scale: float
) -> torch.Tensor:
    """(H, E) float32."""
    num_heads, head_size = query_HE.shape
    query_KGE = query_HE.float().view(NUM_KV_HEADS, -1, head_size)
    scores = torch.einsum("kge,lke->kgl", query_KGE, keys_LKE.float()) * scale
    output = torch.einsum("kgl,lke->kge", scores.softmax(-1), values_LKE.float())
    return output.reshape(num_heads, head_size)
