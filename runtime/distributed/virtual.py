"""Groups whose ranks are threads of one process: sharded layers without processes.

Shards can be built and loaded with such handles from one thread. Collectives need one thread per
rank, in lock step; a rank that does not come breaks the others after `timeout_s`.
"""

import queue
import threading
from collections import defaultdict
from dataclasses import dataclass, field

import torch

from vcli.runtime.distributed.group import GroupHandle


@dataclass(slots=True)
class _Exchange:
    size: int
    timeout_s: float
    barrier: threading.Barrier
    slots: list[torch.Tensor | None]
    mailboxes: dict[tuple[int, int], "queue.SimpleQueue[torch.Tensor]"] = field(
        default_factory=lambda: defaultdict(queue.SimpleQueue)
    )
    lock: threading.Lock = field(default_factory=threading.Lock)

    def mailbox(self, src: int, dst: int) -> "queue.SimpleQueue[torch.Tensor]":
        with self.lock:
            return self.mailboxes[src, dst]

    def swap(self, rank_in_group: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Copies of the tensors of all ranks, in rank order."""
        self.slots[rank_in_group] = tensor.clone()
        self.barrier.wait(self.timeout_s)
        tensors = [slot for slot in self.slots if slot is not None]
        # Nobody may write its next tensor before all have read these.
        self.barrier.wait(self.timeout_s)
        return tensors


class ThreadCommunicator:
    """One rank's end of a virtual group; sums in rank order, so all ranks get the same bits."""

    name = "threads"

    def __init__(self, exchange: _Exchange, rank_in_group: int) -> None:
        self._exchange = exchange
        self._rank_in_group = rank_in_group

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, written into `tensor`."""
        first, *others = self._exchange.swap(self._rank_in_group, tensor)
        tensor.copy_(first)
        for other in others:
            tensor += other
        return tensor

    def input_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """None: any memory will do."""
        del shape, dtype
        return None

    def add_rms_norm(
        self, tensor: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """None: it can't."""
        del tensor, residual, weight, eps
        return None

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """The tensors of all ranks along `dim`."""
        return torch.cat(self._exchange.swap(self._rank_in_group, tensor), dim=dim)

    def send(self, tensor: torch.Tensor, dst_rank_in_group: int) -> None:
        """Leaves a copy for the other rank."""
        self._exchange.mailbox(self._rank_in_group, dst_rank_in_group).put(tensor.clone())

    def recv(self, buffer: torch.Tensor, src_rank_in_group: int) -> None:
        """Waits for the other rank's next tensor."""
        mailbox = self._exchange.mailbox(src_rank_in_group, self._rank_in_group)
        buffer.copy_(mailbox.get(timeout=self._exchange.timeout_s))


def virtual_groups(kind: str, size: int, *, timeout_s: float = 30.0) -> tuple[GroupHandle, ...]:
    """One handle per rank of a group that lives in this process."""
    exchange = _Exchange(
        size=size, timeout_s=timeout_s, barrier=threading.Barrier(size), slots=[None] * size
    )
    return tuple(
        GroupHandle(
            kind=kind,
            ranks=tuple(range(size)),
            rank_in_group=rank_in_group,
            communicator=ThreadCommunicator(exchange, rank_in_group),
        )
        for rank_in_group in range(size)
    )
