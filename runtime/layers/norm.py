"""RMS norm, computed in float32 whatever the dtype of the model."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

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
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = empty_weight(size, dtype=dtype, device=device)
        self.weight.fill_(1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The normed `x`, in its dtype and shape."""
        normed = F.rms_norm(x.float(), (x.shape[-1],), eps=self.eps)
        return self.weight * normed.to(x.dtype)

    def add_and_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The normed sum, and the sum: the next residual. Without residual, `x` is the sum."""
        if residual is not None:
            x = residual + x
        return self.forward(x), x

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        """What it takes from a checkpoint."""
        yield whole_tensor(f"{prefix}.weight", self.weight)
