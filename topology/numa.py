"""Which NUMA node each rank is kept on, when that is asked for."""

from collections.abc import Sequence

from vcli.topology.decision import Decision
from vcli.topology.facts import HostFacts


def decide_numa_binding(
    *,
    host: HostFacts | None,
    device_nodes: Sequence[int | None],
    local_ranks: Sequence[int],
    device_type: str,
) -> Decision[tuple[int | None, ...]]:
    """The node of each rank, None where it stays free.

    `device_nodes` are the NUMA nodes of the ranks' GPUs, `local_ranks` the places of the ranks on
    their host. Without GPUs, neighbours share a node, so that few of their messages cross over.
    """
    num_nodes = len(host.numa_cpus) if host else 0
    free: tuple[None, ...] = (None,) * len(local_ranks)
    if num_nodes < 2:
        reason = f"asked for, but the host shows {num_nodes or 'no'} NUMA node(s)"
        return Decision(name="numa_binding", value=free, reasons=(reason,))
    if device_type == "cpu":
        num_local = max(local_ranks, default=0) + 1
        spread = tuple(local_rank * num_nodes // num_local for local_rank in local_ranks)
        reason = f"asked for: {num_local} rank(s) spread over {num_nodes} NUMA nodes"
        return Decision(name="numa_binding", value=spread, reasons=(reason,))
    unknown = [rank for rank, node in enumerate(device_nodes) if node is None]
    reasons = ["asked for: each rank on the NUMA node of its GPU"]
    if unknown:
        listed = ", ".join(map(str, unknown))
        reasons.append(f"rank(s) {listed} stay free: the node of their GPU is not known")
    return Decision(name="numa_binding", value=tuple(device_nodes), reasons=tuple(reasons))
