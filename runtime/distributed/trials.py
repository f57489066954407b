"""Trying a way to sum before it is used: right results in and out of a CUDA graph, and its time.

Every step is taken by all ranks, which then tell each other how it went (over the CPU channel), so
they draw the same conclusions: what failed on one rank has failed on all.

Numbers are whole and small, so that their sums are exact in 16-bit types, and no rank, element or
round can stand in for another.
"""

import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Final, Protocol

import msgspec
import torch
import torch.nn.functional as F

from vcli.runtime.distributed.exchange import gather_bytes
from vcli.runtime.distributed.group import GroupHandle
from vcli.topology.errors import UnfitError

#: Calls in one graph, one right after the other: what is overwritten too early shows.
CALLS: Final = 8
NUM_REPLAYS: Final = 3
_NUM_TIMED: Final = 9
#: A step whose kernels take longer than this hangs; longer than the fused kernel's own patience.
STEP_LIMIT_S: Final = 20.0
_POLL_S: Final = 0.0005
_EPS: Final = 1e-5
#: Largest difference of a norm, which is not exact: a few units in the last place.
_TOLERANCE: Final = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-5}


class DeviceStuckError(RuntimeError):
    """Kernels did not end in time; nothing more can be done on this device by this process."""


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """How a step went on one rank, or on all together. `reason` is empty where it went well."""

    reason: str = ""
    is_stuck: bool = False
    seconds: float = 0.0


class Trial(Protocol):
    """One way to sum at one size. Only `launch` needs the other ranks."""

    name: str

    def prepare(self) -> None:
        """Compiles and allocates; raises where this way can't be gone."""

    def fill(self, round_number: int) -> None:
        """New inputs."""

    def launch(self) -> None:
        """`CALLS` calls, each with inputs of its own."""

    def difference(self) -> str:
        """What is wrong with the results of the last launch or replay; empty: nothing."""


