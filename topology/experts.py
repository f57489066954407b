"""Which experts each rank of an EP group holds."""

from dataclasses import dataclass
from typing import Literal

from vcli.topology.errors import ConfigError

ExpertPlacement = Literal["linear", "round_robin"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertMap:
    """The (physical) experts of each EP rank, in the order in which it stores them."""

    num_experts: int
    experts_of_rank: tuple[tuple[int, ...], ...]

    def owner(self, expert: int) -> int:
        """The EP rank that holds `expert`."""
        return next(rank for rank, held in enumerate(self.experts_of_rank) if expert in held)


def num_local_experts(num_experts: int, ep_size: int, ep_rank: int) -> int:
    """Experts that one EP rank holds, however they are placed."""
    base, rest = divmod(num_experts, ep_size)
    return base + (ep_rank < rest)


def place_experts(
    num_experts: int, ep_size: int, placement: ExpertPlacement = "linear"
) -> ExpertMap:
    """Experts in consecutive runs or dealt one by one; the first ranks get what is left over.

    Raises:
        ConfigError: more ranks than experts.
    """
    if ep_size > num_experts:
        raise ConfigError(
            f"expert parallelism over {ep_size} ranks (DP x PCP x TP) is more than the "
            f"{num_experts} experts of the model",
            hint="lower --tensor-parallel-size or --data-parallel-size",
        )
    if placement == "round_robin":
        held = tuple(tuple(range(rank, num_experts, ep_size)) for rank in range(ep_size))
        return ExpertMap(num_experts=num_experts, experts_of_rank=held)
    runs, start = [], 0
    for rank in range(ep_size):
        end = start + num_local_experts(num_experts, ep_size, rank)
        runs.append(tuple(range(start, end)))
        start = end
    return ExpertMap(num_experts=num_experts, experts_of_rank=tuple(runs))
