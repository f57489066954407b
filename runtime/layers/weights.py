"""How a parameter is filled from a checkpoint, as data that layers give and the loader obeys."""

from dataclasses import dataclass
from math import prod

import torch
from torch import nn


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
        return prod(self.lengths)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Elements that are read in each dimension."""
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