class SumTrial:
    """`CALLS` sums of tensors of `num_bytes` by `reduce`, which may overwrite its input."""

    def __init__(
        self,
        name: str,
        reduce: Callable[[torch.Tensor], torch.Tensor],
        group: GroupHandle,
        *,
        num_bytes: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.name = name
        self._reduce = reduce
        self._group = group
        self._num_elements = num_bytes // dtype.itemsize
        self._dtype = dtype
        self._device = device
        self._round = 0
        self._inputs: list[torch.Tensor] = []
        self._sums: list[torch.Tensor] = []

    def prepare(self) -> None:
        """Allocates the inputs."""
        self._inputs = [
            torch.zeros(self._num_elements, dtype=self._dtype, device=self._device)
            for _ in range(CALLS)
        ]

    def fill(self, round_number: int) -> None:
        """Other numbers for each call and round."""
        self._round = round_number
        for call, tensor in enumerate(self._inputs):
            tensor.copy_(self._contribution(self._group.rank_in_group, call))

    def launch(self) -> None:
        """Sums all inputs."""
        self._sums = [self._reduce(tensor) for tensor in self._inputs]

    def difference(self) -> str:
        """The first wrong element of the first wrong call."""
        for call, summed in enumerate(self._sums):
            wrong = first_difference(summed, self.expected(call))
            if wrong:
                return f"call {call + 1} of {CALLS}: {wrong}"
        return ""

    def expected(self, call: int) -> torch.Tensor:
        """The sum over all ranks, float32."""
        parts = [self._contribution(rank, call) for rank in range(self._group.size)]
        return torch.stack(parts).sum(0)

    def _contribution(self, rank_in_group: int, call: int) -> torch.Tensor:
        index = torch.arange(self._num_elements, device=self._device)
        seed = rank_in_group * 5 + call * 3 + self._round * 11
        return ((index * (rank_in_group % 16 + 1) + seed) % 17 - 8).float()


class NormTrial:
    """`CALLS` sums of (num_rows, row_size), each added to a residual and normed in one kernel.

    `fused(x, residual, weight, eps)` gives the norm and writes the sum into `residual`; `compile`
    makes it ready, with no other rank; `lost_peer` tells who did not come.
    """

    def __init__(
        self,
        sums: SumTrial,
        row_size: int,
        *,
        fused: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor],
        compile_kernel: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None],
        lost_peer: Callable[[], int | None],
    ) -> None:
        self.name = sums.name
        self._sums = sums
        self._row_size = row_size
        self._fused = fused
        self._compile = compile_kernel
        self._lost_peer = lost_peer
        self._weight = torch.empty(0)
        self._residuals: list[torch.Tensor] = []
        self._normed: list[torch.Tensor] = []

    def prepare(self) -> None:
        """Allocates, and compiles the kernel."""
        self._sums.prepare()
        rows = self._rows()
        weight = torch.arange(self._row_size, device=rows[0].device) % 7 * 0.25 + 0.5
        self._weight = weight.to(rows[0].dtype)
        self._residuals = [torch.zeros_like(row) for row in rows]
        self._compile(rows[0], self._residuals[0], self._weight)

    def fill(self, round_number: int) -> None:
        """New inputs and residuals."""
        self._sums.fill(round_number)
        for call, residual in enumerate(self._residuals):
            residual.copy_(self._first_residual(call, round_number))
        self._round = round_number

    def launch(self) -> None:
        """Sums, adds and norms all inputs."""
        self._normed = [
            self._fused(row, residual, self._weight, _EPS)
            for row, residual in zip(self._rows(), self._residuals, strict=True)
        ]

    def difference(self) -> str:
        """The first wrong residual or norm."""
        lost = self._lost_peer()
        if lost is not None:
            return f"rank {lost} of the group did not come"
        for call, (normed, residual) in enumerate(zip(self._normed, self._residuals, strict=True)):
            summed = self._sums.expected(call).view_as(residual)
            added = summed + self._first_residual(call, self._round)
            wrong = first_difference(residual.flatten(), added.flatten())
            if wrong:
                return f"call {call + 1} of {CALLS}: residual: {wrong}"
            reference = F.rms_norm(added, (self._row_size,), eps=_EPS) * self._weight.float()
            error = ((normed.float() - reference).abs() / (reference.abs() + 1e-3)).max().item()
            # Written so that not-a-number is an error.
            if not error <= _TOLERANCE[normed.dtype]:
                return f"call {call + 1} of {CALLS}: the norm is off by {error:.2g} of its value"
        return ""

    def _rows(self) -> list[torch.Tensor]:
        return [tensor.view(-1, self._row_size) for tensor in self._sums._inputs]

    def _first_residual(self, call: int, round_number: int) -> torch.Tensor:
        rows = self._rows()[0]
        index = torch.arange(rows.numel(), device=rows.device)
        return ((index * 7 + call + round_number * 5) % 13 - 6).float().view_as(rows)


def run_trial(
    trial: Trial, group: GroupHandle, device: torch.device, *, deadline: float
) -> StepReport:
    """Tries it on all ranks of `group` (without a communicator of its own kind).

    The time is that of one call, on the slowest rank; on a GPU in a graph. `deadline`
    (time.monotonic) ends it between two steps.

    Raises:
        UnfitError: kernels hang, on any rank; this process can't use its GPU any more.
    """
    report = together(group, lambda: _prepare(trial, deadline))
    if not report.reason:
        report = together(group, lambda: _round(trial, device, 0, trial.launch))
    if report.reason or device.type != "cuda":
        return report
    graph = torch.cuda.CUDAGraph()
    try:
        report = together(group, lambda: _capture(trial, graph))
        for round_number in range(1, NUM_REPLAYS + 1):
            if not report.reason:
                report = _replay(trial, group, device, graph, round_number)
        if not report.reason:
            report = together(group, lambda: _time_replays(graph, device))
    finally:
        graph.reset()
    return report


