# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: ANN001, ANN202, PLR0917
"""RMS norm behind the addition of a residual."""

import torch
import triton
import triton.language as tl

from vcli.runtime.layers.kernels.launch import next_power_of_2, pdl_options, wait_for_previous


@triton.jit
def _add_rms_norm_kernel(
    x,
    residual,
    weight,
    normed,
    size,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    inside = column < size
    # No kernel writes weights: they are on their way while the previous one ends.
    scale = tl.load(weight + column, mask=inside, other=0.0)
    wait_for_previous(PDL)
    start = tl.program_id(0).to(tl.int64) * size
    values = tl.load(x + start + column, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        other = tl.load(residual + start + column, mask=inside, other=0.0)
        values = (other.to(tl.float32) + values.to(tl.float32)).to(values.dtype)
        tl.store(residual + start + column, values, mask=inside)
    wide = values.to(tl.float32)
    inverse = 1.0 / tl.sqrt_rn(tl.sum(wide * wide, axis=0) / size + eps)
    rounded = (wide * inverse).to(values.dtype)
    result = (rounded.to(tl.float32) * scale.to(tl.float32)).to(values.dtype)
    tl.store(normed + start + column, result, mask=inside)


def add_rms_norm(
    x_TD: torch.Tensor, residual_TD: torch.Tensor | None, weight_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The normed sum, and the sum; `residual_TD` is overwritten with it.

    Without residual, `x_TD` is the sum. Rounded as in `layers.norm`: the sum, the norm (computed
    in float32), and the weighted norm.
    """
    assert x_TD.is_contiguous()
    assert residual_TD is None or residual_TD.is_contiguous()
    num_tokens, size = x_TD.shape
    normed_TD = torch.empty_like(x_TD)
    block = next_power_of_2(size)
    if num_tokens:
        _add_rms_norm_kernel[(num_tokens,)](
            x_TD,
            x_TD if residual_TD is None else residual_TD,
            weight_D,
            normed_TD,
            size,
            eps,
            HAS_RESIDUAL=residual_TD is not None,
            BLOCK=block,
            num_warps=min(max(block // 512, 1), 16),
            **pdl_options(),
        )
    return normed_TD, x_TD if residual_TD is None else residual_TD
