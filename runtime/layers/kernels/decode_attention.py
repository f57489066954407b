# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: ANN001, ANN202, PLR0917
"""Attention of one query token per request over the paged cache, bound by memory bandwidth.

A program takes one kv head of one request and one split of its context: the G query heads are the
rows of the tile, so keys and values are read once. Splits are chosen from the number of requests
alone; each program finds its tokens from the length on the device, and those without any leave.
The last program of a kv head to finish merges the splits: there is no second kernel.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vcli.runtime.layers.kernels.launch import LINE, pdl_options, prefetch_lines, wait_for_previous

#: Rows of the smallest matrix tile.
MIN_ROWS = 16
MAX_SPLITS = 64
#: Splits that are loaded together when they are merged.
MAX_MERGED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTuning:
    """Tokens of a tile, warps, pipeline stages, fewest tokens of a split, programs to aim at."""

    tile: int = 64
    num_warps: int = 4
    num_stages: int = 3
    min_split_tokens: int = 128
    num_programs: int = 1056
    prefetches: bool = True
    """Whether the first tile is fetched while the kernel before it ends."""

    def num_splits(self, num_requests: int, num_kv_heads: int) -> int:
        """A power of two, so that few graphs differ in more than their grid."""
        wanted = self.num_programs / max(num_requests * num_kv_heads, 1)
        return min(1 << max(math.ceil(math.log2(wanted)), 0), MAX_SPLITS)


#: Measured on H200 within layers of heads of 128: for few contexts, and for all others.
FEW_TUNING = DecodeTuning(tile=128, num_warps=4, num_stages=3, num_programs=1056)
MANY_TUNING = DecodeTuning(tile=16, num_warps=1, num_stages=5, num_programs=264)
#: Most pairs of a request and a kv head that are few.
FEW_CONTEXTS = 32


def tuning_for(num_requests: int, num_kv_heads: int) -> DecodeTuning:
    """The fastest known for so many contexts."""
    return FEW_TUNING if num_requests * num_kv_heads <= FEW_CONTEXTS else MANY_TUNING


class DecodeWorkspace:
    """Unmerged splits of up to `max_num_seqs` requests. One step at a time may use it."""

    def __init__(
        self,
        max_num_seqs: int,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        device: torch.device | str,
        tuning: DecodeTuning | None = None,
    ) -> None:
        """Without `tuning` each number of requests has its own."""
        self._tuning = tuning
        most_splits = max(
            num_requests
            * self.tuning(num_requests, num_kv_heads).num_splits(num_requests, num_kv_heads)
            for num_requests in range(1, max_num_seqs + 1)
        )
        self.partial = torch.empty(most_splits * num_heads * head_size, device=device)
        self.partial_lse = torch.empty(most_splits * num_heads, device=device)
        # Splits that have finished. Each launch leaves zeros behind.
        self.tickets = torch.zeros(max_num_seqs * num_kv_heads, dtype=torch.int32, device=device)

    def tuning(self, num_requests: int, num_kv_heads: int) -> DecodeTuning:
        """What a step of so many requests uses."""
        return self._tuning or tuning_for(num_requests, num_kv_heads)


@triton.jit
def _merge_splits(
    partial, partial_lse, output, num_splits,
    G: tl.constexpr, GROUP: tl.constexpr, E: tl.constexpr, MERGED: tl.constexpr,
):  # fmt: skip
    """Pointers are those of the kv head's first split and first query head."""
    head = tl.arange(0, GROUP)
    # Rows beyond G repeat the last one: they stay finite and are not stored.
    real_head = tl.minimum(head, G - 1)
    element = tl.arange(0, E)
    highest = tl.full([GROUP], float("-inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    merged = tl.zeros([GROUP, E], tl.float32)
    for first in range(0, num_splits, MERGED):
        split = first + tl.arange(0, MERGED)
        is_split = split < num_splits
        row = split[:, None] * G + real_head[None, :]
        lse = tl.load(
            partial_lse + row, mask=is_split[:, None], other=float("-inf"), cache_modifier=".cg"
        )
        parts = tl.load(
            partial + row[:, :, None] * E + element[None, None, :],
            mask=is_split[:, None, None],
            other=0.0,
            cache_modifier=".cg",
        )
        new_highest = tl.maximum(highest, tl.max(lse, axis=0))
        weight = tl.exp2(lse - new_highest[None, :])
        old_weight = tl.exp2(highest - new_highest)
        merged = merged * old_weight[:, None] + tl.sum(parts * weight[:, :, None], axis=0)
        total = total * old_weight + tl.sum(weight, axis=0)
        highest = new_highest
    result = (merged / total[:, None]).to(output.dtype.element_ty)
    tl.store(output + head[:, None] * E + element[None, :], result, mask=(head < G)[:, None])


@triton.jit
def _attend(
    q, keys, values, table, start, end, log2_scale, block_stride, slot_stride,
    ROWS: tl.constexpr, E: tl.constexpr, S: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Attention to tokens [start, end), divided by the total; log2 of the total.

    Block ids are loaded one tile before their keys and values: addresses that hang on a load of
    the same round would halve the depth of the pipeline.
    """
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    summed = tl.zeros([ROWS, E], tl.float32)
    token = start + tl.arange(0, TILE)
    block = tl.load(table + token // S, mask=token < end, other=0)
    for first in range(start, end, TILE):
        token = first + tl.arange(0, TILE)
        is_context = token < end
        slot = block.to(tl.int64) * block_stride + (token % S) * slot_stride
        ahead = token + TILE
        block = tl.load(table + ahead // S, mask=ahead < end, other=0)
        key = tl.load(keys + slot[:, None], mask=is_context[:, None], other=0.0)
        score = tl.dot(q, tl.trans(key)) * log2_scale
        score = tl.where(is_context[None, :], score, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(score, axis=1))
        weight = tl.exp2(score - new_highest[:, None])
        old_weight = tl.exp2(highest - new_highest)
        total = total * old_weight + tl.sum(weight, axis=1)
        # Never-written slots may hold NaN, which a weight of 0 would not take away.
        value = tl.load(values + slot[:, None], mask=is_context[:, None], other=0.0)
        summed = tl.dot(weight.to(value.dtype), value, summed * old_weight[:, None])
        highest = new_highest
    # Without tokens nothing is summed, and the output of padding becomes zero.
    divisor = tl.where(total == 0.0, 1.0, total)
    return summed / divisor[:, None], highest + tl.log2(divisor)


@triton.jit
def _prefetch(
    keys, values, table, start, end, block_stride, slot_stride,
    E: tl.constexpr, S: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Starts to bring the first tile of keys and values into the L2 cache."""
    token = start + tl.arange(0, TILE)
    # Tokens behind the end are replaced by the first: nothing is fetched twice.
    token = tl.where(token < end, token, start)
    block = tl.load(table + token // S).to(tl.int64)
    slot = block * block_stride + (token % S) * slot_stride
    line = tl.arange(0, E // LINE)[None, :] * LINE
    prefetch_lines(keys + slot[:, None] + line)
    prefetch_lines(values + slot[:, None] + line)


@triton.jit(do_not_specialize=["num_splits"])
def _decode_kernel(
    query, kv_cache, block_tables, rows, seq_lens, output, partial, partial_lse, tickets,
    log2_scale, num_splits, table_stride, kv_stride, block_stride, slot_stride, head_stride,
    G: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, E: tl.constexpr, S: tl.constexpr,
    TILE: tl.constexpr, MIN_SPLIT: tl.constexpr, MERGED: tl.constexpr, PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    request = tl.program_id(2)
    group = (request * tl.num_programs(0) + kv_head).to(tl.int64)

    seq_len = tl.load(seq_lens + request)
    split_tokens = tl.cdiv(tl.cdiv(seq_len, num_splits), TILE) * TILE
    split_tokens = tl.maximum(split_tokens, MIN_SPLIT)
    start = split * split_tokens
    end = tl.minimum(start + split_tokens, seq_len)
    if (split > 0) & (start >= seq_len):
        wait_for_previous(PDL)
        return
    table = block_tables + tl.load(rows + request).to(tl.int64) * table_stride
    keys = kv_cache + kv_head.to(tl.int64) * head_stride
    if PDL and PREFETCH:
        # Of all that is read here, the kernel before this one writes the query and one token.
        _prefetch(keys, keys + kv_stride, table, start, end, block_stride, slot_stride, E, S, TILE)
    wait_for_previous(PDL)

    head = tl.arange(0, ROWS)
    is_head = head < G
    element = tl.arange(0, E)[None, :]
    query_offset = (group * G + head)[:, None] * E + element
    q = tl.load(query + query_offset, mask=is_head[:, None], other=0.0)
    keys += element
    result, lse = _attend(
        q, keys, keys + kv_stride, table, start, end, log2_scale, block_stride, slot_stride,
        ROWS, E, S, TILE,
    )  # fmt: skip

    num_filled = tl.cdiv(seq_len, split_tokens)
    if num_filled <= 1:
        rounded = result.to(output.dtype.element_ty)
        tl.store(output + query_offset, rounded, mask=is_head[:, None])
    else:
        first_row = group * num_splits * G
        row = first_row + split * G + head
        tl.store(partial + row[:, None] * E + element, result, mask=is_head[:, None])
        tl.store(partial_lse + row, lse, mask=is_head)
        # All threads have stored before one of them releases the stores with the ticket.
        tl.debug_barrier()
        ticket = tl.atomic_add(tickets + group, 1, sem="acq_rel", scope="gpu")
        if ticket == num_filled - 1:
            tl.store(tickets + group, 0)
            _merge_splits(
                partial + first_row * E, partial_lse + first_row, output + group * G * E,
                num_filled, G, GROUP, E, MERGED,
            )  # fmt: skip


def paged_decode(
    query_RHE: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    rows_R: torch.Tensor,
    seq_lens_R: torch.Tensor,
    scale: float,
    workspace: DecodeWorkspace,
) -> torch.Tensor:
    """(R, H, E). Request i has row `rows_R[i]` of `block_tables` (max rows, max blocks) int32.

    Its context, the token of this step included, is `seq_lens_R[i]` (int32) tokens; at 0 its
    output is zero.
    """
    num_requests, num_heads, head_size = query_RHE.shape
    num_kv_heads = kv_cache.shape[3]
    group = num_heads // num_kv_heads
    tuning = workspace.tuning(num_requests, num_kv_heads)
    assert query_RHE.is_contiguous()
    assert kv_cache.stride(4) == 1
    assert block_tables.stride(1) == 1
    assert num_requests * num_kv_heads <= len(workspace.tickets), "more requests than max_num_seqs"
    output_RHE = torch.empty_like(query_RHE)
    if not num_requests:
        return output_RHE
    num_splits = tuning.num_splits(num_requests, num_kv_heads)
    padded_group = triton.next_power_of_2(group)
    merged = tuning.num_warps * 1024 // (padded_group * head_size)
    _decode_kernel[(num_kv_heads, num_splits, num_requests)](
        query_RHE, kv_cache, block_tables, rows_R, seq_lens_R, output_RHE,
        workspace.partial, workspace.partial_lse, workspace.tickets,
        scale / math.log(2.0), num_splits, block_tables.stride(0), *kv_cache.stride()[:4],
        G=group,
        GROUP=padded_group,
        ROWS=max(padded_group, MIN_ROWS),
        E=head_size,
        S=kv_cache.shape[2],
        TILE=tuning.tile,
        MIN_SPLIT=tuning.min_split_tokens,
        MERGED=min(max(merged, 1), MAX_MERGED),
        PREFETCH=tuning.prefetches and head_size >= LINE.value,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        **pdl_options(),
    )  # fmt: skip
    return output_RHE
