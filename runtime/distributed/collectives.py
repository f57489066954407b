"""Collective operations over a `GroupHandle`; each is free in a group of one.

Every rank of the group must call the same operations in the same order. A peer that does not
come ends the call with torch's error after the timeout that the group was built with.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from vcli.runtime.distributed.group import GroupHandle
from vcli.runtime.ipc.codec import decode, encode


def all_reduce(tensor: torch.Tensor, group: GroupHandle) -> torch.Tensor:
    """The sum of `tensor` over the group, on every rank; may overwrite `tensor`."""
    if group.size == 1:
        return tensor
    with _traced(group, "all_reduce"):
        if group.communicator is not None:
            return group.communicator.all_reduce(tensor)
        dist.all_reduce(tensor, group=_channel(group, tensor))
    return tensor


@dataclass(frozen=True, slots=True)
class PartialSum:
    """What this rank adds to a sum over `group` that nobody has needed yet."""

    tensor: torch.Tensor
    group: GroupHandle

    def add_rms_norm(
        self, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The norm of residual + sum, and that, in one go; None where the group can't."""
        if self.group.communicator is None:
            return None
        return self.group.communicator.add_rms_norm(self.tensor, residual, weight, eps)


def total(x: torch.Tensor | PartialSum) -> torch.Tensor:
    """The sum over the group, where it is still due."""
    return all_reduce(x.tensor, x.group) if isinstance(x, PartialSum) else x


def all_gather(tensor: torch.Tensor, group: GroupHandle, dim: int = -1) -> torch.Tensor:
    """The equally shaped tensors of all ranks, concatenated along `dim` in rank order."""
    if group.size == 1:
        return tensor
    with _traced(group, "all_gather"):
        if group.communicator is not None:
            return group.communicator.all_gather(tensor, dim)
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(group.size)]
        dist.all_gather(parts, tensor, group=_channel(group, tensor))
    return torch.cat(parts, dim=dim)


def broadcast(tensor: torch.Tensor, group: GroupHandle, *, src_rank_in_group: int = 0) -> None:
    """Overwrites `tensor` (contiguous, one shape on all ranks) with the source rank's."""
    if group.size == 1:
        return
    with _traced(group, "broadcast"):
        if group.communicator is not None:
            parts = group.communicator.all_gather(tensor.unsqueeze(0), 0)
            tensor.copy_(parts[src_rank_in_group])
            return
        src = group.ranks[src_rank_in_group]
        dist.broadcast(tensor, src=src, group=_channel(group, tensor))


def broadcast_object(obj: Any, group: GroupHandle, *, src_rank_in_group: int = 0) -> Any:
    """The source rank's `obj` on every rank; what the others pass is not looked at.

    Through shared memory where the group has it on one machine, else as bytes in a tensor.
    """
    if group.size == 1:
        return obj
    objects = group.objects
    if objects is not None and objects.is_local:
        with _traced(group, "broadcast_object"):
            return objects.broadcast(obj, src_rank_in_group)
    is_source = group.rank_in_group == src_rank_in_group
    packed = msgspec.msgpack.encode(list(map(bytes, encode(obj)))) if is_source else b""
    size = torch.tensor([len(packed)])
    broadcast(size, group, src_rank_in_group=src_rank_in_group)
    data = torch.empty(int(size), dtype=torch.uint8)
    if is_source:
        data = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
    broadcast(data, group, src_rank_in_group=src_rank_in_group)
    if is_source:
        return obj
    return decode(msgspec.msgpack.decode(data.numpy().tobytes(), type=list[bytes]))


def send_tensors(tensors: Mapping[str, torch.Tensor], group: GroupHandle) -> None:
    """Hands `tensors` to the next rank of the group; its `recv_tensors` must name the same keys."""
    assert not group.is_last, "the last rank of a pipeline has no next one"
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        with _traced(group, "send"):
            if group.communicator is not None:
                group.communicator.send(tensor, group.rank_in_group + 1)
            else:
                dst = group.ranks[group.rank_in_group + 1]
                dist.send(tensor, group=_channel(group, tensor), dst=dst)


def recv_tensors(
    buffers: Mapping[str, torch.Tensor], group: GroupHandle
) -> dict[str, torch.Tensor]:
    """`buffers` (contiguous), filled with what the previous rank of the group sent."""
    assert not group.is_first, "the first rank of a pipeline has no previous one"
    for name in sorted(buffers):
        buffer = buffers[name]
        with _traced(group, "recv"):
            if group.communicator is not None:
                group.communicator.recv(buffer, group.rank_in_group - 1)
            else:
                src = group.ranks[group.rank_in_group - 1]
                dist.recv(buffer, group=_channel(group, buffer), src=src)
    return dict(buffers)


def barrier(group: GroupHandle) -> None:
    """Returns when every rank of the group has called it; over the CPU channel."""
    if group.size == 1:
        return
    all_reduce(torch.zeros(1), group)


@contextmanager
def _traced(group: GroupHandle, operation: str) -> Iterator[None]:
    if group.trace is None:
        yield
        return
    group.trace.enter(operation, group.kind)
    yield
    # Not after an error: the peer that broke this is what one wants to know.
    group.trace.leave()


def _channel(group: GroupHandle, tensor: torch.Tensor) -> ProcessGroup:
    channel = group.cpu_group if tensor.device.type == "cpu" else group.device_group
    assert channel is not None, f"{group.kind} group {group.ranks} was made without a channel"
    return channel
