"""One process group as this rank sees it. It knows no layout: who is in it comes from the plan."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.distributed import ProcessGroup


class Communicator(Protocol):
    """What can move tensors between the ranks of one group instead of torch.distributed."""

    name: str

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks; may be written into `tensor`."""

    def input_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """Where the next `all_reduce` or `add_rms_norm` reads without a copy; None: anywhere."""

    def add_rms_norm(
        self, tensor: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The weighted norm of residual + the sum over all ranks, and that; None: can't.

        May overwrite `residual`.
        """

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """The tensors of all ranks, concatenated along `dim` in rank order."""

    def send(self, tensor: torch.Tensor, dst_rank_in_group: int) -> None:
        """Hands `tensor` to one rank; blocks until it can be reused."""

    def recv(self, buffer: torch.Tensor, src_rank_in_group: int) -> None:
        """Fills `buffer` with what that rank sent next."""


class ObjectChannel(Protocol):
    """What can carry Python objects between the ranks of one group faster than tensors do."""

    @property
    def is_local(self) -> bool:
        """Whether it reaches all ranks; may be a collective."""

    def broadcast(self, obj: Any, src_rank_in_group: int) -> Any:
        """The source's `obj`, on every rank."""


class CollectiveTrace(Protocol):
    """Is told of every collective, for finding out who does not come to one."""

    def enter(self, operation: str, kind: str) -> None:
        """This rank is about to wait for its peers of the group `kind`."""

    def leave(self) -> None:
        """All of them came."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupHandle:
    """A group of global `ranks` and the place of this rank in it.

    `device_group` moves tensors of the device, `cpu_group` (gloo) those of the CPU; on a CPU they
    are the same. Both are None for a group of one, which talks to nobody. With `communicator`
    the group's tensors go through it.
    """

    kind: str
    ranks: tuple[int, ...]
    rank_in_group: int
    device_group: ProcessGroup | None = None
    cpu_group: ProcessGroup | None = None
    communicator: Communicator | None = None
    objects: ObjectChannel | None = None
    trace: CollectiveTrace | None = None

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def is_first(self) -> bool:
        """Whether this rank begins the group (for PP: has the embedding)."""
        return self.rank_in_group == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank ends the group (for PP: has the head)."""
        return self.rank_in_group == self.size - 1


def single_rank_group(kind: str, rank: int = 0) -> GroupHandle:
    """The group in which `rank` is alone."""
    return GroupHandle(kind=kind, ranks=(rank,), rank_in_group=0)
