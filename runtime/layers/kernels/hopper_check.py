"""Whether this GPU attends by the kernels for Hopper: where they exist and give right numbers.

Both are tried against float32 before anything is served.
"""

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from vcli.runtime.layers.kernels.decode_attention import paged_decode
from vcli.runtime.layers.kernels.decode_plan import DecodeTuning, DecodeWorkspace, plan_decode
from vcli.runtime.layers.kernels.prefill_attention import paged_prefill

logger = logging.getLogger(__name__)

#: Major number of the capability: its instructions exist nowhere else.
HOPPER = 9
NUM_KV_HEADS = 2
#: A single token, pages that end within a tile, and a context of several splits.
SEQ_LENS = (1, 133, 700)
#: The last of them that are queries of a prefill: rows of several tiles, and a cached context.
QUERY_LENS = (1, 133, 200)
#: Of the norms, against float32: weights are rounded to 8 bits of mantissa.
MOST_ERROR = 1e-2


@dataclass(frozen=True, slots=True)
class AttentionSizes:
    """What a kernel is compiled for; `group` query heads share a kv head."""

    group: int
    head_size: int
    block_size: int
    dtype: torch.dtype
    device: torch.device


@functools.cache
def decodes_by_pages(sizes: AttentionSizes) -> bool:
    """Compiles and tries the kernel the first time, which waits for the device.

    A kernel that fails or is wrong is named in the log, and not used.
    """

    def measure() -> float | None:
        from vcli.runtime.layers.kernels.decode_hopper import can_decode

        if not can_decode(sizes.group, sizes.head_size, sizes.block_size):
            return None
        return _decode_error(sizes)

    return _is_right("decode", sizes.device, measure)


@functools.cache
def prefills_by_pages(sizes: AttentionSizes) -> bool:
    """As `decodes_by_pages`."""

    def measure() -> float | None:
        from vcli.runtime.layers.kernels.prefill_hopper import can_prefill

        if not can_prefill(sizes.head_size, sizes.block_size):
            return None
        return _prefill_error(sizes)

    return _is_right("prefill", sizes.device, measure)


def _is_right(name: str, device: torch.device, measure: Callable[[], float | None]) -> bool:
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != HOPPER:
        return False
    try:
        error = measure()
    except Exception as failure:  # noqa: BLE001 - the compiler's own errors have no common base
        logger.warning(
            "the %s attention for Hopper GPUs does not run with this Triton, "
            "the one for all GPUs is used: %s",
            name,
            str(failure) or repr(failure),
        )
        return False
    if error is None:
        return False
    if not error <= MOST_ERROR:
        logger.warning(
            "the %s attention for Hopper GPUs is wrong here by %.2g (limit %.2g), "
            "the one for all GPUs is used",
            name,
            error,
            MOST_ERROR,
        )
        return False
    return True


@dataclass(frozen=True, slots=True)
class _Contexts:
    """Random contexts in scattered pages; whatever no request owns is NaN."""

    values: torch.Tensor
    """(2, requests, tokens, kv heads, head size), on the CPU."""
    cache: torch.Tensor
    tables: torch.Tensor
    seq_lens: torch.Tensor
    rows: torch.Tensor

    @classmethod
    def random(cls, sizes: AttentionSizes) -> "_Contexts":
        generator = torch.Generator().manual_seed(0)
        num_requests, num_blocks = len(SEQ_LENS), -(-max(SEQ_LENS) // sizes.block_size)
        tail = (NUM_KV_HEADS, sizes.head_size)
        values = torch.randn(
            (2, num_requests, num_blocks * sizes.block_size, *tail), generator=generator
        )
        for request, length in enumerate(SEQ_LENS):
            values[:, request, length:] = float("nan")
        values = values.to(sizes.dtype)
        tables = torch.randperm(num_requests * num_blocks, generator=generator)
        pages = values.view(2, num_requests * num_blocks, sizes.block_size, *tail)
        cache = torch.empty_like(pages)
        cache[:, tables] = pages
        return cls(
            values=values,
            cache=cache.to(sizes.device),
            tables=tables.int().view(num_requests, num_blocks).to(sizes.device),
            seq_lens=torch.tensor(SEQ_LENS, dtype=torch.int32, device=sizes.device),
            rows=torch.arange(num_requests, dtype=torch.int32, device=sizes.device),
        )


def _decode_error(sizes: AttentionSizes) -> float:
    """Norm of the difference to float32 over the norm."""
    contexts = _Contexts.random(sizes)
    num_heads = sizes.group * NUM_KV_HEADS
    query = _random_queries(len(SEQ_LENS), sizes)
    tuning = DecodeTuning(tile=64, num_stages=2, num_programs=8, by_pages=True)
    workspace = DecodeWorkspace(
        len(SEQ_LENS), num_heads, NUM_KV_HEADS, sizes.head_size, sizes.device, tuning
    )
    plan = workspace.plan(len(SEQ_LENS))
    plan_decode(plan, contexts.rows, contexts.seq_lens)
    scale = sizes.head_size**-0.5
    output = paged_decode(query.to(sizes.device), contexts.cache, contexts.tables, plan, scale)
    return _error(output, query, [1] * len(SEQ_LENS), contexts, scale)


def _prefill_error(sizes: AttentionSizes) -> float:
    contexts = _Contexts.random(sizes)
    query = _random_queries(sum(QUERY_LENS), sizes)
    starts = torch.tensor([0, *QUERY_LENS]).cumsum(0).int().to(sizes.device)
    scale = sizes.head_size**-0.5
    output = paged_prefill(
        query.to(sizes.device),
        contexts.cache,
        contexts.tables,
        contexts.rows,
        starts,
        contexts.seq_lens,
        max(QUERY_LENS),
        scale,
        by_pages=True,
    )
    return _error(output, query, QUERY_LENS, contexts, scale)


def _random_queries(num_tokens: int, sizes: AttentionSizes) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    shape = (num_tokens, sizes.group * NUM_KV_HEADS, sizes.head_size)
    return torch.randn(shape, generator=generator).to(sizes.dtype)


def _error(
    output: torch.Tensor,
    query: torch.Tensor,
    query_lens: tuple[int, ...] | list[int],
    contexts: _Contexts,
    scale: float,
) -> float:
    expected, first = [], 0
    for request, (count, length) in enumerate(zip(query_lens, SEQ_LENS, strict=True)):
        keys, values = contexts.values[:, request, :length]
        for token in range(count):
            seen = length - count + token + 1
            expected.append(_attention(query[first + token], keys[:seen], values[:seen], scale))
        first += count
    reference = torch.stack(expected)
    return float((output.cpu().float() - reference).norm() / reference.norm())


def _attention(
    query_HE: torch.Tensor, keys_LKE: torch.Tensor, values_LKE: torch.Tensor, scale: float
) -> torch.Tensor:
    """(H, E) float32."""
    num_heads, head_size = query_HE.shape
    query_KGE = query_HE.float().view(NUM_KV_HEADS, -1, head_size)
    scores = torch.einsum("kge,lke->kgl", query_KGE, keys_LKE.float()) * scale
    output = torch.einsum("kgl,lke->kge", scores.softmax(-1), values_LKE.float())
    return output.reshape(num_heads, head_size)
