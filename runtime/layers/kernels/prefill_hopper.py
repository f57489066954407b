# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: ANN001, ANN202, PLR0917
"""Prefill attention for Hopper GPUs: as `prefill_attention`, with the softmax beside the products.

A program takes 128 query rows, half of them in each of two groups of four warps: while one group
computes its weights, the other one multiplies. One more warp has the tensor memory accelerator
bring whole pages of keys and values. The order of work is that of FlashAttention-3 (Shah et al.,
2024, section 3.1) without its own signals: the groups drift apart by themselves.
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

from vcli.runtime.layers.kernels.gluon_names import thread_barrier
from vcli.runtime.layers.kernels.launch import LayerLaunches, ceil_div, pdl_options
from vcli.runtime.layers.kernels.page_fetch import (
    CHUNK,
    DESCRIPTORS,
    FETCH_REGISTERS,
    fetch_pages,
    forget_unwritten,
    next_stage,
    page_pieces,
)

#: Query rows of a group of warps, and of both.
HALF = 64
ROWS = 2 * HALF
NUM_WARPS = 4
#: Of a thread at the start, and then of those that multiply.
REGISTERS, GROUP_REGISTERS = 168, 240
HEAD_SIZES = (64, 128)
#: Context tokens of a tile, and tiles that are under way.
TILE, NUM_STAGES = 64, 4


def can_prefill(head_size: int, block_size: int) -> bool:
    """Whether there is a kernel for such heads and pages."""
    return head_size in HEAD_SIZES and block_size % 8 == 0 and TILE % block_size == 0


@gluon.jit
def _weigh(score, highest, total):
    """The weights, what earlier ones shrink by, the highest score and the total up to here."""
    new_highest = gl.maximum(highest, gl.max(score, axis=1))
    weight = gl.exp2(score - new_highest[:, None])
    old_weight = gl.exp2(highest - new_highest)
    return weight, old_weight, new_highest, total * old_weight + gl.sum(weight, axis=1)


@gluon.jit
def _attend(
    keys, values, queries, full, empty, query, output, first_row, num_rows, query_begin,
    num_cached, end, context_len, kv_head, num_kv_heads, log2_scale,
    G: gl.constexpr, HALF: gl.constexpr, E: gl.constexpr, TILE: gl.constexpr,
    STAGES: gl.constexpr, NUM_WARPS: gl.constexpr,
):  # fmt: skip
    """A group of warps: rows [first_row, first_row + HALF) of a request's `num_rows`."""
    dtype: gl.constexpr = keys.dtype
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // E, E // 8], [NUM_WARPS, 1], [1, 0])
    own = first_row + gl.arange(0, HALF, gl.SliceLayout(1, wide))
    head = (query_begin + own // G).to(gl.int64) * (num_kv_heads * G) + kv_head * G + own % G
    place = head[:, None] * E + gl.arange(0, E, gl.SliceLayout(0, wide))[None, :]
    is_row = (own < num_rows)[:, None]
    queries.store(gl.load(query + place, mask=is_row, other=0.0))
    fence_async_shared()
    thread_barrier()

    scores: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[NUM_WARPS, 1], instr_shape=[16, TILE, 16]
    )
    sums: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[NUM_WARPS, 1], instr_shape=[16, E, 16]
    )
    left: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=sums, k_width=2)
    row = first_row + gl.arange(0, HALF, gl.SliceLayout(1, scores))
    position = num_cached + row // G
    # All rows see the tokens before it.
    full_end = (num_cached + first_row // G + 1) // TILE * TILE
    token = gl.arange(0, TILE, gl.SliceLayout(0, scores))
    nothing = gl.zeros([HALF, TILE], gl.float32, scores)
    highest = gl.full([HALF], float("-inf"), gl.float32, gl.SliceLayout(1, scores))
    total = gl.zeros([HALF], gl.float32, gl.SliceLayout(1, scores))
    summed = gl.zeros([HALF, E], gl.float32, sums)
    stage, phase = 0, 0
    for first in range(0, end, TILE):
        mbarrier.wait(full.index(stage), phase)
        score = warpgroup_mma(
            queries, keys.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True
        )
        score = warpgroup_mma_wait(0, deps=(score,)) * log2_scale
        if first >= full_end:
            is_visible = (first + token)[None, :] <= position[:, None]
            score = gl.where(is_visible, score, float("-inf"))
        weight, old_weight, highest, total = _weigh(score, highest, total)
        summed = summed * gl.convert_layout(old_weight, gl.SliceLayout(1, sums))[:, None]
        if first + TILE > context_len:
            # Both groups do so, with the same result.
            forget_unwritten(values.index(stage), first, context_len, wide, TILE)
            fence_async_shared()
            thread_barrier()
        summed = warpgroup_mma(
            gl.convert_layout(weight.to(dtype), left), values.index(stage), summed, is_async=True
        )
        summed = warpgroup_mma_wait(0, deps=(summed,))
        thread_barrier()
        mbarrier.arrive(empty.index(stage))
        stage, phase = next_stage(stage, phase, STAGES)
    divisor = gl.convert_layout(total, gl.SliceLayout(1, sums))
    result = gl.convert_layout((summed / divisor[:, None]).to(dtype), wide)
    gl.store(output + place, result, mask=is_row)


@gluon.jit(do_not_specialize=["skip_begin", "num_skipped", "table_stride", "value_rows"])
def _hopper_kernel(
    cache, query, block_tables, rows, query_start_loc, seq_lens, output, log2_scale,
    skip_begin, num_skipped, table_stride, value_rows,
    G: gl.constexpr, HALF: gl.constexpr, E: gl.constexpr, S: gl.constexpr, TILE: gl.constexpr,
    CHUNK: gl.constexpr, STAGES: gl.constexpr, GROUP_REGISTERS: gl.constexpr,
    FETCH_REGISTERS: gl.constexpr, PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    # The last tiles see most context: they start first.
    first_row = (gl.num_programs(0) - 1 - gl.program_id(0)) * (2 * HALF)
    kv_head = gl.program_id(1)
    num_kv_heads = gl.num_programs(1)
    request = gl.program_id(2)
    request += gl.where(request >= skip_begin, num_skipped, 0)
    query_begin = gl.load(query_start_loc + request)
    query_len = gl.load(query_start_loc + request + 1) - query_begin
    num_rows = query_len * G
    if first_row >= num_rows:
        return
    context_len = gl.load(seq_lens + request)
    num_cached = context_len - query_len
    end = gl.minimum(num_cached + (first_row + 2 * HALF - 1) // G + 1, context_len)
    table = block_tables + gl.load(rows + request).to(gl.int64) * table_stride

    dtype: gl.constexpr = cache.dtype
    swizzled: gl.constexpr = gl.NVMMASharedLayout(2 * CHUNK, 16, 2)
    keys = gl.allocate_shared_memory(dtype, [STAGES, TILE, E], swizzled)
    values = gl.allocate_shared_memory(dtype, [STAGES, TILE, E], swizzled)
    queries = gl.allocate_shared_memory(dtype, [2, HALF, E], swizzled)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    key_pieces = page_pieces(keys, S, CHUNK)
    value_pieces = page_pieces(values, S, CHUNK)
    gl.warp_specialize(
        [
            (_attend, (
                keys, values, queries.index(0), full, empty, query, output, first_row, num_rows,
                query_begin, num_cached, end, context_len, kv_head, num_kv_heads, log2_scale,
                G, HALF, E, TILE, STAGES, num_warps,
            )),
            (_attend, (
                keys, values, queries.index(1), full, empty, query, output, first_row + HALF,
                num_rows, query_begin, num_cached, end, context_len, kv_head, num_kv_heads,
                log2_scale, G, HALF, E, TILE, STAGES, num_warps,
            )),
            (fetch_pages, (
                cache, key_pieces, value_pieces, full, empty, table, 0, end, context_len,
                kv_head * E, value_rows, CHUNK, TILE, S, E, STAGES, False,
            )),
        ],
        [num_warps, 1],
        [GROUP_REGISTERS, FETCH_REGISTERS],
    )  # fmt: skip


def paged_prefill_hopper(
    query_THE: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    rows_R: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens_R: torch.Tensor,
    max_query_len: int,
    scale: float,
    output_THE: torch.Tensor,
    skipped: range,
    launches: LayerLaunches,
) -> None:
    """Fills `output_THE`; arguments as `paged_prefill` has checked them, the cache contiguous."""
    num_kv_heads, head_size = kv_cache.shape[3:]
    group = query_THE.shape[1] // num_kv_heads
    grid = (ceil_div(max_query_len * group, ROWS), num_kv_heads, len(seq_lens_R) - len(skipped))
    launches.launch(
        _hopper_kernel, grid,
        DESCRIPTORS.of(kv_cache), query_THE, block_tables, rows_R, query_start_loc, seq_lens_R,
        output_THE, scale / math.log(2.0), skipped.start, len(skipped), block_tables.stride(0),
        kv_cache.shape[1] * kv_cache.shape[2],
        G=group,
        HALF=HALF,
        E=head_size,
        S=kv_cache.shape[2],
        TILE=TILE,
        CHUNK=CHUNK,
        STAGES=NUM_STAGES,
        GROUP_REGISTERS=GROUP_REGISTERS,
        FETCH_REGISTERS=FETCH_REGISTERS,
        num_warps=NUM_WARPS,
        maxnreg=REGISTERS,
        **pdl_options(),
    )  # fmt: skip
