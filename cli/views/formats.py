"""A plan for other programs: CSV rows, Graphviz, Mermaid."""

import csv
import io
from collections.abc import Iterator

from vcli.topology import RankPlan, TopologyPlan

_HEADER = (
    "node", "device", "rank", "global_rank", "local_rank", "dp", "pp", "pcp", "tp", "numa", "nic",
    "first_layer", "end_layer", "is_output", "title", "tp_group", "dcp_group", "pcp_group",
    "pp_group", "dp_group", "ep_group",
)  # fmt: skip
_KINDS = ("TP", "DCP", "PCP", "PP", "DP", "EP")


def csv_view(plan: TopologyPlan) -> str:
    """One row for each rank; groups are ranks with blanks between them."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(_HEADER)
    for rank in plan.ranks:
        groups = [rank.group(kind) for kind in _KINDS]
        span = rank.layer_span or ("", "")
        writer.writerow(
            [
                *(rank.node_rank, rank.device_index, rank.rank, rank.global_rank),
                *(rank.local_rank, rank.dp_rank, rank.pp_rank, rank.pcp_rank, rank.tp_rank),
                "" if rank.numa_node is None else rank.numa_node,
                rank.nic or "",
                *span,
                int(rank.is_output),
                rank.title,
                *(" ".join(map(str, group.ranks)) if group else "" for group in groups),
            ]
        )
    return buffer.getvalue().rstrip("\n")


def dot_view(plan: TopologyPlan) -> str:
    """Graphviz: a cluster for each node and TP group, an edge for each hand-over of stages."""
    lines = [
        "digraph plan {",
        '  graph [rankdir=LR, fontname="sans-serif"];',
        '  node [shape=box, fontname="sans-serif"];',
    ]
    for node_rank, groups in _by_node(plan):
        lines.append(f"  subgraph cluster_node{node_rank} {{")
        lines.append(f'    label="node{node_rank}";')
        for index, ranks in enumerate(groups):
            lines.append(f"    subgraph cluster_node{node_rank}_tp{index} {{")
            lines.append(f'      label="TP {_members(ranks)}"; style=dashed;')
            lines += [f'      {_name(rank)} [label="{_label(rank)}"];' for rank in ranks]
            lines.append("    }")
        lines.append("  }")
    lines += [f'  {_name(a)} -> {_name(b)} [label="PP"];' for a, b in stage_edges(plan)]
    return "\n".join([*lines, "}"])


def mermaid_view(plan: TopologyPlan) -> str:
    """Mermaid flowchart: a subgraph for each node and TP group, an arrow for each hand-over."""
    lines = ["flowchart LR"]
    for node_rank, groups in _by_node(plan):
        lines.append(f'  subgraph node{node_rank}["node{node_rank}"]')
        for index, ranks in enumerate(groups):
            lines.append(f'    subgraph node{node_rank}tp{index}["TP {_members(ranks)}"]')
            lines += [f'      {_name(rank)}["{_label(rank)}"]' for rank in ranks]
            lines.append("    end")
        lines.append("  end")
    lines += [f"  {_name(a)} -->|PP| {_name(b)}" for a, b in stage_edges(plan)]
    return "\n".join(lines)


def stage_edges(plan: TopologyPlan) -> Iterator[tuple[RankPlan, RankPlan]]:
    """Each rank with its counterpart in the next pipeline stage."""
    step = plan.config.tp * plan.config.pcp
    for index, rank in enumerate(plan.ranks):
        if rank.pp_rank < plan.config.pp - 1:
            yield rank, plan.ranks[index + step]


def _by_node(plan: TopologyPlan) -> Iterator[tuple[int, list[list[RankPlan]]]]:
    """The ranks of each node, those of a TP group together."""
    nodes: dict[int, dict[tuple[object, ...], list[RankPlan]]] = {}
    for rank in plan.ranks:
        key = (rank.external_dp_rank, rank.dp_rank, rank.pp_rank, rank.pcp_rank)
        nodes.setdefault(rank.node_rank, {}).setdefault(key, []).append(rank)
    for node_rank, groups in nodes.items():
        yield node_rank, list(groups.values())


def _name(rank: RankPlan) -> str:
    return f"e{rank.external_dp_rank}d{rank.dp_rank}r{rank.rank}"


def _members(ranks: list[RankPlan]) -> str:
    numbers = [rank.global_rank for rank in ranks]
    return f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"


def _label(rank: RankPlan) -> str:
    title = rank.title.removeprefix("vcli::")
    return f"rank {rank.rank}, device {rank.device_index}, {title}"
