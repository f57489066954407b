"""Collective operations over a `GroupHandle`; each is free in a group of one.

Every rank of the group must call the same operations in the same order. A peer that does not
come ends the call with torch's error after the timeout that the group was built with.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from vcli.runtime.distributed.group import GroupHandle


def all_reduce(tensor: torch.Tensor, group: GroupHandle) -> torch.Tensor:
    """The sum of `tensor` over the group, on every rank; may overwrite `tensor`."""
    if group.size == 1:
        return tensor
    if group.communicator is not None:
        return group.communicator.all_reduce(tensor)
    dist.all_reduce(tensor, group=_channel(group, tensor))
    return tensor


def all_gather(tensor: torch.Tensor, group: GroupHandle, dim: int = -1) -> torch.Tensor:
    """The equally shaped tensors of all ranks, concatenated along `dim` in rank order."""
    if group.size == 1:
        return tensor
    if group.communicator is not None:
        return group.communicator.all_gather(tensor, dim)
    tensor = tensor.contiguous()
    parts = [torch.empty_like(tensor) for _ in range(group.size)]
    dist.all_gather(parts, tensor, group=_channel(group, tensor))
    return torch.cat(parts, dim=dim)


def send_tensors(tensors: Mapping[str, torch.Tensor], group: GroupHandle) -> None:
    """Hands `tensors` to the next rank of the group; its `recv_tensors` must name the same keys."""
    assert not group.is_last, "the last rank of a pipeline has no next one"
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        if group.communicator is not None:
            group.communicator.send(tensor, group.rank_in_group + 1)
        else:
            dist.send(
                tensor, group=_channel(group, tensor), dst=group.ranks[group.rank_in_group + 1]
            )


def recv_tensors(
    buffers: Mapping[str, torch.Tensor], group: GroupHandle
) -> dict[str, torch.Tensor]:
    """`buffers` (contiguous), filled with what the previous rank of the group sent."""
    assert not group.is_first, "the first rank of a pipeline has no previous one"
    for name in sorted(buffers):
        buffer = buffers[name]
        if group.communicator is not None:
            group.communicator.recv(buffer, group.rank_in_group - 1)
        else:
            dist.recv(
                buffer, group=_channel(group, buffer), src=group.ranks[group.rank_in_group - 1]
            )
    return dict(buffers)


def barrier(group: GroupHandle) -> None:
    """Returns when every rank of the group has called it; over the CPU channel."""
    if group.size == 1:
        return
    all_reduce(torch.zeros(1), group)


def _channel(group: GroupHandle, tensor: torch.Tensor) -> ProcessGroup:
    channel = group.cpu_group if tensor.device.type == "cpu" else group.device_group
    assert channel is not None, f"{group.kind} group {group.ranks} was made without a channel"
    return channel
