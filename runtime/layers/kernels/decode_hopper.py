# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: ANN001, ANN202, PLR0917
"""Decode attention for Hopper GPUs: as `decode_attention`, at the speed of a copy of the context.

One warp has the tensor memory accelerator bring whole pages of keys and values, and waits for the
kernel before this one only where it reads the token that this step wrote. Four warps multiply
what has come straight from shared memory: a tile of 64 keys is the left side, the query heads are
the columns, so few of the products are wasted and no key passes a register.

Written in Gluon, whose layouts are those of the instructions: `wgmma` and `mbarrier` of the PTX
manual, chapters 9.7.15 and 9.7.13.
"""

import math

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from vcli.runtime.layers.kernels.decode_plan import COUNT, END, FIRST, ROW, START, DecodePlan
from vcli.runtime.layers.kernels.gluon_names import thread_barrier
from vcli.runtime.layers.kernels.launch import LayerLaunches, next_power_of_2, pdl_options
from vcli.runtime.layers.kernels.page_fetch import (
    CHUNK,
    DESCRIPTORS,
    FETCH_REGISTERS,
    fetch_pages,
    forget_unwritten,
    next_stage,
    page_pieces,
)

#: Tokens of a tile: the rows of one `wgmma`.
TILE = 64
NUM_WARPS = 4
#: Of a thread, so that two programs share a multiprocessor.
REGISTERS = 96
#: Columns of the smallest `wgmma`, and most that leave registers for the sums.
MIN_ROWS, MAX_ROWS = 8, 32
HEAD_SIZES = (64, 128, 256)
#: Values of a thread that are loaded together when splits are merged.
MERGED_VALUES = 32
MAX_MERGED = 8


def can_decode(group: int, head_size: int, block_size: int) -> bool:
    """Whether there is a kernel for `group` query heads of a kv head and such pages."""
    return (
        next_power_of_2(group) <= MAX_ROWS
        and head_size in HEAD_SIZES
        and block_size % 8 == 0
        and TILE % block_size == 0
    )


