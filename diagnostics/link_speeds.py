"""What the ways between GPUs carry in one direction, and how much of it is healthy: data first."""

from collections.abc import Iterable, Mapping
from typing import Final

from vcli.topology import GpuFacts, LinkFacts

#: GB/s of one NVLink by the first compute capability that has it; the newest that fits counts.
NVLINK_GBPS: Final[Mapping[int, float]] = {6: 20.0, 7: 25.0, 8: 25.0, 9: 25.0, 10: 50.0}
#: GB/s of 16 lanes by generation, as far as copies reach.
PCIE_GBPS: Final[Mapping[int, float]] = {1: 3.0, 2: 6.0, 3: 12.0, 4: 24.0, 5: 48.0, 6: 96.0}
#: What is left of it over the bridges and sockets between two GPUs.
DISTANCE_PART: Final[Mapping[str, float]] = {
    "PIX": 1.0, "PXB": 1.0, "PHB": 0.8, "NODE": 0.7, "SYS": 0.5,
}  # fmt: skip
#: An all-reduce of 256 MiB over 18 NVLinks of an H200 reaches 302 of 450 GB/s; 250 are healthy.
HEALTHY_NVLINK_SUM: Final = 5 / 9
HEALTHY_PCIE_SUM: Final = 0.6
#: A copy over one pair, beside others.
HEALTHY_COPY: Final = 0.4


def pair_kinds(links: Iterable[LinkFacts]) -> dict[frozenset[int], str]:
    """`NV18`, `PIX`, ... for each pair of GPUs."""
    return {frozenset((link.first, link.second)): link.kind for link in links}


def worst_kind(kinds: Iterable[str]) -> str:
    """The slowest of some ways; empty without any."""
    return min(kinds, key=_rank, default="")


def link_gbps(kind: str, gpu: GpuFacts, pcie: tuple[int, int] | None) -> float | None:
    """What the way carries in GB/s; `pcie` is generation and lanes. None where it is not known."""
    if kind.startswith("NV") and kind[2:].isdigit():
        major = gpu.compute_capability[0] if gpu.compute_capability else 0
        known = [first for first in NVLINK_GBPS if first <= major]
        return int(kind[2:]) * NVLINK_GBPS[max(known)] if known else None
    if pcie is None or pcie[0] not in PCIE_GBPS or kind not in DISTANCE_PART:
        return None
    return PCIE_GBPS[pcie[0]] * pcie[1] / 16 * DISTANCE_PART[kind]


def _rank(kind: str) -> tuple[int, float]:
    if kind.startswith("NV") and kind[2:].isdigit():
        return 1, float(kind[2:])
    return 0, DISTANCE_PART.get(kind, 0.0)
