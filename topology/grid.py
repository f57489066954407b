"""Arithmetic of the rank grid: ExternalDP x DP x PP x PCP x TP, row-major, TP fastest."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from vcli.topology.sizes import ParallelSizes


class Axis(IntEnum):
    """The axes of the grid from the slowest to the fastest."""

    EXTERNAL_DP = 0
    DP = 1
    PP = 2
    PCP = 3
    TP = 4


class Coords(NamedTuple):
    """Where a rank stands on each axis."""

    external_dp: int
    dp: int
    pp: int
    pcp: int
    tp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGrid:
    """The ranks of one torch world; `sizes` is in the order of `Axis`."""

    sizes: tuple[int, int, int, int, int]

    @property
    def num_ranks(self) -> int:
        """Ranks in the grid."""
        external_dp, dp, pp, pcp, tp = self.sizes
        return external_dp * dp * pp * pcp * tp

    @property
    def strides(self) -> tuple[int, int, int, int, int]:
        """Distance in ranks between neighbours on each axis."""
        _, dp, pp, pcp, tp = self.sizes
        return (dp * pp * pcp * tp, pp * pcp * tp, pcp * tp, tp, 1)

    def coords(self, rank: int) -> Coords:
        """Where `rank` stands."""
        rest, values = rank, []
        for stride in self.strides:
            value, rest = divmod(rest, stride)
            values.append(value)
        return Coords(*values)

    def rank(self, coords: Coords) -> int:
        """The rank that stands at `coords`."""
        return sum(value * stride for value, stride in zip(coords, self.strides, strict=True))

    def slices(self, order: Sequence[Axis], slice_size: int) -> tuple[tuple[int, ...], ...]:
        """All ranks with the axes re-ordered (last fastest), cut in slices of `slice_size`."""
        ranks = [0]
        for axis in order:
            stride = self.strides[axis]
            steps = range(0, self.sizes[axis] * stride, stride)
            ranks = [rank + step for rank in ranks for step in steps]
        # The same iterator so many times: each tuple takes the next ones.
        return tuple(zip(*[iter(ranks)] * slice_size, strict=True))


def torch_world_grid(config: ParallelSizes) -> RankGrid:
    """The grid of one torch world; without its DP axis where each replica is its own world."""
    dp = config.dp if config.is_one_world else 1
    return RankGrid(
        sizes=(config.external_data_parallel_size, dp, config.pp, config.pcp, config.tp)
    )
