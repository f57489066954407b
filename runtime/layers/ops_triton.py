"""`LayerOps` by our own Triton kernels: bfloat16 and float16 on CUDA."""

import torch
import torch.nn.functional as F

from vcli.runtime.layers import kernels
from vcli.runtime.layers.kernels.launch import PdlSwitch
from vcli.runtime.layers.ops import HeadNorms, RopeInputs


class TritonOps:
    """Each operation is one kernel."""

    name = "triton"

    def __init__(self) -> None:
        # Hopper and newer set a kernel up while the one before it ends.
        PdlSwitch.is_on = torch.cuda.get_device_capability() >= (9, 0)

    def add_rms_norm(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As the protocol says."""
        return kernels.add_rms_norm(x_TD, residual_TD, weight, eps)

    def rope_and_cache(
        self,
        heads_TNE: torch.Tensor,
        rope: RopeInputs,
        norms: HeadNorms | None,
        kv_cache: torch.Tensor,
        num_heads: int,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As the protocol says."""
        return kernels.rope_and_cache(
            heads_TNE,
            rope.positions_T,
            rope.table_PE,
            None if norms is None else norms.query,
            None if norms is None else norms.key,
            0.0 if norms is None else norms.eps,
            rope.slot_mapping_T,
            kv_cache,
            num_heads,
            out,
        )

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """As the protocol says."""
        return kernels.silu_and_mul(gate_up)

    def linear(
        self, x_TI: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Few rows by our own kernel where it was measured to be faster, else cuBLAS."""
        if kernels.can_use_skinny(len(x_TI), *weight.shape):
            return kernels.skinny_linear(x_TI, weight, bias)
        return F.linear(x_TI, weight, bias)

    def linear_into(
        self, x_TI: torch.Tensor, weight: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor:
        """As `linear`, into `out`."""
        if kernels.can_use_skinny(len(x_TI), *weight.shape):
            return kernels.skinny_linear(x_TI, weight, out=out)
        return torch.mm(x_TI, weight.t(), out=out)
