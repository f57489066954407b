"""The numbers of a rank's GPU: as its process, the user's variable and the machine count it."""

from typing import Final

from vcli.topology import RankPlan, TopologyPlan

_MAX_LINES: Final = 16
_UUID_CHARS: Final = 12


def short_uuid(uuid: str) -> str:
    """Enough of a UUID to type it: `GPU-8f3a1c2e`."""
    return uuid[:_UUID_CHARS]


def device_text(rank: RankPlan, device_type: str) -> str:
    """`cuda:0 = visible 2 = GPU 5 (GPU-8f3a1c2e)`, as far as it is known."""
    if device_type != "cuda":
        return f"{device_type} {rank.device_index}"
    parts = [f"cuda:{rank.device_index}"]
    if rank.visible_index is not None:
        parts.append(f"visible {rank.visible_index}")
    if rank.physical_index is not None:
        parts.append(f"GPU {rank.physical_index}")
    uuid = f" ({short_uuid(rank.device_uuid)})" if rank.device_uuid else ""
    return " = ".join(parts) + uuid


def device_lines(plan: TopologyPlan) -> list[str]:
    """A line for each rank of this node whose GPU is known."""
    known = [rank for rank in plan.ranks if rank.physical_index is not None or rank.device_uuid]
    if plan.device_type != "cuda" or not known:
        return []
    lines = [
        f"device rank {rank.rank}: {device_text(rank, plan.device_type)}"
        for rank in known[:_MAX_LINES]
    ]
    if len(known) > _MAX_LINES:
        lines.append(f"device ... {len(known) - _MAX_LINES} more: vcli topo --json")
    return lines
