# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: ANN001, ANN202, PLR0917
"""Attention of one query token per request over the paged cache, bound by memory bandwidth.

A program takes one kv head of one item: of a request's context, or of a split of it. The G query
heads are the rows of the tile, so keys and values are read once. The last program of a kv head to
finish merges the splits: there is no second kernel. Which items there are is planned on the
device, by `decode_plan`.
"""

import math

import torch
import triton
import triton.language as tl

from vcli.runtime.layers.kernels.decode_plan import COUNT, END, FIRST, ROW, START, DecodePlan
from vcli.runtime.layers.kernels.launch import (
    LINE,
    LayerLaunches,
    next_power_of_2,
    pdl_options,
    prefetch_lines,
    wait_for_previous,
)

#: Rows of the smallest matrix tile.
MIN_ROWS = 16
#: Splits that are loaded together when they are merged.
MAX_MERGED = 8


@triton.jit
def _merge_splits(
    partial, partial_lse, output, num_splits, split_rows,
    G: tl.constexpr, GROUP: tl.constexpr, E: tl.constexpr, MERGED: tl.constexpr,
):  # fmt: skip
    """Pointers are those of the kv head's first split and first query head.

    From one split to the next it is `split_rows` rows.
    """
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
        row = split[:, None] * split_rows + real_head[None, :]
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


@triton.jit(do_not_specialize=["num_items", "table_stride"])
def _decode_kernel(
    query, kv_cache, block_tables, work, output, partial, partial_lse, tickets,
    log2_scale, num_items, table_stride, kv_stride, block_stride, slot_stride, head_stride,
    G: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, E: tl.constexpr, S: tl.constexpr,
    TILE: tl.constexpr, MERGED: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
    ROW: tl.constexpr, START: tl.constexpr, END: tl.constexpr, FIRST: tl.constexpr,
    COUNT: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0)
    num_kv_heads = tl.num_programs(0)
    item = tl.program_id(1)
    # Nothing to wait for: no kernel starts before the plan is there.
    work += item
    request = tl.load(work)
    row = tl.load(work + ROW * num_items)
    start = tl.load(work + START * num_items)
    end = tl.load(work + END * num_items)
    first = tl.load(work + FIRST * num_items)
    count = tl.load(work + COUNT * num_items)
    if request < 0:
        wait_for_previous(PDL)
        return
    table = block_tables + row.to(tl.int64) * table_stride
    keys = kv_cache + kv_head.to(tl.int64) * head_stride
    if PDL and PREFETCH:
        # Of all that is read here, the kernel before this one writes the query and one token.
        _prefetch(keys, keys + kv_stride, table, start, end, block_stride, slot_stride, E, S, TILE)
    wait_for_previous(PDL)

    head = tl.arange(0, ROWS)
    is_head = head < G
    element = tl.arange(0, E)[None, :]
    group = (request * num_kv_heads + kv_head).to(tl.int64)
    query_offset = (group * G + head)[:, None] * E + element
    q = tl.load(query + query_offset, mask=is_head[:, None], other=0.0)
    keys += element
    result, lse = _attend(
        q, keys, keys + kv_stride, table, start, end, log2_scale, block_stride, slot_stride,
        ROWS, E, S, TILE,
    )  # fmt: skip

    if count <= 1:
        rounded = result.to(output.dtype.element_ty)
        tl.store(output + query_offset, rounded, mask=is_head[:, None])
    else:
        first_row = (first.to(tl.int64) * num_kv_heads + kv_head) * G
        own_row = (item.to(tl.int64) * num_kv_heads + kv_head) * G + head
        tl.store(partial + own_row[:, None] * E + element, result, mask=is_head[:, None])
        tl.store(partial_lse + own_row, lse, mask=is_head)
        # All threads have stored before one of them releases the stores with the ticket.
        tl.debug_barrier()
        ticket = tl.atomic_add(tickets + group, 1, sem="acq_rel", scope="gpu")
        if ticket == count - 1:
            tl.store(tickets + group, 0)
            _merge_splits(
                partial + first_row * E, partial_lse + first_row, output + group * G * E,
                count, num_kv_heads * G, G, GROUP, E, MERGED,
            )  # fmt: skip


def paged_decode(
    query_RHE: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    plan: DecodePlan,
    scale: float,
    out: torch.Tensor | None = None,
    launches: LayerLaunches | None = None,
) -> torch.Tensor:
    """(R, H, E), in `out` where one is given: the queries that `plan` was made for.

    `block_tables` (max rows, max blocks) int32. The output of a request without context is zero.
    """
    num_requests, num_heads, head_size = query_RHE.shape
    num_kv_heads = kv_cache.shape[3]
    group = num_heads // num_kv_heads
    tuning = plan.tuning
    assert num_requests == plan.num_requests
    assert query_RHE.is_contiguous()
    assert kv_cache.stride(4) == 1
    assert block_tables.stride(1) == 1
    output_RHE = torch.empty_like(query_RHE) if out is None else out
    assert output_RHE.is_contiguous()
    if not num_requests:
        return output_RHE
    if tuning.by_pages and kv_cache.is_contiguous():
        from vcli.runtime.layers.kernels.decode_hopper import paged_decode_hopper

        paged_decode_hopper(
            query_RHE, kv_cache, block_tables, plan, scale, output_RHE,
            launches or LayerLaunches(),
        )  # fmt: skip
        return output_RHE
    padded_group = next_power_of_2(group)
    merged = tuning.num_warps * 1024 // (padded_group * head_size)
    _decode_kernel[(num_kv_heads, plan.num_items)](
        query_RHE, kv_cache, block_tables, plan.work, output_RHE,
        plan.workspace.partial, plan.workspace.partial_lse, plan.workspace.tickets,
        scale / math.log(2.0), plan.num_items, block_tables.stride(0), *kv_cache.stride()[:4],
        G=group,
        GROUP=padded_group,
        ROWS=max(padded_group, MIN_ROWS),
        E=head_size,
        S=kv_cache.shape[2],
        TILE=tuning.tile,
        MERGED=min(max(merged, 1), MAX_MERGED),
        PREFETCH=tuning.prefetches and head_size >= LINE.value,
        ROW=ROW,
        START=START,
        END=END,
        FIRST=FIRST,
        COUNT=COUNT,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        **pdl_options(),
    )  # fmt: skip
    return output_RHE
