# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: ANN001, ANN202, PLR0917
"""Linear layers for few rows, bound by reading the weight once.

One row: each program multiplies whole rows of the weight in registers. More rows: tiles of the
weight come by the tensor memory accelerator and are the left side of the product, so that its 64
rows are outputs and the few rows of the input its columns.

Shapes: M rows, I inputs, O outputs.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from vcli.runtime.layers.kernels.launch import (
    ceil_div,
    next_power_of_2,
    pdl_options,
    wait_for_previous,
)

MAX_ROWS = 64
#: Columns of the smallest matrix tile.
MIN_ROWS = 16
#: Most rows that were measured to be faster here than by cuBLAS, and bytes of the smallest weight.
MOST_ROWS = 32
LEAST_BYTES = 2 << 20
#: From here on, outputs alone fill a GPU.
MANY_OUTPUTS = 16384
#: Most tiles of outputs whose inputs are split over programs.
MAX_SPLIT_TILES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorTuning:
    """Outputs and inputs of a tile, warps, tiles that are loaded ahead (1 or 2)."""

    outputs: int = 2
    inputs: int = 1024
    num_warps: int = 4
    ahead: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixTuning:
    """Outputs and inputs of a tile, warps, pipeline stages, parts of the inputs."""

    outputs: int = 64
    inputs: int = 128
    num_warps: int = 4
    num_stages: int = 6
    num_splits: int = 1


@triton.jit
def _weight_tile(tile, first, column, is_row, num_inputs: tl.constexpr, EVEN: tl.constexpr):
    """What is read once should not push out what is read again."""
    if EVEN:
        return tl.load(tile + first, mask=is_row[:, None], other=0.0, eviction_policy="evict_first")
    inside = is_row[:, None] & (first + column < num_inputs)[None, :]
    return tl.load(tile + first, mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def _vector_kernel(
    x,
    weight,
    bias,
    output,
    num_outputs,
    num_inputs: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    AHEAD: tl.constexpr,
    EVEN: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    column = tl.arange(0, INPUTS)
    is_row = row < num_outputs
    tile = weight + row.to(tl.int64)[:, None] * num_inputs + column[None, :]
    # The weight is read ahead, and its first tiles while the previous kernel ends.
    loaded = _weight_tile(tile, 0, column, is_row, num_inputs, EVEN)
    if AHEAD == 2:
        second = _weight_tile(tile, INPUTS, column, is_row, num_inputs, EVEN)
    wait_for_previous(PDL)
    summed = tl.zeros([OUTPUTS, INPUTS], tl.float32)
    for first in tl.static_range(0, num_inputs, INPUTS):
        # Compared in place: a variable would not be known when this is compiled.
        if first + AHEAD * INPUTS < num_inputs:
            ahead = _weight_tile(tile, first + AHEAD * INPUTS, column, is_row, num_inputs, EVEN)
        if EVEN:
            values = tl.load(x + first + column)
        else:
            values = tl.load(x + first + column, mask=first + column < num_inputs, other=0.0)
        summed += loaded.to(tl.float32) * values.to(tl.float32)[None, :]
        if AHEAD == 2:
            loaded = second
            if first + AHEAD * INPUTS < num_inputs:
                second = ahead
        elif first + AHEAD * INPUTS < num_inputs:
            loaded = ahead
    result = tl.sum(summed, axis=1)
    if HAS_BIAS:
        result += tl.load(bias + row, mask=is_row, other=0.0).to(tl.float32)
    tl.store(output + row, result.to(output.dtype.element_ty), mask=is_row)


@triton.jit(do_not_specialize=["num_rows"])
def _matrix_kernel(
    x, weight, bias, output, partial, tickets, num_rows, num_outputs, num_inputs,
    HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    tile = tl.program_id(0)
    split = tl.program_id(1)
    first_output = tile * OUTPUTS
    row = tl.arange(0, ROWS)
    column = tl.arange(0, INPUTS)
    target = first_output + tl.arange(0, OUTPUTS)
    is_row, is_target = row < num_rows, target < num_outputs
    share = tl.cdiv(tl.cdiv(num_inputs, INPUTS), SPLITS) * INPUTS
    start = split * share
    summed = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for first in range(start, tl.minimum(start + share, num_inputs), INPUTS):
        # What lies outside the weight is zero.
        loaded = weight.load([first_output, first])
        mask = is_row[:, None] & (first + column < num_inputs)[None, :]
        values = tl.load(
            x + row[:, None] * num_inputs + first + column[None, :], mask=mask, other=0.0
        )
        summed = tl.dot(loaded, tl.trans(values), summed)
    if SPLITS > 1:
        place = tl.arange(0, OUTPUTS)[:, None] * ROWS + row[None, :]
        first_part = partial + tile.to(tl.int64) * SPLITS * OUTPUTS * ROWS
        tl.store(first_part + split * OUTPUTS * ROWS + place, summed)
        # All threads have stored before one of them releases the stores with the ticket.
        tl.debug_barrier()
        if tl.atomic_add(tickets + tile, 1, sem="acq_rel", scope="gpu") < SPLITS - 1:
            return
        tl.store(tickets + tile, 0)
        summed = tl.zeros([OUTPUTS, ROWS], tl.float32)
        for part in tl.static_range(SPLITS):
            summed += tl.load(first_part + part * OUTPUTS * ROWS + place)
    if HAS_BIAS:
        summed += tl.load(bias + target, mask=is_target, other=0.0).to(tl.float32)[:, None]
    tl.store(
        output + row[None, :] * num_outputs + target[:, None],
        summed.to(output.dtype.element_ty),
        mask=is_row[None, :] & is_target[:, None],
    )


def can_use_skinny(m: int, o: int, i: int) -> bool:
    """Whether `skinny_linear` is faster than cuBLAS for `m` rows and a 2-byte weight (o, i)."""
    if m == 1:
        return True
    most_rows = 2 * MOST_ROWS if o >= MANY_OUTPUTS else MOST_ROWS
    # The accelerator wants rows of whole 16 bytes.
    return m <= most_rows and 2 * o * i >= LEAST_BYTES and i % 8 == 0


def vector_tuning(o: int, i: int) -> VectorTuning:
    """The fastest known for one row: measured on H200 within layers of 1,024 and 4,096 hidden."""
    if o >= MANY_OUTPUTS:
        return VectorTuning(ahead=2)
    return VectorTuning(inputs=2048) if i > o >= 4096 else VectorTuning()


def matrix_tuning(o: int, i: int) -> MatrixTuning:
    """The fastest known for several rows."""
    if o >= MANY_OUTPUTS:
        return MatrixTuning(outputs=128, num_warps=8, num_stages=4)
    # Fewer programs than multiprocessors would leave some of them idle.
    return MatrixTuning(num_splits=2) if o <= min(i, 4096) else MatrixTuning()


class _Tickets:
    """For each device, a counter for each tile; a launch leaves zeros behind."""

    def __init__(self) -> None:
        self._of: dict[torch.device, torch.Tensor] = {}

    def on(self, device: torch.device) -> torch.Tensor:
        """(MAX_SPLIT_TILES,) int32."""
        if device not in self._of:
            self._of[device] = torch.zeros(MAX_SPLIT_TILES, dtype=torch.int32, device=device)
        return self._of[device]


_TICKETS = _Tickets()


def skinny_linear(
    x_MI: torch.Tensor,
    weight_OI: torch.Tensor,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    *,
    tuning: VectorTuning | MatrixTuning | None = None,
) -> torch.Tensor:
    """`F.linear` (M, O) for at most 64 rows; `out` (M, O) receives the result.

    With several rows I is a multiple of 8. One stream of a device at a time may use it.
    """
    num_rows = x_MI.shape[0]
    num_outputs, num_inputs = weight_OI.shape
    assert num_rows <= MAX_ROWS, f"{num_rows} rows, {MAX_ROWS} at most"
    assert x_MI.is_contiguous()
    assert weight_OI.is_contiguous()
    assert x_MI.shape[1] == num_inputs, f"{x_MI.shape} for {weight_OI.shape}"
    if out is None:
        out = x_MI.new_empty(num_rows, num_outputs)
    assert out.is_contiguous()
    if num_rows == 1:
        assert not isinstance(tuning, MatrixTuning)
        _multiply_vector(
            x_MI, weight_OI, bias, out, tuning or vector_tuning(num_outputs, num_inputs)
        )
    elif num_rows:
        assert not isinstance(tuning, VectorTuning)
        _multiply_matrix(
            x_MI, weight_OI, bias, out, tuning or matrix_tuning(num_outputs, num_inputs)
        )
    return out


def _multiply_vector(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    tuning: VectorTuning,
) -> None:
    num_outputs, num_inputs = weight.shape
    _vector_kernel[(ceil_div(num_outputs, tuning.outputs),)](
        x, weight, x if bias is None else bias, out, num_outputs, num_inputs,
        HAS_BIAS=bias is not None,
        OUTPUTS=tuning.outputs,
        INPUTS=tuning.inputs,
        AHEAD=tuning.ahead if num_inputs > tuning.inputs else 1,
        EVEN=num_inputs % tuning.inputs == 0,
        num_warps=tuning.num_warps,
        **pdl_options(),
    )  # fmt: skip


def _multiply_matrix(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    tuning: MatrixTuning,
) -> None:
    num_rows, (num_outputs, num_inputs) = x.shape[0], weight.shape
    num_tiles = ceil_div(num_outputs, tuning.outputs)
    num_splits = tuning.num_splits if num_tiles <= MAX_SPLIT_TILES else 1
    padded_rows = max(next_power_of_2(num_rows), MIN_ROWS)
    partial, tickets = out, out
    if num_splits > 1:
        size = num_tiles * num_splits * tuning.outputs * padded_rows
        partial = torch.empty(size, dtype=torch.float32, device=x.device)
        tickets = _TICKETS.on(x.device)
    _matrix_kernel[(num_tiles, num_splits)](
        x, TensorDescriptor.from_tensor(weight, [tuning.outputs, tuning.inputs]),
        x if bias is None else bias, out, partial, tickets, num_rows, num_outputs, num_inputs,
        HAS_BIAS=bias is not None,
        ROWS=padded_rows,
        OUTPUTS=tuning.outputs,
        INPUTS=tuning.inputs,
        SPLITS=num_splits,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        **pdl_options(),
    )  # fmt: skip
