"""What a group of devices reaches: sums by size, copies over each pair, a sum in a graph, results.

All ranks of the group call each together; the results are plain data.
"""

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Final

import msgspec
import torch
import torch.distributed as dist

from vcli.runtime.distributed.group import GroupHandle
from vcli.runtime.distributed.symmetric import INPUT_BYTES, PeerMemory
from vcli.runtime.distributed.trials import (
    SumTrial,
    on_each_rank,
    run_trial,
    timing_event,
    together,
    wait_for_device,
)
from vcli.topology.errors import UnfitError

SIZES: Final = (8 << 10, 256 << 10, 8 << 20, 64 << 20, 256 << 20)
_NUM_WARM: Final = 3
_NUM_TIMED: Final = 10
_NUM_NUMBERS: Final = 4096


class SumTime(msgspec.Struct, frozen=True, kw_only=True):
    """One all-reduce; the bus bandwidth is what each link carries, whatever the number of ranks."""

    num_bytes: int
    us: float
    busbw_GBps: float


class PairCopy(msgspec.Struct, frozen=True, kw_only=True):
    """A copy from the GPU of `src` to that of `dst` (global ranks), compared there."""

    src: int
    dst: int
    GBps: float
    wrong_bytes: int


def measure_all_reduce(
    group: GroupHandle, device: torch.device, num_bytes: int, limit_s: float
) -> SumTime:
    """bfloat16 sums by NCCL, one right after the other.

    Raises:
        UnfitError: they do not end within `limit_s`, on any rank.
    """
    tensor = torch.zeros(num_bytes // 2, dtype=torch.bfloat16, device=device)

    def step() -> float:
        start, end = (timing_event() for _ in range(2))
        for index in range(_NUM_WARM + _NUM_TIMED):
            if index == _NUM_WARM:
                start.record()
            dist.all_reduce(tensor, group=group.device_group)
        end.record()
        wait_for_device(device, limit_s)
        return float(start.elapsed_time(end)) / 1e3 / _NUM_TIMED

    report = together(group, step)
    if report.reason:
        raise UnfitError(report.reason)
    share = 2 * (group.size - 1) / group.size
    busbw = num_bytes * share / report.seconds / 1e9
    return SumTime(num_bytes=num_bytes, us=report.seconds * 1e6, busbw_GBps=busbw)


def pair_rounds(num_ranks: int) -> Iterator[list[tuple[int, int]]]:
    """Every ordered pair once, in rounds in which no rank stands in two pairs.

    Within a round both directions of a pair never run at once.
    """
    rest = list(combinations(range(num_ranks), 2))
    while rest:
        busy: set[int] = set()
        chosen = []
        for pair in rest:
            if busy.isdisjoint(pair):
                chosen.append(pair)
                busy.update(pair)
        rest = [pair for pair in rest if pair not in chosen]
        yield chosen
        yield [(dst, src) for src, dst in chosen]


def copy_pairs(
    memory: PeerMemory,
    group: GroupHandle,
    device: torch.device,
    pairs: Sequence[tuple[int, int]],
) -> list[PairCopy]:
    """Copies at the same time from `src` to `dst` of each pair (ranks in the group).

    No rank may stand in two pairs; those that stand in none wait.

    Raises:
        UnfitError: it failed, on any rank.
    """
    own = group.rank_in_group
    mine = next((pair for pair in pairs if own in pair), (own, own))
    index = torch.arange(INPUT_BYTES // 4, device=device, dtype=torch.int32)
    pattern = (index * 2654435 + mine[0] * 97 + mine[1] * 31).view(torch.uint8)

    def copy() -> float:
        src, dst = mine
        if own != src or src == dst:
            return 0.0
        target = memory.of_rank(dst)[:INPUT_BYTES]
        target.copy_(pattern)
        start, end = (timing_event() for _ in range(2))
        start.record()
        for _ in range(_NUM_TIMED):
            target.copy_(pattern)
        end.record()
        wait_for_device(device)
        return float(start.elapsed_time(end)) / 1e3 / _NUM_TIMED

    def count_wrong() -> float:
        is_target = own == mine[1] != mine[0]
        return float((memory.own[:INPUT_BYTES] != pattern).sum()) if is_target else 0.0

    copied = on_each_rank(group, copy)
    counted = on_each_rank(group, count_wrong)
    for report in (*copied, *counted):
        if report.reason:
            raise UnfitError(report.reason)
    return [
        PairCopy(
            src=group.ranks[src],
            dst=group.ranks[dst],
            GBps=INPUT_BYTES / copied[src].seconds / 1e9,
            wrong_bytes=int(counted[dst].seconds),
        )
        for src, dst in pairs
    ]


def replay_all_reduce(group: GroupHandle, device: torch.device, deadline: float) -> float:
    """Microseconds of a 64 KiB sum by NCCL in a captured graph, replayed with right results.

    Raises:
        UnfitError: it failed, on any rank.
    """

    def reduce(tensor: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(tensor, group=group.device_group)
        return tensor

    trial = SumTrial("NCCL", reduce, group, num_bytes=64 << 10, dtype=torch.bfloat16, device=device)
    report = run_trial(trial, group, device, deadline=deadline)
    if report.reason:
        raise UnfitError(report.reason)
    return report.seconds * 1e6


def wrong_collectives(group: GroupHandle, device: torch.device) -> list[str]:
    """The operations whose results are wrong on this rank; numbers differ by rank and element."""
    own, size, channel = group.rank_in_group, group.size, group.device_group

    def numbers(src: int, dst: int = 0) -> torch.Tensor:
        index = torch.arange(_NUM_NUMBERS, device=device)
        return (index % 97 + src * 100 + dst * 7).float()

    def all_reduce() -> tuple[torch.Tensor, torch.Tensor]:
        tensor = numbers(own)
        dist.all_reduce(tensor, group=channel)
        return tensor, torch.stack([numbers(rank) for rank in range(size)]).sum(0)

    def all_gather() -> tuple[torch.Tensor, torch.Tensor]:
        gathered = torch.empty(size * _NUM_NUMBERS, device=device)
        dist.all_gather_into_tensor(gathered, numbers(own), group=channel)
        return gathered, torch.cat([numbers(rank) for rank in range(size)])

    def broadcast() -> tuple[torch.Tensor, torch.Tensor]:
        tensor = numbers(own)
        dist.broadcast(tensor, src=group.ranks[-1], group=channel)
        return tensor, numbers(size - 1)

    def all_to_all() -> tuple[torch.Tensor, torch.Tensor]:
        received = torch.empty(size * _NUM_NUMBERS, device=device)
        sent = torch.cat([numbers(own, dst) for dst in range(size)])
        dist.all_to_all_single(received, sent, group=channel)
        return received, torch.cat([numbers(src, own) for src in range(size)])

    wrong = []
    for operation in (all_reduce, all_gather, broadcast, all_to_all):
        result, expected = operation()
        if not torch.equal(result, expected):
            wrong.append(operation.__name__)
    return wrong
