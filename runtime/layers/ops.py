"""The operations between the matrix products, and the products: in plain torch, or fused on a GPU.

Shapes: T tokens of the batch, D hidden, H query heads here, K kv heads here, E head size.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from vcli.runtime.layers.activation import silu_and_mul


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNorms:
    """Weights (E,) of the norms of query and key heads (Qwen3)."""

    query: torch.Tensor
    key: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeInputs:
    """What turning the heads of a step needs, the same for all layers."""

    positions_T: torch.Tensor
    table_PE: torch.Tensor
    """(positions, E) float32: cosines, then sines, of every position."""
    slot_mapping_T: torch.Tensor


class FusedRope(Protocol):
    """Norm of queries and keys, rotation and the write into the KV cache as one kernel."""

    def __call__(
        self,
        heads_TNE: torch.Tensor,
        rope: RopeInputs,
        norms: HeadNorms | None,
        kv_cache: torch.Tensor,
        num_heads: int,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The queries (T, H, E) of `heads_TNE` (H query, K key, K value heads), in `out` if any."""


class LayerOps(Protocol):
    """What the layers call; one object for a whole model."""

    name: str

    @property
    def rope_and_cache(self) -> FusedRope | None:
        """None: the layers norm, rotate and write one after the other."""

    def add_rms_norm(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The weighted norm of the sum, and the sum: the next residual. May overwrite both."""

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up, where gate and up are the halves of the last dimension."""

    def linear(
        self, x_TI: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """(T, I) -> (T, O)."""

    def linear_into(
        self, x_TI: torch.Tensor, weight: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor:
        """The same without a bias, written into `out` (T, O), which is given back."""


class TorchOps:
    """Any device, any dtype; the reference."""

    name = "torch"
    rope_and_cache = None

    def add_rms_norm(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm in float32, rounded to the dtype of `x_TD`, then weighted."""
        if residual_TD is not None:
            x_TD = residual_TD + x_TD
        return rms_norm(x_TD, weight, eps), x_TD

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up."""
        return silu_and_mul(gate_up)

    def linear(
        self, x_TI: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """(T, I) -> (T, O)."""
        return F.linear(x_TI, weight, bias)

    def linear_into(
        self, x_TI: torch.Tensor, weight: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor:
        """(T, I) -> (T, O), in `out`."""
        return torch.mm(x_TI, weight.t(), out=out)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Norm over the last dimension: in float32, rounded to the dtype of `x`, then weighted."""
    normed = F.rms_norm(x.float(), (x.shape[-1],), eps=eps)
    return weight * normed.to(x.dtype)


TORCH_OPS: LayerOps = TorchOps()
