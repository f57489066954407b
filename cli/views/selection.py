"""One rank, or the groups of one kind, with everything that the plan knows about them."""

from typing import Any

from vcli.cli.topo_report import TopoReport
from vcli.cli.views.devices import device_text
from vcli.cli.views.text import bytes_text, columns, fill, group_text, plural, short_list
from vcli.topology import GroupKind, PlacementError, RankPlan, TopologyPlan
from vcli.topology.groups import group_spec


def find_rank(plan: TopologyPlan, number: int) -> RankPlan:
    """The rank with this number, counted over all replicas.

    Raises:
        PlacementError: there is none.
    """
    if not 0 <= number < len(plan.ranks):
        raise PlacementError(
            f"there is no rank {number} among {len(plan.ranks)}",
            hint=f"--rank 0..{len(plan.ranks) - 1}",
        )
    return plan.ranks[number]


def rank_view(report: TopoReport, rank: RankPlan, *, width: int) -> str:
    """All about one rank."""
    plan = report.plan
    places = [
        ["title", rank.title],
        ["rank", f"{rank.rank} of replica {rank.dp_rank} ({rank.global_rank} in its world)"],
        ["place", f"node{rank.node_rank}, local rank {rank.local_rank}"],
        ["device", device_text(rank, plan.device_type)],
        ["grid", _coordinates(rank)],
        ["threads", f"OMP_NUM_THREADS={rank.omp_num_threads}"],
    ]
    if rank.numa_node is not None:
        places.append(["NUMA", f"node {rank.numa_node}"])
    if rank.nic:
        places.append(["NIC", f"{rank.nic} ({rank.nic_way})"])
    if rank.layer_span:
        start, end = rank.layer_span
        places.append(["layers", f"{start}-{end - 1}" if end > start else "none"])
    roles = [name for name, is_so in _roles(rank) if is_so]
    places.append(["role", ", ".join(roles) or "works"])
    lines = columns(places)
    lines += ["", "groups"]
    for group in rank.groups:
        text = f"[{group_text(group.ranks)}]" if group.size > 1 else "by itself"
        meaning = group_spec(group.kind).meaning if group.size > 1 else ""
        words = [f"{group.kind:<5}", text]
        if group.size > 1:
            words += [f"as {group.rank_in_group} of {group.size}:", *meaning.split()]
        filled = fill(words, width=width, indent=" " * 8)
        lines += ["  " + filled[0].lstrip(), *filled[1:]]
    experts = _experts(plan, rank)
    if experts:
        lines += ["", f"experts  {experts}"]
    lines += _memory(report, rank)
    return "\n".join(lines)


def group_view(plan: TopologyPlan, kind: GroupKind, *, width: int) -> str:
    """Every group of one kind with the place of its members."""
    groups = plan.groups.get(kind.value)
    if groups is None:
        raise PlacementError(
            f"this plan has no {kind} groups", hint=f"it has {', '.join(plan.groups)}"
        )
    place = {rank.global_rank: rank for rank in plan.ranks if rank.external_dp_rank == 0}
    rows = [["group", "ranks", "nodes", "devices", "crosses nodes"]]
    for index, ranks in enumerate(groups):
        members = [place[rank] for rank in ranks]
        nodes = {member.node_rank for member in members}
        rows.append(
            [
                str(index),
                f"[{group_text(ranks)}]",
                short_list(sorted(nodes)),
                short_list([member.device_index for member in members]),
                "yes" if len(nodes) > 1 else "no",
            ]
        )
    count = plural(len(groups), "group")
    head = f"{kind}: {count} of {len(groups[0])}; its ranks {group_spec(kind).meaning}"
    return "\n".join([*fill(head.split(), width=width, indent=""), "", *columns(rows)])


def rank_to_json(report: TopoReport, rank: RankPlan) -> dict[str, Any]:
    """One rank for `--rank N --json`."""
    memory = _rank_memory(report.plan, rank)
    return {
        "rank": rank.rank,
        "global_rank": rank.global_rank,
        "dp_rank": rank.dp_rank,
        "pp_rank": rank.pp_rank,
        "pcp_rank": rank.pcp_rank,
        "tp_rank": rank.tp_rank,
        "node_rank": rank.node_rank,
        "local_rank": rank.local_rank,
        "device_index": rank.device_index,
        "numa_node": rank.numa_node,
        "nic": rank.nic,
        "nic_way": rank.nic_way,
        "title": rank.title,
        "is_driver": rank.is_driver,
        "is_output": rank.is_output,
        "layer_span": list(rank.layer_span) if rank.layer_span else None,
        "omp_num_threads": rank.omp_num_threads,
        "groups": {
            group.kind.value: {"ranks": list(group.ranks), "rank_in_group": group.rank_in_group}
            for group in rank.groups
        },
        "weight_bytes": memory[0] if memory else None,
        "kv_bytes_per_token": memory[1] if memory else None,
    }


def _coordinates(rank: RankPlan) -> str:
    return f"dp {rank.dp_rank}, pp {rank.pp_rank}, pcp {rank.pcp_rank}, tp {rank.tp_rank}"


def _roles(rank: RankPlan) -> tuple[tuple[str, bool], ...]:
    return (("first of its TP group", rank.is_driver), ("replies", rank.is_output))


def _experts(plan: TopologyPlan, rank: RankPlan) -> str:
    group = rank.group(GroupKind.EP)
    if plan.experts is None or group is None:
        return ""
    return short_list(plan.experts.experts_of_rank[group.rank_in_group])


def _rank_memory(plan: TopologyPlan, rank: RankPlan) -> tuple[int, int] | None:
    if plan.memory is None:
        return None
    found = next(
        item for item in plan.memory.ranks if (item.dp_rank, item.rank) == (rank.dp_rank, rank.rank)
    )
    return found.weight_bytes, found.kv_bytes_per_token


def _memory(report: TopoReport, rank: RankPlan) -> list[str]:
    memory = _rank_memory(report.plan, rank)
    if memory is None:
        return []
    lines = ["", f"memory   weights {bytes_text(memory[0])}, KV {bytes_text(memory[1])} a token"]
    if report.fit and report.fit.kv_tokens is not None:
        lines.append(f"         KV cache of its replica: {report.fit.kv_tokens:,} tokens")
    return lines
