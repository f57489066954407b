"""Sharded linear layers; each says which part of which checkpoint tensor it holds.

Shapes: T tokens of the batch, I inputs here, O outputs here.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from vcli.runtime.distributed.collectives import all_reduce
from vcli.runtime.distributed.group import GroupHandle
from vcli.runtime.layers.weights import WeightSlice, empty_weight, whole_tensor
from vcli.topology.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputPart:
    """Rows [start, start + count) of the checkpoint's `name`, which has `total` rows."""

    name: str
    total: int
    start: int
    count: int


def even_share(total: int, group: GroupHandle, what: str) -> int:
    """What each rank of the group gets of `total`.

    Raises:
        ConfigError: it does not divide.
    """
    if total % group.size:
        raise ConfigError(
            f"{what}={total} cannot be divided among {group.size} tensor-parallel ranks",
            hint=f"choose a --tensor-parallel-size that divides {total}",
        )
    return total // group.size


def even_part(name: str, total: int, group: GroupHandle) -> OutputPart:
    """This rank's rows of a tensor whose rows are divided evenly."""
    count = even_share(total, group, f"rows of {name}")
    return OutputPart(name=name, total=total, start=group.rank_in_group * count, count=count)


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
    ) -> None:
        super().__init__()
        self.weight = empty_weight(num_outputs, num_inputs, dtype=dtype, device=device)
        self.bias = empty_weight(num_outputs, dtype=dtype, device=device) if has_bias else None
        self._packed: torch.Tensor | None = None

    def multiply(self, x_TI: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """(T, I) -> (T, O)."""
        if self._packed is None:
            return F.linear(x_TI, self.weight, bias)
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
    ) -> None:
        num_outputs = sum(part.count for part in parts)
        super().__init__(input_size, num_outputs, has_bias=has_bias, dtype=dtype, device=device)
        self.parts = tuple(parts)
        self.input_size = input_size

    def forward(self, x_TI: torch.Tensor) -> torch.Tensor:
        """(T, I) -> (T, O)."""
        return self.multiply(x_TI, self.bias)

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        """What it takes from a checkpoint, where the parts are neighbours under `prefix`."""
        offset = 0
        for part in self.parts:
            rows = slice(part.start, part.start + part.count)
            yield WeightSlice(
                name=f"{prefix}.{part.name}.weight",
                shape=(part.total, self.input_size),
                source=(rows, slice(0, self.input_size)),
                target=self.weight[offset : offset + part.count],
            )
            if self.bias is not None:
                yield WeightSlice(
                    name=f"{prefix}.{part.name}.bias",
                    shape=(part.total,),
                    source=(rows,),
                    target=self.bias[offset : offset + part.count],
                )
            offset += part.count


def local_kv_heads(num_kv_heads: int, group: GroupHandle) -> int:
    """KV heads that one rank stores; fewer heads than ranks are replicated on neighbours.

    Raises:
        ConfigError: neither number divides the other.
    """
    if num_kv_heads % group.size == 0:
        return num_kv_heads // group.size
    if group.size % num_kv_heads == 0:
        return 1
    raise ConfigError(
        f"num_key_value_heads={num_kv_heads} and {group.size} tensor-parallel ranks: neither "
        "divides the other",
        hint=f"choose a --tensor-parallel-size that divides {num_kv_heads} or is a multiple of it",
    )


class QKVParallelLinear(MergedColumnParallelLinear):
    """The projections of query, key and value heads as one linear layer, divided by heads.

    Output columns: query heads, key heads, value heads. Where KV heads are replicated, the query
    heads of a rank are those of its KV head, since both are divided in order.
    """

    def __init__(
        self,
        input_size: int,
        *,
        head_size: int,
        num_heads: int,
        num_kv_heads: int,
        group: GroupHandle,
        has_bias: bool,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
    ) -> None:
        num_heads_here = even_share(num_heads, group, "num_attention_heads")
        num_kv_heads_here = local_kv_heads(num_kv_heads, group)
        first_kv_head = group.rank_in_group * num_kv_heads // group.size

        def kv_part(name: str) -> OutputPart:
            return OutputPart(
                name=name,
                total=num_kv_heads * head_size,
                start=first_kv_head * head_size,
                count=num_kv_heads_here * head_size,
            )

        query = even_part("q_proj", num_heads * head_size, group)
        super().__init__(
            input_size,
            (query, kv_part("k_proj"), kv_part("v_proj")),
            has_bias=has_bias,
            dtype=dtype,
            device=device,
        )
        self.num_heads = num_heads_here
        self.num_kv_heads = num_kv_heads_here


class RowParallelLinear(LinearBase):
    """Each rank has some input columns; the partial outputs are summed over the group."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        group: GroupHandle,
        has_bias: bool,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
    ) -> None:
        count = even_share(input_size, group, "input columns")
        super().__init__(count, output_size, has_bias=has_bias, dtype=dtype, device=device)
        self.group = group
        self.total_inputs = input_size

    def forward(self, x_TI: torch.Tensor) -> torch.Tensor:
        """This rank's columns (T, I) -> the whole output (T, O) on every rank."""
        if self.group.size == 1:
            return self.multiply(x_TI, self.bias)
        y_TO = all_reduce(self.multiply(x_TI, None), self.group)
        # Every rank adds the bias once, after the sum: before it, it would count per rank.
        return y_TO if self.bias is None else y_TO + self.bias

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        """What it takes from a checkpoint."""
        rows, columns = self.weight.shape
        start = self.group.rank_in_group * columns
        yield WeightSlice(
            name=f"{prefix}.weight",
            shape=(rows, self.total_inputs),
            source=(slice(0, rows), slice(start, start + columns)),
            target=self.weight,
        )
        if self.bias is not None:
            yield whole_tensor(f"{prefix}.bias", self.bias)
