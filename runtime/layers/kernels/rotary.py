# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: ANN001, ANN202, PLR0917
"""From the projected heads to rotated queries and a filled cache, in one kernel."""

import torch
import triton
import triton.language as tl

from vcli.runtime.layers.kernels.launch import (
    ceil_div,
    next_power_of_2,
    pdl_options,
    wait_for_previous,
)

HEADS_PER_PROGRAM = 8


@triton.jit
def _weighted(half, inverse, weight):
    """One half of normed heads, rounded before and after the weight."""
    rounded = (half.to(tl.float32) * inverse[:, None]).to(half.dtype)
    return (rounded.to(tl.float32) * weight.to(tl.float32)).to(half.dtype)


@triton.jit
def _rope_and_cache_kernel(
    qkv, positions, cos_sin, q_norm, k_norm, slot_mapping, kv_cache, query, eps,
    kv_stride, block_stride, slot_stride, head_stride,
    H: tl.constexpr, K: tl.constexpr, E: tl.constexpr, S: tl.constexpr,
    HAS_NORM: tl.constexpr, HEADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    half = tl.arange(0, E // 2)
    is_query = head < H
    is_value = head >= H + K
    is_head = head < H + 2 * K

    source = qkv + (token * (H + 2 * K) + head)[:, None] * E + half[None, :]
    first = tl.load(source, mask=is_head[:, None], other=0.0)
    second = tl.load(source + E // 2, mask=is_head[:, None], other=0.0)
    position = tl.load(positions + token)
    cos = tl.load(cos_sin + position * E + half)[None, :]
    sin = tl.load(cos_sin + position * E + E // 2 + half)[None, :]
    slot = tl.load(slot_mapping + token)

    turned_first = first
    turned_second = second
    if HAS_NORM:
        wide_first, wide_second = first.to(tl.float32), second.to(tl.float32)
        square = tl.sum(wide_first * wide_first + wide_second * wide_second, axis=1)
        inverse = 1.0 / tl.sqrt_rn(square / E + eps)
        q_first, q_second = tl.load(q_norm + half), tl.load(q_norm + E // 2 + half)
        k_first, k_second = tl.load(k_norm + half), tl.load(k_norm + E // 2 + half)
        weight_first = tl.where(is_query[:, None], q_first[None, :], k_first[None, :])
        weight_second = tl.where(is_query[:, None], q_second[None, :], k_second[None, :])
        turned_first = _weighted(first, inverse, weight_first)
        turned_second = _weighted(second, inverse, weight_second)
    x, y = turned_first.to(tl.float32), turned_second.to(tl.float32)
    turned_first = tl.where(is_value[:, None], first, (x * cos - y * sin).to(first.dtype))
    turned_second = tl.where(is_value[:, None], second, (y * cos + x * sin).to(first.dtype))

    target = query + (token * H + head)[:, None] * E + half[None, :]
    tl.store(target, turned_first, mask=is_query[:, None])
    tl.store(target + E // 2, turned_second, mask=is_query[:, None])

    kv_head = tl.where(is_value, head - H - K, head - H)
    row = (slot // S) * block_stride + (slot % S) * slot_stride
    row = row + tl.where(is_value, 1, 0) * kv_stride + kv_head * head_stride
    is_written = is_head & (head >= H) & (slot >= 0)
    target = kv_cache + row[:, None] + half[None, :]
    tl.store(target, turned_first, mask=is_written[:, None])
    tl.store(target + E // 2, turned_second, mask=is_written[:, None])


def rope_and_cache(
    qkv_TNE: torch.Tensor,
    positions_T: torch.Tensor,
    cos_sin: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    slot_mapping_T: torch.Tensor,
    kv_cache: torch.Tensor,
    num_heads: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The queries (T, H, E), rotated; keys, rotated, and values go to the slots of the cache.

    The queries are in `out` where one is given.
    `qkv_TNE` holds H query, K key and K value heads. `cos_sin` (positions, E) is float32: E/2
    cosines, then E/2 sines. With `q_norm` and `k_norm` (E) the heads are normed first. A token
    with a slot below 0 writes nothing.
    """
    num_tokens, num_all_heads, head_size = qkv_TNE.shape
    num_kv_heads = (num_all_heads - num_heads) // 2
    assert qkv_TNE.is_contiguous()
    assert kv_cache.stride(4) == 1
    assert head_size == next_power_of_2(head_size), f"head size {head_size}"
    query_THE = qkv_TNE.new_empty(num_tokens, num_heads, head_size) if out is None else out
    assert query_THE.is_contiguous()
    q_weight, k_weight = (cos_sin if norm is None else norm for norm in (q_norm, k_norm))
    if num_tokens:
        _rope_and_cache_kernel[(num_tokens, ceil_div(num_all_heads, HEADS_PER_PROGRAM))](
            qkv_TNE, positions_T, cos_sin, q_weight, k_weight, slot_mapping_T, kv_cache,
            query_THE, eps, *kv_cache.stride()[:4],
            H=num_heads,
            K=num_kv_heads,
            E=head_size,
            S=kv_cache.shape[2],
            HAS_NORM=q_norm is not None,
            HEADS=HEADS_PER_PROGRAM,
            num_warps=4 if head_size >= 128 else 2,
            **pdl_options(),
        )  # fmt: skip
    return query_THE
