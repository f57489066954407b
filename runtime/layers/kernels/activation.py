# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: ANN001, ANN201, ANN202
"""Gated activation."""

import torch
import triton
import triton.language as tl

from vcli.runtime.layers.kernels.launch import ceil_div, pdl_options, wait_for_previous

BLOCK = 1024


@triton.jit
def silu_times(gate, up):
    """silu(gate) * up, rounded to their dtype after each of the two steps."""
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    return (silu.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)


@triton.jit
def _silu_and_mul_kernel(gate_up, output, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gate = tl.load(gate_up + token * 2 * size + column, mask=inside, other=0.0)
    up = tl.load(gate_up + token * 2 * size + size + column, mask=inside, other=0.0)
    tl.store(output + token * size + column, silu_times(gate, up), mask=inside)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up (T, I), where gate and up are the halves of `gate_up` (T, 2 * I)."""
    assert gate_up.is_contiguous()
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    output = gate_up.new_empty(num_tokens, size)
    if num_tokens:
        _silu_and_mul_kernel[(num_tokens, ceil_div(size, BLOCK))](
            gate_up, output, size, BLOCK=BLOCK, num_warps=4, **pdl_options()
        )
    return output
