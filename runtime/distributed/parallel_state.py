"""The groups of this rank, built once from the plan and passed to whoever needs them.

There is no global state here: a layer gets its `GroupHandle` in the constructor.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch.distributed as dist
from torch.distributed import ProcessGroup

from vcli.runtime.distributed.group import CollectiveTrace, GroupHandle, single_rank_group
from vcli.runtime.distributed.object_ring import ObjectRing
from vcli.topology.plan import TopologyPlan

CommBackend = Literal["gloo", "nccl"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelContext:
    """One handle per kind of group. `rank` counts in the torch world, as do the handles' ranks."""

    rank: int
    world_size: int
    tp: GroupHandle
    pp: GroupHandle
    pcp: GroupHandle
    dcp: GroupHandle
    dp: GroupHandle
    ep: GroupHandle

    @property
    def groups(self) -> tuple[GroupHandle, ...]:
        """All handles, in the order in which they were made."""
        return (self.tp, self.dcp, self.pcp, self.pp, self.dp, self.ep)


def comm_backend(device_type: str) -> CommBackend:
    """What moves the tensors of a device."""
    return "nccl" if device_type == "cuda" else "gloo"


def single_rank_context(rank: int = 0) -> ParallelContext:
    """The context of a rank that works alone."""
    return context_of_groups(rank=rank, world_size=1)


def context_of_groups(
    *, rank: int, world_size: int, groups: tuple[GroupHandle, ...] = ()
) -> ParallelContext:
    """A context with these handles; a kind that is not among them is a group of one."""
    given = {group.kind: group for group in groups}

    def group(kind: str) -> GroupHandle:
        return given.get(kind) or single_rank_group(kind, rank)

    return ParallelContext(
        rank=rank,
        world_size=world_size,
        tp=group("TP"),
        pp=group("PP"),
        pcp=group("PCP"),
        dcp=group("DCP"),
        dp=group("DP"),
        ep=group("EP"),
    )


def build_parallel_context(
    plan: TopologyPlan,
    rank: int,
    *,
    backend: CommBackend | None = None,
    timeout_s: float = 300.0,
    trace: CollectiveTrace | None = None,
) -> ParallelContext:
    """Makes every group of the plan and gives the handles of `rank` (of the torch world).

    Call it on all ranks after `join_world`. `timeout_s` is the longest that any collective of
    these groups may wait for a peer. Without `backend` the plan's device type decides.
    """
    backend = backend or comm_backend(plan.device_type)
    timeout = timedelta(seconds=timeout_s)
    channels: dict[tuple[int, ...], tuple[ProcessGroup, ProcessGroup]] = {}
    rings: dict[tuple[int, ...], ObjectRing] = {}
    handles = []
    # torch wants every rank to make every group, its own or not, in the same order: the plan's.
    for kind, kind_groups in plan.groups.items():
        for ranks in kind_groups:
            if len(ranks) > 1 and ranks not in channels:
                channels[ranks] = _new_channels(ranks, backend, timeout)
            if rank in ranks:
                device_group, cpu_group = channels.get(ranks, (None, None))
                if cpu_group is not None and ranks not in rings:
                    rings[ranks] = ObjectRing(ranks, ranks.index(rank), cpu_group, timeout_s)
                handles.append(
                    GroupHandle(
                        kind=kind,
                        ranks=ranks,
                        rank_in_group=ranks.index(rank),
                        device_group=device_group,
                        cpu_group=cpu_group,
                        objects=rings.get(ranks),
                        trace=trace,
                    )
                )
    return context_of_groups(rank=rank, world_size=plan.torch_world, groups=tuple(handles))


def build_world_group(plan: TopologyPlan, rank: int, *, timeout_s: float = 300.0) -> GroupHandle:
    """A group of all ranks for tensors of the CPU. All ranks call it, after the other groups."""
    ranks = tuple(range(plan.torch_world))
    if len(ranks) == 1:
        return single_rank_group("WORLD", rank)
    cpu_group: ProcessGroup = dist.new_group(
        list(ranks), timeout=timedelta(seconds=timeout_s), backend="gloo"
    )
    return GroupHandle(kind="WORLD", ranks=ranks, rank_in_group=rank, cpu_group=cpu_group)


def _new_channels(
    ranks: tuple[int, ...], backend: CommBackend, timeout: timedelta
) -> tuple[ProcessGroup, ProcessGroup]:
    """The channel for tensors of the device, and the one for tensors of the CPU.

    Kinds with the same ranks share them: one thread per rank issues all operations in one order.
    """
    cpu_group: ProcessGroup = dist.new_group(list(ranks), timeout=timeout, backend="gloo")
    if backend == "gloo":
        return cpu_group, cpu_group
    device_group: ProcessGroup = dist.new_group(list(ranks), timeout=timeout, backend=backend)
    return device_group, cpu_group
