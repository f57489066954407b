"""Checks before anything is served: sums per group, and data over each pair of a group's GPUs."""

import statistics
import time

import torch
import torch.distributed as dist

from vcli.runtime.distributed.collectives import all_reduce
from vcli.runtime.distributed.group import GroupHandle
from vcli.runtime.distributed.parallel_state import ParallelContext
from vcli.runtime.distributed.symmetric import INPUT_BYTES, PeerMemory
from vcli.runtime.distributed.trials import first_difference, together, wait_for_device
from vcli.runtime.messages import GroupReport

DEFAULT_PAYLOAD_BYTES = 64 * 1024
NUM_TIMED = 5
PAIR_BYTES = 64 * 1024

#: A prime: residues of squares modulo it give each rank and element its own number, and sums of
#: thousands of ranks are still exact in float32.
_MODULUS = 1021


def verify_all_reduce(
    group: GroupHandle,
    device: torch.device | str,
    *,
    payload_bytes: int = DEFAULT_PAYLOAD_BYTES,
) -> GroupReport:
    """Sums known numbers over the group and compares all of them; every rank must call it.

    The median time is over a few more rounds. A wrong sum is reported, not raised: the note names
    the first wrong element.
    """
    device = torch.device(device)
    if group.size == 1:
        return _report(group, device, verified=True, seconds=0.0, payload_bytes=0, note="")
    num_elements = max(payload_bytes // 4, 1)
    contribution = _contribution(group.ranks[group.rank_in_group], num_elements, device)
    expected = torch.zeros_like(contribution)
    for rank in group.ranks:
        expected += _contribution(rank, num_elements, device)
    notes, seconds = [], []
    for _ in range(NUM_TIMED + 1):
        tensor = contribution.clone()
        wait_for_device(device)
        started = time.perf_counter()
        tensor = all_reduce(tensor, group)
        wait_for_device(device)
        seconds.append(time.perf_counter() - started)
        notes.append(first_difference(tensor, expected))
    note = next(filter(None, notes), "")
    return _report(
        group,
        device,
        verified=not note,
        # The first round connects the peers.
        seconds=statistics.median(seconds[1:]),
        payload_bytes=num_elements * 4,
        note=note,
    )


def verify_groups(context: ParallelContext, device: torch.device | str) -> list[GroupReport]:
    """A report for each group of more than one rank; if there is none, for the TP group of one."""
    groups = [group for group in context.groups if group.size > 1]
    # All ranks have the groups in the same order of kinds, and groups of a kind don't overlap.
    return [verify_all_reduce(group, device) for group in groups or [context.tp]]


def verify_pairs(memory: PeerMemory, group: GroupHandle, device: torch.device) -> tuple[int, str]:
    """Every rank writes to the memory of every other, which reads it; then it reads it back.

    The number of ordered pairs, and what was wrong with one; then 0 counts.
    """
    own = group.rank_in_group
    peers = [peer for peer in range(group.size) if peer != own]

    def written_by(src: int, there: torch.Tensor) -> torch.Tensor:
        start = INPUT_BYTES + src * PAIR_BYTES
        return there[start : start + PAIR_BYTES]

    def write() -> None:
        for peer in peers:
            written_by(own, memory.of_rank(peer)).copy_(_pair_pattern(own, peer, device))
        wait_for_device(device)

    def compare() -> None:
        for peer in peers:
            came = written_by(peer, memory.own)
            _compare(came, _pair_pattern(peer, own, device), group, (peer, own), "write")
            back = written_by(own, memory.of_rank(peer)).clone()
            _compare(back, _pair_pattern(own, peer, device), group, (own, peer), "read")

    reason = together(group, write).reason or together(group, compare).reason
    return (0 if reason else group.size * (group.size - 1)), reason


def _pair_pattern(src: int, dst: int, device: torch.device) -> torch.Tensor:
    index = torch.arange(PAIR_BYTES, device=device)
    return ((index * 31 + src * 17 + dst * 7) % 251).to(torch.uint8)


def _compare(
    data: torch.Tensor,
    expected: torch.Tensor,
    group: GroupHandle,
    pair: tuple[int, int],
    access: str,
) -> None:
    wait_for_device(data.device)
    num_wrong = int((data != expected).sum())
    if num_wrong:
        src, dst = (group.ranks[rank_in_group] for rank_in_group in pair)
        raise ValueError(
            f"{access} of rank {src} in the memory of rank {dst}: {num_wrong} of "
            f"{PAIR_BYTES} bytes are wrong"
        )


def _contribution(rank: int, num_elements: int, device: torch.device) -> torch.Tensor:
    """Whole numbers below the modulus that differ between ranks and between elements."""
    index = torch.arange(1, num_elements + 1, device=device)
    return (((rank * 31 + 7) ** 2 % _MODULUS * (index % _MODULUS) + rank) % _MODULUS).float()


def _report(
    group: GroupHandle,
    device: torch.device,
    *,
    verified: bool,
    seconds: float,
    payload_bytes: int,
    note: str,
) -> GroupReport:
    transport, all_reduce_name, version = _transport(group, device)
    return GroupReport(
        kind=group.kind,
        ranks=list(group.ranks),
        transport=transport,
        version=version,
        all_reduce=all_reduce_name,
        verified=verified,
        all_reduce_us=seconds * 1e6,
        all_reduce_bytes=payload_bytes,
        note=note,
    )


def _transport(group: GroupHandle, device: torch.device) -> tuple[str, str, str]:
    """Transport, all-reduce operation, version of what moves the data."""
    if group.size == 1:
        return "self", "none", ""
    if group.communicator is not None:
        return group.communicator.name, group.communicator.name, ""
    channel = group.device_group if device.type == "cuda" else group.cpu_group
    backend = dist.get_backend(channel)
    if backend == "nccl":
        version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        return "nccl", "nccl", version
    return "gloo/tcp", "gloo", f"torch {torch.__version__}"
