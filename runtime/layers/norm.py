"""RMS norm, computed in float32 whatever the dtype of the model."""

from collections.abc import Iterator

import torch
from torch import nn

from vcli.runtime.distributed.collectives import PartialSum, total
from vcli.runtime.layers.ops import TORCH_OPS, LayerOps, rms_norm
from vcli.runtime.layers.weights import WeightSlice, empty_weight, whole_tensor


class RMSNorm(nn.Module):
    """Norm over the last dimension: in float32, rounded to the model's dtype, then weighted."""

    def __init__(
        self,
        size: int,
        eps: float,
        *,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
        ops: LayerOps = TORCH_OPS,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.ops = ops
        self.weight = empty_weight(size, dtype=dtype, device=device)
        self.weight.fill_(1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The normed `x`, in its dtype and shape."""
        return rms_norm(x, self.weight, self.eps)

    def add_and_norm(
        self, x: torch.Tensor | PartialSum, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The normed sum, and the sum: the next residual. Without residual, `x` is the sum.

        May overwrite both.
        """
        if isinstance(x, PartialSum) and residual is not None:
            fused = x.add_rms_norm(residual, self.weight, self.eps)
            if fused is not None:
                return fused
        return self.ops.add_rms_norm(total(x), residual, self.weight, self.eps)

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        """What it takes from a checkpoint."""
        yield whole_tensor(f"{prefix}.weight", self.weight)
