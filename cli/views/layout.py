"""A plan as text: sizes, ranks, groups, processes, decisions, warnings."""

from collections.abc import Iterator, Sequence

from vcli.cli.views.decisions import decision_lines
from vcli.cli.views.ranks import rank_lines
from vcli.cli.views.text import (
    bytes_text,
    columns,
    fill,
    group_text,
    plural,
    short_list,
)
from vcli.topology import NodePlan, PlanWarning, TopologyPlan

_MAX_GROUPS = 16
_MAX_NODES = 4
_MAX_LEAVES = 4


def layout_view(
    plan: TopologyPlan,
    *,
    width: int,
    costs: Sequence[Sequence[str]] = (),
    warnings: Sequence[PlanWarning] | None = None,
) -> str:
    """Everything that `topo` shows for people, in lines of at most `width` where words allow.

    `costs` are further sections, `warnings` go in place of the plan's own.
    """
    sections = (
        [headline(plan)],
        rank_lines(plan, width=width),
        group_lines(plan, width=width),
        process_lines(plan, width=width),
        *(costs or (memory_lines(plan),)),
        port_lines(plan, width=width),
        decision_lines(plan, width=width),
        warning_lines(plan.warnings if warnings is None else warnings, width=width),
    )
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def headline(plan: TopologyPlan) -> str:
    """`plan   8 ranks = pp4 × tp2 · 1 node · cpu`."""
    config = plan.config
    sizes = [
        ("external dp", config.external_data_parallel_size),
        ("dp", config.dp),
        ("pp", config.pp),
        ("pcp", config.pcp),
        ("tp", config.tp),
    ]
    shown = " × ".join(f"{name}{size}" for name, size in sizes if size > 1)
    total = plan.world_size_across_dp * config.external_data_parallel_size
    equals = f" = {shown}" if shown else ""
    nodes = plural(config.num_hosts, "node")
    return f"plan   {plural(total, 'rank')}{equals} · {nodes} · {plan.device_type}"


def group_lines(plan: TopologyPlan, *, width: int) -> list[str]:
    """One line for each kind of group, more where they are many."""
    lines = ["groups (global ranks)"]
    if plan.worlds > 1:
        lines[0] = f"groups (of each of {plan.worlds} independent worlds)"
    single = [kind for kind, groups in plan.groups.items() if len(groups[0]) == 1]
    for kind, groups in plan.groups.items():
        if kind in single:
            continue
        words = [f"[{group_text(group)}]" for group in groups]
        if len(words) > _MAX_GROUPS:
            each = len(groups[0])
            words = [*words[:3], "…", words[-1], f"({len(words)} groups of {each})"]
        filled = fill(words, width=width, indent=" " * 8)
        lines.append(f"  {kind:<5} " + filled[0].lstrip())
        lines += filled[1:]
    if single:
        lines.append(f"  {', '.join(single)}: every rank by itself")
    return lines


def process_lines(plan: TopologyPlan, *, width: int) -> list[str]:
    """The tree of processes on each node; nodes of the same shape share one."""
    lines: list[str] = []
    for nodes in _alike(plan.nodes):
        first = nodes[0]
        names = short_list([node.node_rank for node in nodes])
        facts = ["1 process" if first.counts.all == 1 else f"{first.counts.all} processes"]
        if first.ring_bytes:
            facts.append(f"rings {bytes_text(first.ring_bytes)}")
        facts.append(f"{first.descriptors} descriptors in the busiest")
        head = f"processes on node{names} ({first.role}):"
        lines += _hanging(head, " · ".join(facts).split(" "), width=width)
        children: dict[str, list[str]] = {}
        for row in first.processes:
            children.setdefault(row.parent, []).append(row.title.removeprefix("vcli::"))
        named = {parent.removeprefix("vcli::"): titles for parent, titles in children.items()}
        lines += _tree("", named, depth=1)
        if len(nodes) > 1:
            lines.append(f"  (titles of node{first.node_rank}; the others have their own numbers)")
        counts = ", ".join(f"{channel.count} {channel.name}" for channel in first.channels)
        if counts:
            lines += fill(f"channels: {counts}".split(), width=width, indent="  ")
    for reason in dict.fromkeys((helper.title, helper.reason) for helper in plan.helpers):
        lines.append(f"  beside them on each node: {reason[0]} ({reason[1]})")
    return lines


def memory_lines(plan: TopologyPlan) -> list[str]:
    """Weights and KV bytes of the ranks, those that hold equally much in one line."""
    memory = plan.memory
    if memory is None:
        return []
    lines = [f"memory   {memory.num_parameters / 1e6:,.1f} M parameters, {memory.dtype}"]
    by_size: dict[tuple[int, int], list[int]] = {}
    for rank in memory.ranks:
        by_size.setdefault((rank.weight_bytes, rank.kv_bytes_per_token), []).append(rank.rank)
    for (weights, kv), ranks in by_size.items():
        name = "rank" if len(set(ranks)) == 1 else "ranks"
        lines.append(
            f"  {name} {short_list(ranks)}: weights {bytes_text(weights)}, "
            f"KV {bytes_text(kv)} a token"
        )
    return lines


def port_lines(plan: TopologyPlan, *, width: int) -> list[str]:
    """The ports that the other nodes must reach, and who listens there."""
    if not plan.ports:
        return []
    rows = [
        [port.name, f"node{port.node_rank}", f"{port.host}:{port.port or 'any'}", port.bound_by]
        for port in plan.ports
    ]
    lines = ["ports", *columns(rows, indent="  ")]
    for port in plan.ports:
        lines += fill(f"{port.name}: {port.purpose}".split(), width=width, indent="    ")
    return lines


def warning_lines(warnings: Sequence[PlanWarning], *, width: int) -> list[str]:
    """One paragraph for each remark, its id behind it."""
    lines: list[str] = []
    for warning in warnings:
        words = f"{warning.message} [{warning.id}]".split()
        filled = fill(words, width=width, indent=" " * 4)
        lines += [f"  ! {filled[0].strip()}", *filled[1:]]
    return ["findings", *lines] if lines else []


def _alike(nodes: Sequence[NodePlan]) -> list[list[NodePlan]]:
    if len(nodes) <= _MAX_NODES:
        return [[node] for node in nodes]
    found: dict[tuple[object, ...], list[NodePlan]] = {}
    for node in nodes:
        key = (node.role, node.counts, node.ring_bytes, node.descriptors)
        found.setdefault(key, []).append(node)
    return list(found.values())


def _hanging(head: str, words: Sequence[str], *, width: int) -> list[str]:
    filled = fill([*head.split(" "), *words], width=width, indent="  ")
    return [filled[0].strip(), *filled[1:]]


def _tree(parent: str, children: dict[str, list[str]], *, depth: int) -> Iterator[str]:
    titles = children.get(parent, [])
    leaves = [title for title in titles if title not in children]
    for title in titles:
        if title in children:
            yield f"{'  ' * depth}{title}"
            yield from _tree(title, children, depth=depth + 1)
    if len(leaves) > _MAX_LEAVES:
        yield f"{'  ' * depth}{leaves[0]} … {leaves[-1]} ({len(leaves)})"
    else:
        yield from (f"{'  ' * depth}{title}" for title in leaves)
