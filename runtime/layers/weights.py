"""How a parameter is filled from a checkpoint, as data that layers give and the loader obeys."""

from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
from torch import nn


class StoredTensor(Protocol):
    """A checkpoint's tensor, of which only what is asked for is read."""

    def __getitem__(self, key: tuple[slice, ...], /) -> torch.Tensor:
        """The part at `key`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSlice:
    """`target` = the checkpoint's tensor `name`, which has `shape` as a whole, at `source`.

    `source` has one slice for each dimension; `target` is a view into a parameter. Where `target`
    is larger, its rest is padding: zeros behind what is read. `source` may be empty.
    """

    name: str
    shape: tuple[int, ...]
    source: tuple[slice, ...]
    target: torch.Tensor

    @property
    def num_elements(self) -> int:
        """Elements that are read."""
        return prod(self._lengths)

    def fill(self, stored: StoredTensor) -> None:
        """Reads the part of the tensor, and makes the padding zero."""
        lengths = self._lengths
        if lengths != tuple(self.target.shape):
            self.target.zero_()
        if self.num_elements:
            covered = self.target[tuple(slice(0, length) for length in lengths)]
            covered.copy_(stored[self.source])

    @property
    def _lengths(self) -> tuple[int, ...]:
        return tuple(part.stop - part.start for part in self.source)


def whole_tensor(name: str, target: torch.Tensor) -> WeightSlice:
    """The slice that takes all of a checkpoint tensor."""
    shape = tuple(target.shape)
    return WeightSlice(
        name=name, shape=shape, source=tuple(slice(0, size) for size in shape), target=target
    )


def empty_weight(
    *shape: int, dtype: torch.dtype, device: torch.device | str | None
) -> nn.Parameter:
    """A parameter for inference, not yet filled."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
