# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: ANN001, ANN201
"""Programmatic dependent launch: a kernel is set up while the one before it still runs.

Every kernel here calls `wait_for_previous` before it touches memory that others write. A kernel
launched with the attribute and without the wait would race with its predecessor.
"""

from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

#: 2-byte numbers in a cache line.
LINE = tl.constexpr(64)


def ceil_div(number: int, divisor: int) -> int:
    """`number / divisor`, rounded up; as `triton.cdiv`, which takes 6 us on the host."""
    return -(-number // divisor)


def next_power_of_2(number: int) -> int:
    """The smallest that is not below `number` (from 1 on), for the same reason."""
    return 1 << (number - 1).bit_length()


class PdlSwitch:
    """Whether kernels overlap with the end of their predecessors. One for the process."""

    is_on = False


def pdl_options() -> dict[str, Any]:
    """Keyword arguments for a launch."""
    # The interpreter knows no `launch_pdl`.
    return {"PDL": True, "launch_pdl": True} if PdlSwitch.is_on else {"PDL": False}


class LayerLaunches:
    """The launches of one kernel by the layers of a step, which differ in addresses alone.

    Triton looks for the compiled kernel at every launch, by the types and values of all arguments,
    which takes the host longer than the launch itself. Here only the first layer's does.
    """

    def __init__(self) -> None:
        self._compiled: Any = None
        self._constants: tuple[Any, ...] = ()

    def launch(
        self, kernel: Any, grid: tuple[int, int, int], *arguments: Any, **constants: Any
    ) -> None:
        """As `kernel[grid](*arguments, **constants)`."""
        if self._compiled is not None:
            self._compiled[grid](*arguments, *self._constants)
            return
        # None in the interpreter.
        self._compiled = kernel[grid](*arguments, **constants)
        names = kernel.arg_names[len(arguments) :]
        self._constants = tuple(constants[name] for name in names)


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Lets the next kernel be set up, then waits until the previous one's writes are visible."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def prefetch_lines(pointers):
    """Starts to bring the lines at `pointers` into the L2 cache; waits for nothing."""
    tl.inline_asm_elementwise(
        "{ prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
