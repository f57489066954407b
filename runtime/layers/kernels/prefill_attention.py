# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: ANN001, ANN202, PLR0917
"""Causal attention of several query tokens per request over the paged cache.

A program takes one tile of query rows of one kv head of one request. A row is a pair of query
token and query head, the G heads of a token being neighbours: keys and values are read once for
all of them, and requests with few query tokens fill their tile better.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vcli.runtime.layers.kernels.launch import (
    LayerLaunches,
    ceil_div,
    pdl_options,
    wait_for_previous,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillTuning:
    """Query rows and context tokens of a tile, warps, pipeline stages."""

    rows: int
    tile: int
    num_warps: int
    num_stages: int


MANY_ROWS = PrefillTuning(rows=128, tile=64, num_warps=8, num_stages=3)
FEW_ROWS = PrefillTuning(rows=64, tile=64, num_warps=4, num_stages=3)
LARGE_HEADS = PrefillTuning(rows=128, tile=32, num_warps=8, num_stages=3)


def choose_tuning(num_rows: int, head_size: int) -> PrefillTuning:
    """For requests of at most `num_rows` query rows."""
    if head_size > 128:
        return LARGE_HEADS
    return FEW_ROWS if num_rows <= FEW_ROWS.rows else MANY_ROWS


@triton.jit
def _attend(
    q, keys, values, table, position, highest, total, summed, begin, end, context_len,
    log2_scale, block_stride, slot_stride,
    S: tl.constexpr, TILE: tl.constexpr, IS_EDGE: tl.constexpr,
):  # fmt: skip
    """Adds context tokens [begin, end); only at the edge may some be invisible to a row.

    Block ids are loaded one tile before their keys and values: addresses that hang on a load of
    the same round would halve the depth of the pipeline.
    """
    token = begin + tl.arange(0, TILE)
    block = tl.load(table + token // S, mask=token < context_len, other=0)
    for first in range(begin, end, TILE):
        token = first + tl.arange(0, TILE)
        slot = block.to(tl.int64) * block_stride + (token % S) * slot_stride
        ahead = token + TILE
        block = tl.load(table + ahead // S, mask=ahead < context_len, other=0)
        if IS_EDGE:
            is_context = token < context_len
            key = tl.load(keys + slot[:, None], mask=is_context[:, None], other=0.0)
            value = tl.load(values + slot[:, None], mask=is_context[:, None], other=0.0)
        else:
            key = tl.load(keys + slot[:, None])
            value = tl.load(values + slot[:, None])
        score = tl.dot(q, tl.trans(key)) * log2_scale
        if IS_EDGE:
            score = tl.where(token[None, :] <= position[:, None], score, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(score, axis=1))
        weight = tl.exp2(score - new_highest[:, None])
        old_weight = tl.exp2(highest - new_highest)
        total = total * old_weight + tl.sum(weight, axis=1)
        summed = tl.dot(weight.to(value.dtype), value, summed * old_weight[:, None])
        highest = new_highest
    return highest, total, summed


@triton.jit(do_not_specialize=["skip_begin", "num_skipped", "table_stride"])
def _prefill_kernel(
    query, kv_cache, block_tables, rows, query_start_loc, seq_lens, output, log2_scale,
    skip_begin, num_skipped, table_stride, kv_stride, block_stride, slot_stride, head_stride,
    G: tl.constexpr, K: tl.constexpr, E: tl.constexpr, S: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    # The last tiles see most context: they start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    request = tl.program_id(2)
    request += tl.where(request >= skip_begin, num_skipped, 0)
    query_begin = tl.load(query_start_loc + request)
    query_len = tl.load(query_start_loc + request + 1) - query_begin
    if tile * ROWS >= query_len * G:
        return

    row = tile * ROWS + tl.arange(0, ROWS)
    is_row = (row < query_len * G)[:, None]
    element = tl.arange(0, E)[None, :]
    head = (query_begin + row // G).to(tl.int64) * (K * G) + kv_head * G + row % G
    query_offset = head[:, None] * E + element
    q = tl.load(query + query_offset, mask=is_row, other=0.0)

    seq_len = tl.load(seq_lens + request)
    num_cached = seq_len - query_len
    position = num_cached + row // G
    # All rows see the tokens before `full_end`, none those from `visible_end` on.
    full_end = (num_cached + tile * ROWS // G + 1) // TILE * TILE
    visible_end = tl.minimum(num_cached + (tile * ROWS + ROWS - 1) // G + 1, seq_len)
    table = block_tables + tl.load(rows + request).to(tl.int64) * table_stride
    keys = kv_cache + kv_head.to(tl.int64) * head_stride + element
    values = keys + kv_stride

    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    summed = tl.zeros([ROWS, E], tl.float32)
    highest, total, summed = _attend(
        q, keys, values, table, position, highest, total, summed, 0, full_end, seq_len,
        log2_scale, block_stride, slot_stride, S, TILE, False,
    )  # fmt: skip
    highest, total, summed = _attend(
        q, keys, values, table, position, highest, total, summed, full_end, visible_end, seq_len,
        log2_scale, block_stride, slot_stride, S, TILE, True,
    )  # fmt: skip
    result = (summed / total[:, None]).to(output.dtype.element_ty)
    tl.store(output + query_offset, result, mask=is_row)


def paged_prefill(
    query_THE: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    rows_R: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens_R: torch.Tensor,
    max_query_len: int,
    scale: float,
    *,
    out: torch.Tensor | None = None,
    skipped: range = range(0),
    tuning: PrefillTuning | None = None,
    by_pages: bool = False,
    launches: LayerLaunches | None = None,
) -> torch.Tensor:
    """(T, H, E), in `out` where one is given; rows of other tokens are left as they are.

    Request i has query tokens [`query_start_loc[i]`, `query_start_loc[i + 1]`), the last of its
    `seq_lens_R[i]` context tokens, and row `rows_R[i]` of `block_tables`. All are int32.
    Requests in `skipped` are left out. `by_pages`: by `prefill_hopper`, where the cache is
    contiguous.
    """
    num_heads, head_size = query_THE.shape[1:]
    num_kv_heads, num_requests = kv_cache.shape[3], len(seq_lens_R)
    group = num_heads // num_kv_heads
    assert query_THE.is_contiguous()
    assert kv_cache.stride(4) == 1
    assert block_tables.stride(1) == 1
    output_THE = torch.empty_like(query_THE) if out is None else out
    assert output_THE.is_contiguous()
    if num_requests == len(skipped) or not max_query_len:
        return output_THE
    if by_pages and kv_cache.is_contiguous():
        from vcli.runtime.layers.kernels.prefill_hopper import paged_prefill_hopper

        paged_prefill_hopper(
            query_THE, kv_cache, block_tables, rows_R, query_start_loc, seq_lens_R,
            max_query_len, scale, output_THE, skipped, launches or LayerLaunches(),
        )  # fmt: skip
        return output_THE
    num_rows = max_query_len * group
    tuning = tuning or choose_tuning(num_rows, head_size)
    _prefill_kernel[
        (ceil_div(num_rows, tuning.rows), num_kv_heads, num_requests - len(skipped))
    ](
        query_THE, kv_cache, block_tables, rows_R, query_start_loc, seq_lens_R, output_THE,
        scale / math.log(2.0), skipped.start, len(skipped),
        block_tables.stride(0), *kv_cache.stride()[:4],
        G=group,
        K=num_kv_heads,
        E=head_size,
        S=kv_cache.shape[2],
        ROWS=tuning.rows,
        TILE=tuning.tile,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        **pdl_options(),
    )  # fmt: skip
    return output_THE
