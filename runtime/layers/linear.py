"""Sharded linear layers; each says which part of which checkpoint tensor it holds.

Shapes: T tokens of the batch, I inputs here, O outputs here.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from vcli.runtime.distributed.collectives import PartialSum, total
from vcli.runtime.distributed.group import GroupHandle
from vcli.runtime.layers.ops import TORCH_OPS, LayerOps
from vcli.runtime.layers.share import HeadShares, Share
from vcli.runtime.layers.weights import WeightSlice, empty_weight, whole_tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputPart:
    """The rows of the checkpoint's `name` that a rank holds."""

    name: str
    rows: Share


class LinearBase(nn.Module):
    """This rank's part of a weight (O, I), with or without a bias, and how it is multiplied."""

    def __init__(
        self,
        num_inputs: int,
        num_outputs: int,
        *,
        has_bias: bool = False,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
        ops: LayerOps = TORCH_OPS,
    ) -> None:
        super().__init__()
        self.ops = ops
        self.weight = empty_weight(num_outputs, num_inputs, dtype=dtype, device=device)
        self.bias = empty_weight(num_outputs, dtype=dtype, device=device) if has_bias else None
        self._packed: torch.Tensor | None = None

    def multiply(self, x_TI: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """(T, I) -> (T, O)."""
        if self._packed is None:
            return self.ops.linear(x_TI, self.weight, bias)
        return multiply_packed(x_TI, self._packed, bias)

    def pack(self) -> None:
        """Gives up the plain weight for the packed one: nothing can be loaded any more."""
        self._packed = pack_weight(self.weight)
        self.weight = empty_weight(0, dtype=self.weight.dtype, device=self.weight.device)


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether packed weights are faster: bfloat16 on a CPU that multiplies it in hardware.

    Measured with AVX512-BF16 and AMX: half the time of F.linear from 1 to 128 rows, with the same
    bits. In float32 F.linear wins at one row.
    """
    return (
        device.type == "cpu"
        and dtype is torch.bfloat16
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and torch.cpu._is_avx512_bf16_supported()
    )


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """`weight` (O, I) in the block layout of oneDNN, for any number of rows."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return packed


def multiply_packed(
    x_TI: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """`F.linear` with a packed weight."""
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x_TI, packed, bias, "none", [], "")
    return product


class ReplicatedLinear(LinearBase):
    """A linear layer of which every rank holds all."""

    def forward(self, x_TI: torch.Tensor) -> torch.Tensor:
        """(T, I) -> (T, O)."""
        return self.multiply(x_TI, self.bias)

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        """What it takes from a checkpoint."""
        yield whole_tensor(f"{prefix}.weight", self.weight)


class MergedColumnParallelLinear(LinearBase):
    """Several linear layers with one input as one; each rank has some rows of each part.

    The output is this rank's alone: its parts side by side.
    """

    def __init__(
        self,
        input_size: int,
        parts: Sequence[OutputPart],
        *,
        has_bias: bool,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
        ops: LayerOps = TORCH_OPS,
    ) -> None:
        super().__init__(
            input_size,
            sum(part.rows.size for part in parts),
            has_bias=has_bias,
            dtype=dtype,
            device=device,
            ops=ops,
        )
        self.parts = tuple(parts)
        self.input_size = input_size

    def forward(self, x_TI: torch.Tensor) -> torch.Tensor:
        """(T, I) -> (T, O)."""
        return self.multiply(x_TI, self.bias)

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        """What it takes from a checkpoint, where the parts are neighbours under `prefix`."""
        offset = 0
        for part in self.parts:
            rows = part.rows
            yield WeightSlice(
                name=f"{prefix}.{part.name}.weight",
                shape=(rows.total, self.input_size),
                source=(rows.source, slice(0, self.input_size)),
                target=self.weight[offset : offset + rows.size],
            )
            if self.bias is not None:
                yield WeightSlice(
                    name=f"{prefix}.{part.name}.bias",
                    shape=(rows.total,),
                    source=(rows.source,),
                    target=self.bias[offset : offset + rows.size],
                )
            offset += rows.size


class QKVParallelLinear(MergedColumnParallelLinear):
    """The projections of query, key and value heads as one linear layer, divided by heads.

    Output columns: query heads, key heads, value heads.
    """

    def __init__(
        self,
        input_size: int,
        *,
        heads: HeadShares,
        head_size: int,
        has_bias: bool,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
        ops: LayerOps = TORCH_OPS,
    ) -> None:
        query, kv = heads.query.times(head_size), heads.kv.times(head_size)
        parts = (("q_proj", query), ("k_proj", kv), ("v_proj", kv))
        super().__init__(
            input_size,
            [OutputPart(name=name, rows=rows) for name, rows in parts],
            has_bias=has_bias,
            dtype=dtype,
            device=device,
            ops=ops,
        )
        self.num_heads = heads.query.size
        self.num_kv_heads = heads.kv.size


class RowParallelLinear(LinearBase):
    """Each rank has some input columns; the partial outputs are summed over the group."""

    def __init__(
        self,
        columns: Share,
        output_size: int,
        *,
        group: GroupHandle,
        has_bias: bool,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
        ops: LayerOps = TORCH_OPS,
    ) -> None:
        super().__init__(
            columns.size, output_size, has_bias=has_bias, dtype=dtype, device=device, ops=ops
        )
        self.group = group
        self.columns = columns

    def forward(self, x_TI: torch.Tensor) -> torch.Tensor | PartialSum:
        """This rank's columns (T, I) -> the output (T, O): its part, or the whole."""
        if self.group.size == 1:
            return self.multiply(x_TI, self.bias)
        partial = PartialSum(self._multiply_for_sum(x_TI), self.group)
        # Every rank adds the bias once, after the sum: before it, it would count per rank.
        return partial if self.bias is None else total(partial) + self.bias

    def _multiply_for_sum(self, x_TI: torch.Tensor) -> torch.Tensor:
        communicator = self.group.communicator
        if communicator is None or self._packed is not None:
            return self.multiply(x_TI, None)
        shape = (len(x_TI), self.weight.shape[0])
        buffer = communicator.input_buffer(shape, x_TI.dtype)
        if buffer is None:
            return self.multiply(x_TI, None)
        # Straight to where the other ranks read it.
        return self.ops.linear_into(x_TI, self.weight, buffer)

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        """What it takes from a checkpoint."""
        rows = self.weight.shape[0]
        yield WeightSlice(
            name=f"{prefix}.weight",
            shape=(rows, self.columns.total),
            source=(slice(0, rows), self.columns.source),
            target=self.weight,
        )
        if self.bias is not None:
            yield whole_tensor(f"{prefix}.bias", self.bias)
