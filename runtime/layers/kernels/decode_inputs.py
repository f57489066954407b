# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: ANN001, ANN202, PLR0917
"""What a decode step is told by the host, spread to the tensors that the model reads."""

import torch
import triton
import triton.language as tl

from vcli.runtime.layers.kernels.launch import ceil_div, pdl_options, wait_for_previous

BLOCK = 64


@triton.jit(do_not_specialize=["num_requests"])
def _prepare_decode_kernel(
    packed,
    block_tables,
    last_token,
    input_ids,
    positions,
    slot_mapping,
    rows,
    seq_lens,
    num_requests,
    table_stride,
    S: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    request = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = request < num_requests
    row = tl.load(packed + request, mask=inside, other=0)
    seq_len = tl.load(packed + num_requests + request, mask=inside, other=0)
    token = tl.load(packed + 2 * num_requests + request, mask=inside, other=0)
    new_column = tl.load(packed + 3 * num_requests + request, mask=inside, other=-1)
    new_block = tl.load(packed + 4 * num_requests + request, mask=inside, other=0)

    is_real = inside & (seq_len > 0)
    table = block_tables + row.to(tl.int64) * table_stride
    has_new = is_real & (new_column >= 0)
    tl.store(table + new_column, new_block, mask=has_new)

    last = tl.load(last_token + row, mask=is_real & (token < 0), other=0)
    position = tl.where(is_real, seq_len - 1, 0)
    column = position // S
    is_new = has_new & (column == new_column)
    old_block = tl.load(table + column, mask=is_real & (is_new == 0), other=0)
    block = tl.where(is_new, new_block, old_block).to(tl.int64)
    slot = tl.where(is_real, block * S + position % S, -1)

    token_id = tl.where(token < 0, last, token.to(tl.int64))
    tl.store(input_ids + request, tl.where(is_real, token_id, 0), mask=inside)
    tl.store(positions + request, position.to(tl.int64), mask=inside)
    tl.store(slot_mapping + request, slot, mask=inside)
    tl.store(rows + request, row, mask=inside)
    tl.store(seq_lens + request, tl.where(is_real, seq_len, 0), mask=inside)


def prepare_decode(
    packed: torch.Tensor,
    block_tables: torch.Tensor,
    last_token: torch.Tensor,
    block_size: int,
    *,
    input_ids_R: torch.Tensor,
    positions_R: torch.Tensor,
    slot_mapping_R: torch.Tensor,
    rows_R: torch.Tensor,
    seq_lens_R: torch.Tensor,
) -> None:
    """Fills the outputs and enters new blocks into `block_tables` (rows, max blocks) int32.

    `packed` (5, R) int32: row of `block_tables` and of `last_token`; context length with the
    token of this step; token id, or -1: the one in `last_token` (rows) int64; column for a new
    block, or -1; id of that block. A request of length 0 is padding: position 0, slot -1.
    """
    num_requests = packed.shape[1]
    assert packed.is_contiguous()
    assert block_tables.stride(1) == 1
    _prepare_decode_kernel[(ceil_div(num_requests, BLOCK),)](
        packed,
        block_tables,
        last_token,
        input_ids_R,
        positions_R,
        slot_mapping_R,
        rows_R,
        seq_lens_R,
        num_requests,
        block_tables.stride(0),
        S=block_size,
        BLOCK=BLOCK,
        num_warps=2,
        **pdl_options(),
    )
