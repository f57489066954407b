"""Which way sums a TP group on GPUs: tried on the spot, all ranks together, the fastest that works.

In order: memory on every rank, the memory of the peers, data written and read over each pair of
GPUs, each way at each size (`trials`). What fails on one rank is dropped on all, with the reason in
the group's report. What is left is NCCL, whose sums are checked too.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import msgspec
import torch

from vcli.runtime.distributed.group import GroupHandle
from vcli.runtime.distributed.parallel_state import ParallelContext
from vcli.runtime.distributed.symmetric import (
    INPUT_BYTES,
    SERVICE_POLLS,
    AllReduceLimits,
    PeerMemory,
    SymmetricCommunicator,
    fits_regions,
)
from vcli.runtime.distributed.trials import NormTrial, SumTrial, Trial, run_trial, together
from vcli.runtime.distributed.verify import verify_all_reduce, verify_groups, verify_pairs
from vcli.runtime.log import get_logger
from vcli.runtime.messages import GroupReport

logger = get_logger(__name__)

SUM_BYTES: Final = (8 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, INPUT_BYTES)
NORM_ROWS: Final = (1, 8, 32, 128, 256)
LIMIT_S: Final = 60.0
#: A way that is slower than another by less than this is as good: times differ from run to run.
_NOISE: Final = 1.03

Times = dict[int, float]
"""Seconds of one call by payload in bytes, up to the first size at which it failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to sum and the sizes to try it at; `make_trial` gets the bytes."""

    name: str
    sizes: Sequence[int]
    make_trial: Callable[[int], Trial]


def prepare_groups(
    context: ParallelContext,
    device: torch.device,
    *,
    ways: tuple[str, ...],
    dtype: torch.dtype,
    row_size: int,
    limit_s: float = LIMIT_S,
) -> tuple[ParallelContext, list[GroupReport]]:
    """The context with the TP group's fastest way to sum, and the checked report of each group.

    All ranks call it. `ways` is what the plan wants, in order; `row_size` the model's hidden size.

    Raises:
        UnfitError: kernels hang on a GPU.
    """
    plain = context.tp
    if device.type != "cuda" or "symm_mem" not in ways or plain.size == 1:
        return context, verify_groups(context, device)
    memory, pairs, reasons = open_memory(plain, device)
    limits = AllReduceLimits()
    if memory is not None:
        communicator = SymmetricCommunicator(plain, memory, device)
        reasons = choose_limits(
            communicator, plain, device, dtype=dtype, row_size=row_size, limit_s=limit_s
        )
        limits = communicator.limits
        if limits == AllReduceLimits():
            communicator.close()
        else:
            communicator.max_polls = SERVICE_POLLS
            context = replace(context, tp=replace(plain, communicator=communicator))
    for reason in reasons:
        logger.warning("%s group %s: %s", plain.kind, list(plain.ranks), reason)
    reports = verify_groups(context, device)
    for index, report in enumerate(reports):
        if report.kind == plain.kind:
            by_nccl = verify_all_reduce(plain, device)
            reports[index] = _with_choice(report, by_nccl, limits, pairs, reasons)
    return context, reports


def close_communicators(context: ParallelContext) -> None:
    """Gives the shared memory back: after the graphs, with the device idle, before the groups."""
    for group in context.groups:
        if isinstance(group.communicator, SymmetricCommunicator):
            group.communicator.close()


def open_memory(
    group: GroupHandle, device: torch.device
) -> tuple[PeerMemory | None, int, tuple[str, ...]]:
    """Memory that the GPUs of `group` share, pairs of GPUs with right data, why there is none."""
    opened: list[PeerMemory] = []
    pairs = 0
    reason = together(group, lambda: opened.append(PeerMemory(group.size, device))).reason
    if not reason:
        reason = together(group, lambda: opened[0].meet(group)).reason
    if not reason:
        pairs, reason = verify_pairs(opened[0], group, device)
    if not reason:
        return opened[0], pairs, ()
    for memory in opened:
        memory.close()
    return None, pairs, (f"no sums over peer memory: {reason}",)


def choose_limits(
    communicator: SymmetricCommunicator,
    group: GroupHandle,
    device: torch.device,
    *,
    dtype: torch.dtype,
    row_size: int,
    limit_s: float = LIMIT_S,
) -> tuple[str, ...]:
    """Sets what each way of `communicator` takes; gives the reasons for which some take nothing."""
    deadline = time.monotonic() + limit_s
    times, reasons = try_ways(sum_ways(communicator, group, device, dtype), group, device, deadline)
    communicator.limits = sum_limits(times)
    norms = norm_ways(communicator, group, device, dtype, row_size)
    norm_times, more_reasons = try_ways(norms, group, device, deadline)
    communicator.limits = replace(
        communicator.limits,
        fused_norm=prefix_limit(norm_times["fused norm"], norm_times["separate norm"]),
    )
    return reasons + more_reasons


def sum_ways(
    communicator: SymmetricCommunicator,
    group: GroupHandle,
    device: torch.device,
    dtype: torch.dtype,
) -> list[Way]:
    """The three ways to sum alone. All pay for a kernel that writes what is summed."""

    def way(name: str, reduce: Callable[[torch.Tensor], torch.Tensor]) -> Way:
        return Way(
            name=name,
            sizes=SUM_BYTES,
            make_trial=lambda size: SumTrial(
                name, reduce, group, num_bytes=size, dtype=dtype, device=device
            ),
        )

    return [
        way("one-shot", communicator.one_shot),
        way("two-shot", communicator.two_shot),
        way("NCCL", lambda tensor: communicator.nccl(tensor.clone())),
    ]


def norm_ways(
    communicator: SymmetricCommunicator,
    group: GroupHandle,
    device: torch.device,
    dtype: torch.dtype,
    row_size: int,
) -> list[Way]:
    """The sum with the norm in one kernel, and the chosen sum with one more kernel after it."""

    def separate(tensor: torch.Tensor) -> torch.Tensor:
        produced = communicator.input_buffer(tuple(tensor.shape), tensor.dtype)
        produced = tensor.clone() if produced is None else produced.copy_(tensor)
        return communicator.all_reduce(produced).add_(0)

    def fused(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        return communicator.fused_norm(x.clone(), residual, weight, eps)

    def fused_trial(size: int) -> Trial:
        return NormTrial(
            sums("fused norm", separate, size),
            row_size,
            fused=fused,
            compile_kernel=communicator.compile_fused_norm,
            lost_peer=communicator.lost_peer,
        )

    def sums(name: str, reduce: Callable[[torch.Tensor], torch.Tensor], num_bytes: int) -> SumTrial:
        return SumTrial(name, reduce, group, num_bytes=num_bytes, dtype=dtype, device=device)

    item = dtype.itemsize
    sizes = [
        num_rows * row_size * item
        for num_rows in NORM_ROWS
        if fits_regions(num_rows, row_size, item)
    ]
    return [
        Way(
            name="separate norm",
            sizes=sizes,
            make_trial=lambda size: sums("separate norm", separate, size),
        ),
        Way(name="fused norm", sizes=sizes, make_trial=fused_trial),
    ]


def try_ways(
    ways: Sequence[Way], group: GroupHandle, device: torch.device, deadline: float
) -> tuple[dict[str, Times], tuple[str, ...]]:
    """The times of each way, the same on all ranks, and what was wrong with those that failed."""
    times: dict[str, Times] = {way.name: {} for way in ways}
    reasons = []
    for way in ways:
        for size in way.sizes:
            report = run_trial(way.make_trial(size), group, device, deadline=deadline)
            if report.reason:
                reasons.append(f"{way.name} at {bytes_text(size)} is out: {report.reason}")
                break
            times[way.name][size] = report.seconds
    return times, tuple(reasons)


def sum_limits(times: dict[str, Times]) -> AllReduceLimits:
    """Where one-shot, then two-shot is the fastest, from the smallest size on."""
    one_shot, two_shot, nccl = (times[name] for name in ("one-shot", "two-shot", "NCCL"))
    first = prefix_limit(one_shot, two_shot, nccl)
    larger = {size: seconds for size, seconds in two_shot.items() if size > first}
    return AllReduceLimits(one_shot=first, two_shot=prefix_limit(larger, nccl))


def prefix_limit(way: Times, *others: Times) -> int:
    """The largest size up to which `way` is never slower than the others; 0: at no size.

    Another that has no time for a size failed there.
    """
    limit = 0
    for size in sorted(way):
        rivals = [other[size] for other in others if size in other]
        if rivals and way[size] > _NOISE * min(rivals):
            break
        limit = size
    return limit


def describe(limits: AllReduceLimits) -> str:
    """For the group's report: what goes which way."""
    parts = []
    if limits.one_shot:
        parts.append(f"symmetric one-shot <= {bytes_text(limits.one_shot)}")
    if limits.two_shot:
        parts.append(f"two-shot <= {bytes_text(limits.two_shot)}")
    text = ", ".join((*parts, "NCCL above")) if parts else "nccl"
    if limits.fused_norm:
        text += f"; with the norm in one kernel <= {bytes_text(limits.fused_norm)}"
    return text


def bytes_text(num_bytes: int) -> str:
    """In MiB or KiB."""
    if num_bytes % (1 << 20) == 0:
        return f"{num_bytes >> 20} MiB"
    return f"{num_bytes / 1024:g} KiB"


def _with_choice(
    report: GroupReport,
    plain: GroupReport,
    limits: AllReduceLimits,
    pairs: int,
    reasons: tuple[str, ...],
) -> GroupReport:
    return msgspec.structs.replace(
        report,
        transport=plain.transport,
        version=plain.version,
        all_reduce=describe(limits),
        p2p_pairs_verified=pairs,
        note="; ".join(filter(None, (report.note, *reasons))),
    )