@gluon.jit
def _merge_splits(
    partial, partial_lse, output, num_splits, split_rows,
    G: gl.constexpr, GROUP: gl.constexpr, E: gl.constexpr, MERGED: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """As in `decode_attention`."""
    cube: gl.constexpr = gl.BlockedLayout([MERGED, 1, 4], [1, 1, 32], [1, num_warps, 1], [2, 1, 0])
    by_head: gl.constexpr = gl.SliceLayout(2, cube)
    heads: gl.constexpr = gl.SliceLayout(0, by_head)
    plane: gl.constexpr = gl.SliceLayout(0, cube)
    rows: gl.constexpr = gl.SliceLayout(1, plane)
    # Rows beyond G repeat the last one: they stay finite and are not stored.
    real_head = gl.minimum(gl.arange(0, GROUP, heads), G - 1)
    element = gl.arange(0, E, gl.SliceLayout(0, gl.SliceLayout(1, cube)))
    highest = gl.full([GROUP], float("-inf"), gl.float32, heads)
    total = gl.zeros([GROUP], gl.float32, heads)
    merged = gl.zeros([GROUP, E], gl.float32, plane)
    for first in range(0, num_splits, MERGED):
        split = first + gl.arange(0, MERGED, gl.SliceLayout(1, by_head))
        is_split = (split < num_splits)[:, None]
        row = split[:, None] * split_rows + real_head[None, :]
        lse = gl.load(partial_lse + row, mask=is_split, other=float("-inf"), cache_modifier=".cg")
        place = row[:, :, None] * E + element[None, None, :]
        parts = gl.load(partial + place, mask=is_split[:, :, None], other=0.0, cache_modifier=".cg")
        new_highest = gl.maximum(highest, gl.max(lse, axis=0))
        weight = gl.exp2(lse - new_highest[None, :])
        old_weight = gl.exp2(highest - new_highest)
        added = gl.sum(parts * weight[:, :, None], axis=0)
        merged = merged * gl.convert_layout(old_weight, rows)[:, None] + added
        total = total * old_weight + gl.sum(weight, axis=0)
        highest = new_highest
    result = merged / gl.convert_layout(total, rows)[:, None]
    head = gl.arange(0, GROUP, rows)
    element = gl.arange(0, E, gl.SliceLayout(0, plane))
    place = head[:, None] * E + element[None, :]
    gl.store(output + place, result.to(output.dtype.element_ty), mask=(head < G)[:, None])


@gluon.jit
def _finish(
    summed, total, highest, output, partial, partial_lse, tickets, item, first_item, count, group,
    num_kv_heads, kv_head, head,
    layout: gl.constexpr, G: gl.constexpr, GROUP: gl.constexpr, E: gl.constexpr,
    MERGED: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Stores the result of a whole context, or of a split, which the last split merges."""
    # Without tokens nothing is summed, and the output of padding becomes zero.
    divisor = gl.sum(total, axis=0)
    divisor = gl.where(divisor == 0.0, 1.0, divisor)
    result = summed / divisor[None, :]
    element = gl.arange(0, E, gl.SliceLayout(1, layout))[:, None]
    is_head = (head < G)[None, :]
    if count <= 1:
        place = (group * G + head)[None, :] * E + element
        gl.store(output + place, result.to(output.dtype.element_ty), mask=is_head)
    else:
        first_row = (first_item.to(gl.int64) * num_kv_heads + kv_head) * G
        own_row = (item.to(gl.int64) * num_kv_heads + kv_head) * G + head
        gl.store(partial + own_row[None, :] * E + element, result, mask=is_head)
        gl.store(partial_lse + own_row, highest + gl.log2(divisor), mask=head < G)
        # All threads have stored before one of them releases the stores with the ticket.
        thread_barrier()
        ticket = gl.atomic_add(tickets + group, 1, sem="acq_rel", scope="gpu")
        if ticket == count - 1:
            gl.store(tickets + group, 0)
            _merge_splits(
                partial + first_row * E, partial_lse + first_row, output + group * G * E,
                count, num_kv_heads * G, G, GROUP, E, MERGED, num_warps,
            )  # fmt: skip


@gluon.jit
def _attend(
    keys, values, queries, weights, full, empty, query, output, partial, partial_lse, tickets,
    log2_scale, item, start, end, first_item, count, group, num_kv_heads, kv_head,
    G: gl.constexpr, ROWS: gl.constexpr, GROUP: gl.constexpr, E: gl.constexpr, TILE: gl.constexpr,
    STAGES: gl.constexpr, MERGED: gl.constexpr, PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """The warps that multiply. Scores are (TILE, ROWS), the sum (E, ROWS)."""
    dtype: gl.constexpr = keys.dtype
    if PDL:
        gdc_wait()
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // E, E // 8], [num_warps, 1], [1, 0])
    row = gl.arange(0, ROWS, gl.SliceLayout(1, wide))
    column = gl.arange(0, E, gl.SliceLayout(0, wide))
    place = (group * G + row)[:, None] * E + column[None, :]
    queries.store(gl.load(query + place, mask=(row < G)[:, None], other=0.0))
    fence_async_shared()
    thread_barrier()

    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, ROWS, 16]
    )
    head = gl.arange(0, ROWS, gl.SliceLayout(0, layout))
    token = gl.arange(0, TILE, gl.SliceLayout(1, layout))
    nothing = gl.zeros([TILE, ROWS], gl.float32, layout)
    highest = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(0, layout))
    total = gl.zeros([TILE, ROWS], gl.float32, layout)
    summed = gl.zeros([E, ROWS], gl.float32, layout)
    stage, phase = 0, 0
    for first in range(start, end, TILE):
        mbarrier.wait(full.index(stage), phase)
        score = warpgroup_mma(
            keys.index(stage), queries.permute((1, 0)), nothing, use_acc=False, is_async=True
        )
        score = warpgroup_mma_wait(0, deps=(score,))
        is_context = (first + token < end)[:, None]
        score = gl.where(is_context, score * log2_scale, float("-inf"))
        new_highest = gl.maximum(highest, gl.max(score, axis=0))
        weight = gl.exp2(score - new_highest[None, :])
        old_weight = gl.exp2(highest - new_highest)
        total = total * old_weight[None, :] + weight
        weights.permute((1, 0)).store(weight.to(dtype))
        if first + TILE > end:
            forget_unwritten(values.index(stage), first, end, wide, TILE)
        fence_async_shared()
        thread_barrier()
        summed *= old_weight[None, :]
        turned = values.index(stage).permute((1, 0))
        summed = warpgroup_mma(turned, weights.permute((1, 0)), summed, is_async=True)
        summed = warpgroup_mma_wait(0, deps=(summed,))
        highest = new_highest
        thread_barrier()
        mbarrier.arrive(empty.index(stage))
        stage, phase = next_stage(stage, phase, STAGES)
    _finish(
        summed, total, highest, output, partial, partial_lse, tickets, item, first_item, count,
        group, num_kv_heads, kv_head, head, layout, G, GROUP, E, MERGED, num_warps,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["num_items", "table_stride", "value_rows"])
def _hopper_kernel(
    cache, query, block_tables, work, output, partial, partial_lse, tickets,
    log2_scale, num_items, table_stride, value_rows,
    G: gl.constexpr, ROWS: gl.constexpr, GROUP: gl.constexpr, E: gl.constexpr, S: gl.constexpr,
    TILE: gl.constexpr, CHUNK: gl.constexpr, STAGES: gl.constexpr, MERGED: gl.constexpr,
    FETCH_REGISTERS: gl.constexpr, PDL: gl.constexpr, ROW: gl.constexpr, START: gl.constexpr,
    END: gl.constexpr, FIRST: gl.constexpr, COUNT: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    kv_head = gl.program_id(0)
    num_kv_heads = gl.num_programs(0)
    item = gl.program_id(1)
    if PDL:
        gdc_launch_dependents()
    # Nothing to wait for: no kernel starts before the plan is there.
    work += item
    request = gl.load(work)
    row = gl.load(work + ROW * num_items)
    start = gl.load(work + START * num_items)
    end = gl.load(work + END * num_items)
    first_item = gl.load(work + FIRST * num_items)
    count = gl.load(work + COUNT * num_items)
    if request < 0:
        if PDL:
            gdc_wait()
        return
    dtype: gl.constexpr = cache.dtype
    swizzled: gl.constexpr = gl.NVMMASharedLayout(2 * CHUNK, 16, 2)
    keys = gl.allocate_shared_memory(dtype, [STAGES, TILE, E], swizzled)
    values = gl.allocate_shared_memory(dtype, [STAGES, TILE, E], swizzled)
    queries = gl.allocate_shared_memory(dtype, [ROWS, E], swizzled)
    weights = gl.allocate_shared_memory(dtype, [ROWS, TILE], swizzled)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    fence_async_shared()
    key_pieces = page_pieces(keys, S, CHUNK)
    value_pieces = page_pieces(values, S, CHUNK)
    table = block_tables + row.to(gl.int64) * table_stride
    group = (request * num_kv_heads + kv_head).to(gl.int64)
    gl.warp_specialize(
        [
            (_attend, (
                keys, values, queries, weights, full, empty, query, output, partial, partial_lse,
                tickets, log2_scale, item, start, end, first_item, count, group, num_kv_heads,
                kv_head, G, ROWS, GROUP, E, TILE, STAGES, MERGED, PDL, num_warps,
            )),
            (fetch_pages, (
                cache, key_pieces, value_pieces, full, empty, table, start, end, end, kv_head * E,
                value_rows, CHUNK, TILE, S, E, STAGES, PDL,
            )),
        ],
        [1],
        [FETCH_REGISTERS],
    )  # fmt: skip


def paged_decode_hopper(
    query_RHE: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    plan: DecodePlan,
    scale: float,
    output_RHE: torch.Tensor,
    launches: LayerLaunches,
) -> None:
    """Fills `output_RHE`; arguments as `paged_decode` has checked them, the cache contiguous."""
    num_kv_heads, head_size = kv_cache.shape[3:]
    group = query_RHE.shape[1] // num_kv_heads
    padded_group = next_power_of_2(group)
    merged = MERGED_VALUES * 32 * NUM_WARPS // (max(padded_group, NUM_WARPS) * max(head_size, 128))
    launches.launch(
        _hopper_kernel, (num_kv_heads, plan.num_items, 1),
        DESCRIPTORS.of(kv_cache), query_RHE, block_tables, plan.work, output_RHE,
        plan.workspace.partial, plan.workspace.partial_lse, plan.workspace.tickets,
        scale / math.log(2.0), plan.num_items, block_tables.stride(0),
        kv_cache.shape[1] * kv_cache.shape[2],
        G=group,
        ROWS=max(padded_group, MIN_ROWS),
        GROUP=padded_group,
        E=head_size,
        S=kv_cache.shape[2],
        TILE=TILE,
        CHUNK=CHUNK,
        STAGES=plan.tuning.num_stages,
        MERGED=min(max(merged, 1), MAX_MERGED),
        FETCH_REGISTERS=FETCH_REGISTERS,
        ROW=ROW,
        START=START,
        END=END,
        FIRST=FIRST,
        COUNT=COUNT,
        num_warps=NUM_WARPS,
        maxnreg=REGISTERS,
        **pdl_options(),
    )  # fmt: skip
