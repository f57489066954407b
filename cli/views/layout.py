"""A plan as text: sizes, ranks, groups, processes, memory, decisions, warnings."""

from collections.abc import Iterator

from vcli.cli.views.decisions import decision_lines
from vcli.cli.views.text import bytes_text, columns, fill, rank_list
from vcli.topology import RankPlan, TopologyPlan

_MAX_RANK_ROWS = 64


def layout_view(plan: TopologyPlan, *, width: int) -> str:
    """Everything that `topo` shows for people, in lines of at most `width` where words allow."""
    sections = (
        [headline(plan)],
        _rank_lines(plan),
        _group_lines(plan, width=width),
        _process_lines(plan),
        _memory_lines(plan),
        _port_lines(plan),
        decision_lines(plan, width=width),
        _warning_lines(plan, width=width),
    )
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def headline(plan: TopologyPlan) -> str:
    """`world 8 = pp4 × tp2 · 1 node · cpu`."""
    config = plan.config
    sizes = [
        ("external dp", config.external_data_parallel_size),
        ("dp", config.dp),
        ("pp", config.pp),
        ("pcp", config.pcp),
        ("tp", config.tp),
    ]
    shown = " × ".join(f"{name}{size}" for name, size in sizes if size > 1)
    nodes = f"{config.num_hosts} node{'s' if config.num_hosts > 1 else ''}"
    total = plan.world_size_across_dp * config.external_data_parallel_size
    world = f"{total} rank{'s' if total > 1 else ''}"
    return f"plan   {world}{' = ' + shown if shown else ''} · {nodes} · {plan.device_type}"


def _rank_lines(plan: TopologyPlan) -> list[str]:
    header = ["node", "dev", "rank", "dp", "pp", "tp", "layers", "title", ""]
    rows = [header]
    rows += [_rank_row(rank) for rank in plan.ranks[:_MAX_RANK_ROWS]]
    lines = columns(rows)
    left = len(plan.ranks) - _MAX_RANK_ROWS
    if left > 0:
        lines.append(f"… and {left} more ranks (--json has them all)")
    return lines


def _rank_row(rank: RankPlan) -> list[str]:
    span = rank.layer_span
    marks = [name for name, is_so in (("replies", rank.is_output),) if is_so]
    return [
        f"node{rank.node_rank}",
        str(rank.device_index),
        str(rank.global_rank),
        str(rank.dp_rank),
        str(rank.pp_rank),
        str(rank.tp_rank),
        f"{span[0]}-{span[1] - 1}" if span and span[1] > span[0] else "-",
        rank.title,
        ", ".join(marks),
    ]


def _group_lines(plan: TopologyPlan, *, width: int) -> list[str]:
    lines = ["groups (global ranks)"]
    if plan.worlds > 1:
        lines[0] = f"groups (of each of {plan.worlds} independent worlds)"
    for kind, groups in plan.groups.items():
        if all(len(group) == 1 for group in groups):
            lines.append(f"  {kind:<5} every rank by itself")
            continue
        words = [f"[{_group_text(group)}]" for group in groups]
        filled = fill(words, width=width, indent=" " * 8)
        lines.append(f"  {kind:<5} " + filled[0].lstrip())
        lines += filled[1:]
    return lines


def _group_text(ranks: tuple[int, ...]) -> str:
    return ",".join(map(str, ranks)) if len(ranks) <= 8 else rank_list(ranks)


def _process_lines(plan: TopologyPlan) -> list[str]:
    lines: list[str] = []
    for node in plan.nodes:
        extra = f" · rings {bytes_text(node.ring_bytes)}" if node.ring_bytes else ""
        lines.append(f"processes on node{node.node_rank} ({node.role}): {node.counts.all}{extra}")
        children: dict[str, list[str]] = {}
        for row in node.processes:
            children.setdefault(row.parent, []).append(row.title)
        lines += _tree("", children, depth=1)
    for helper in plan.helpers:
        lines.append(f"  beside them on node{helper.node_rank}: {helper.title} ({helper.reason})")
    return lines


def _tree(parent: str, children: dict[str, list[str]], *, depth: int) -> Iterator[str]:
    titles = children.get(parent, [])
    leaves = [title for title in titles if title not in children]
    for title in titles:
        if title in children:
            yield f"{'  ' * depth}{title}"
            yield from _tree(title, children, depth=depth + 1)
    if len(leaves) > 8:
        yield f"{'  ' * depth}{leaves[0]} … {leaves[-1]} ({len(leaves)})"
    else:
        yield from (f"{'  ' * depth}{title}" for title in leaves)


def _memory_lines(plan: TopologyPlan) -> list[str]:
    memory = plan.memory
    if memory is None:
        return []
    lines = [f"memory   {memory.num_parameters / 1e6:,.1f} M parameters, {memory.dtype}"]
    by_size: dict[tuple[int, int], list[int]] = {}
    for rank in memory.ranks:
        by_size.setdefault((rank.weight_bytes, rank.kv_bytes_per_token), []).append(rank.rank)
    for (weights, kv), ranks in by_size.items():
        name = "rank" if len(ranks) == 1 else "ranks"
        lines.append(
            f"  {name} {rank_list(set(ranks))}: weights {bytes_text(weights)}, "
            f"KV {bytes_text(kv)} a token"
        )
    return lines


def _port_lines(plan: TopologyPlan) -> list[str]:
    if not plan.ports:
        return []
    rows = [
        [port.name, f"node{port.node_rank}", f"{port.host}:{port.port or 'any'}", port.purpose]
        for port in plan.ports
    ]
    return ["ports", *columns(rows, indent="  ")]


def _warning_lines(plan: TopologyPlan, *, width: int) -> list[str]:
    lines: list[str] = []
    for warning in plan.warnings:
        filled = fill(warning.message.split(), width=width, indent=" " * 4)
        lines += [f"  ! {filled[0].strip()} [{warning.id}]", *filled[1:]]
    return ["findings", *lines] if lines else []