def together(group: GroupHandle, step: Callable[[], float | None]) -> StepReport:
    """`step` on every rank; the first reason of any rank, and the longest time.

    Raises:
        UnfitError: on any rank the device is stuck.
    """
    reports = on_each_rank(group, step)
    reason = next((report.reason for report in reports if report.reason), "")
    return StepReport(reason=reason, seconds=max(report.seconds for report in reports))


def on_each_rank(group: GroupHandle, step: Callable[[], float | None]) -> list[StepReport]:
    """`step` on every rank; how it went on each, in rank order, known to all.

    Raises:
        UnfitError: on any rank the device is stuck.
    """
    title = f"rank {group.ranks[group.rank_in_group]}"
    try:
        mine = StepReport(seconds=step() or 0.0)
    except DeviceStuckError as error:
        mine = StepReport(reason=f"{title}: {error}", is_stuck=True)
    except Exception as error:  # noqa: BLE001 - border: any failure means another way to sum
        text = (str(error).splitlines() or [""])[0]
        mine = StepReport(reason=f"{title}: {type(error).__name__}: {text}")
    reports = [
        msgspec.msgpack.decode(data, type=StepReport)
        for data in gather_bytes(msgspec.msgpack.encode(mine), group)
    ]
    if any(report.is_stuck for report in reports):
        reason = next(report.reason for report in reports if report.reason)
        raise UnfitError(
            f"{group.kind} group {list(group.ranks)}: kernels on the GPUs do not end: {reason}",
            hint="vcli doctor checks the links between the devices",
        )
    return reports


def first_difference(tensor: torch.Tensor, expected: torch.Tensor) -> str:
    """The first element of two flat tensors that differs, in words; empty: none."""
    wrong = (tensor.float() != expected).nonzero().flatten()
    if not wrong.numel():
        return ""
    index = int(wrong[0])
    return (
        f"{wrong.numel()} of {expected.numel()} sums are wrong: element {index} is "
        f"{tensor[index].item():g}, expected {expected[index].item():g}"
    )


def wait_for_device(device: torch.device, limit_s: float = STEP_LIMIT_S) -> None:
    """Returns when all that was launched has ended.

    Raises:
        DeviceStuckError: not within `limit_s`.
    """
    if device.type != "cuda":
        return
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    deadline = time.monotonic() + limit_s
    while not event.query():  # type: ignore[no-untyped-call]
        if time.monotonic() > deadline:
            raise DeviceStuckError(f"{device} was still busy after {limit_s:g} s")
        time.sleep(_POLL_S)


def _prepare(trial: Trial, deadline: float) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError("no time left to try it")
    trial.prepare()


def _round(
    trial: Trial, device: torch.device, round_number: int, launch: Callable[[], None]
) -> float:
    """Seconds of one call, launches and checks apart."""
    trial.fill(round_number)
    wait_for_device(device)
    started = time.perf_counter()
    launch()
    wait_for_device(device)
    seconds = time.perf_counter() - started
    difference = trial.difference()
    if difference:
        raise ValueError(difference)
    return seconds / CALLS


def _replay(
    trial: Trial,
    group: GroupHandle,
    device: torch.device,
    graph: torch.cuda.CUDAGraph,
    round_number: int,
) -> StepReport:
    return together(group, lambda: _round(trial, device, round_number, graph.replay))


def _capture(trial: Trial, graph: torch.cuda.CUDAGraph) -> None:
    # Thread-local: what the watchdog thread of NCCL does meanwhile is no error.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        trial.launch()


def _time_replays(graph: torch.cuda.CUDAGraph, device: torch.device) -> float:
    # All are launched before any is waited for: only the first waits for a rank that is behind.
    events = [timing_event() for _ in range(_NUM_TIMED + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    wait_for_device(device)
    times_ms = [start.elapsed_time(end) for start, end in pairwise(events)]
    return float(statistics.median(times_ms)) / 1e3 / CALLS


def timing_event() -> torch.cuda.Event:
    """An event that knows its time."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
