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
) -> tuple[tuple[int | None, ...], Decision[str]]:
    """The node of each rank, None where it stays free; and the choice in words.

    `device_nodes` are the NUMA nodes of the ranks' GPUs, `local_ranks` the places of the ranks on
    their host. Without GPUs, neighbours share a node, so that few of their messages cross over.
    """
    num_nodes = len(host.numa_cpus) if host else 0
    nodes: tuple[int | None, ...]
    if num_nodes < 2:
        nodes = (None,) * len(local_ranks)
        reasons = [f"asked for, but the host shows {num_nodes or 'no'} NUMA node(s)"]
    elif device_type == "cpu":
        num_local = max(local_ranks, default=0) + 1
        nodes = tuple(local_rank * num_nodes // num_local for local_rank in local_ranks)
        reasons = [f"asked for: {num_local} rank(s) spread over {num_nodes} NUMA nodes"]
    else:
        nodes = tuple(device_nodes)
        reasons = ["asked for: each rank on the NUMA node of its GPU"]
        unknown = [str(rank) for rank, node in enumerate(nodes) if node is None]
        if unknown:
            listed = ", ".join(unknown)
            reasons.append(f"rank(s) {listed} stay free: the node of their GPU is not known")
    decision = Decision(name="numa_binding", value=_in_words(nodes), reasons=tuple(reasons))
    return nodes, decision


def _in_words(nodes: Sequence[int | None]) -> str:
    bound = sorted({node for node in nodes if node is not None})
    parts = [f"node {node} has {nodes.count(node)} rank(s)" for node in bound]
    return ", ".join(parts) or "none"
