"""The table of ranks: every one up to a screenful, beyond that equal ones folded into a row."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from vcli.cli.views.devices import short_uuid
from vcli.cli.views.text import columns, group_text, plural, short_list
from vcli.topology import RankPlan, TopologyPlan

#: More ranks than this are folded.
MAX_ROWS: Final = 32
#: Kinds whose groups have columns of their own, in the order in which those are given up.
_GROUP_COLUMNS: Final = ("EP", "DP", "PP", "TP")


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """Header and cells; a higher `priority` is given up later where the width is short."""

    header: str
    cells: tuple[str, ...]
    priority: int

    @property
    def width(self) -> int:
        """Characters of the widest cell."""
        return max(len(self.header), *(len(cell) for cell in self.cells))


def rank_lines(plan: TopologyPlan, *, width: int) -> list[str]:
    """The table, at most `width` wide."""
    ranks = plan.ranks
    rows = [[rank] for rank in ranks] if len(ranks) <= MAX_ROWS else _folded(plan)
    is_folded = len(ranks) > MAX_ROWS
    kept = _fit(_columns(plan, rows, is_folded=is_folded), width)
    table = columns(
        [[column.header for column in kept]]
        + [[column.cells[row] for column in kept] for row in range(len(rows))]
    )
    if is_folded:
        shown = plural(len(rows), "row")
        table.append(f"{plural(len(ranks), 'rank')} in {shown}; one of them: --rank N")
    return table


def _folded(plan: TopologyPlan) -> list[list[RankPlan]]:
    """Ranks that are alike, one list a row: nodes of one shape, then ranks of one shape in them."""
    by_node: dict[int, list[RankPlan]] = {}
    for rank in plan.ranks:
        by_node.setdefault(rank.node_rank, []).append(rank)
    shapes: dict[tuple[object, ...], int] = {}
    rows: dict[tuple[object, ...], list[RankPlan]] = {}
    for listed in by_node.values():
        first = listed[0]
        keys = [_shape(rank, first) for rank in listed]
        shape = shapes.setdefault(tuple(keys), len(shapes))
        for rank, key in zip(listed, keys, strict=True):
            rows.setdefault((shape, *key[:-1]), []).append(rank)
    return list(rows.values())


def _shape(rank: RankPlan, first: RankPlan) -> tuple[object, ...]:
    """What makes a rank like another of its node or of another node; the TP rank stands last."""
    span = rank.layer_span
    return (
        rank.dp_rank - first.dp_rank,
        rank.pp_rank - first.pp_rank,
        rank.pcp_rank,
        span[1] - span[0] if span else 0,
        rank.is_output,
        rank.numa_node,
        rank.tp_rank,
    )


def _columns(
    plan: TopologyPlan, rows: Sequence[Sequence[RankPlan]], *, is_folded: bool
) -> list[Column]:
    sizes = plan.config

    def numbers(header: str, priority: int, name: str) -> Column:
        cells = tuple(short_list([getattr(rank, name) for rank in row]) for row in rows)
        return Column(header=header, cells=cells, priority=priority)

    listed = [
        numbers("node", 100, "node_rank"),
        numbers("gpu" if plan.device_type == "cuda" else "dev", 99, "device_index"),
        numbers("rank", 98, "rank"),
    ]
    listed += _device_columns(plan, rows)
    if any(rank.local_rank != rank.device_index for rank in plan.ranks):
        listed.append(numbers("local", 50, "local_rank"))
    if any(rank.global_rank != rank.rank for rank in plan.ranks):
        listed.append(numbers("global", 60, "global_rank"))
    for header, size in (("dp", sizes.dp), ("pp", sizes.pp), ("pcp", sizes.pcp), ("tp", sizes.tp)):
        if size > 1:
            listed.append(numbers(header, 90, f"{header}_rank"))
    if not is_folded:
        listed += _group_columns(rows)
    if plan.layer_spans:
        cells = tuple(_layers(row) for row in rows)
        listed.append(Column(header="layers", cells=cells, priority=80))
    if any(rank.numa_node is not None for rank in plan.ranks):
        cells = tuple(
            short_list([rank.numa_node for rank in row if rank.numa_node is not None])
            for row in rows
        )
        listed.append(Column(header="NUMA", cells=cells, priority=70))
    if any(rank.nic for rank in plan.ranks):
        cells = tuple(_nics(row) for row in rows)
        listed.append(Column(header="NIC", cells=cells, priority=65))
    titles = tuple(_first_and_last([_bare(rank.title) for rank in row]) for row in rows)
    listed.append(Column(header="title", cells=titles, priority=30))
    marks = tuple("replies" if any(rank.is_output for rank in row) else "" for row in rows)
    return [*listed, Column(header="", cells=marks, priority=95)]


def _device_columns(plan: TopologyPlan, rows: Sequence[Sequence[RankPlan]]) -> list[Column]:
    """Visible and physical numbers where they are not the logical ones; what UUIDs are known."""

    def cells(numbers: Sequence[Sequence[int | None]]) -> tuple[str, ...]:
        known = [[number for number in row if number is not None] for row in numbers]
        return tuple(short_list(row) if row else "-" for row in known)

    found = []
    if any(rank.visible_index not in (None, rank.device_index) for rank in plan.ranks):
        visible = cells([[rank.visible_index for rank in row] for row in rows])
        found.append(Column(header="visible", cells=visible, priority=75))
    if any(rank.physical_index not in (None, rank.device_index) for rank in plan.ranks):
        physical = cells([[rank.physical_index for rank in row] for row in rows])
        found.append(Column(header="physical", cells=physical, priority=76))
    if any(rank.device_uuid for rank in plan.ranks):
        uuids = [[short_uuid(rank.device_uuid) or "-" for rank in row] for row in rows]
        names = tuple(_first_and_last(row) for row in uuids)
        found.append(Column(header="uuid", cells=names, priority=25))
    return found


def _group_columns(rows: Sequence[Sequence[RankPlan]]) -> list[Column]:
    found = []
    for priority, kind in enumerate(_GROUP_COLUMNS, start=10):
        groups = [row[0].group(kind) for row in rows]
        if any(group is not None and group.size > 1 for group in groups):
            cells = tuple(f"[{group_text(group.ranks)}]" if group else "" for group in groups)
            found.append(Column(header=f"{kind} group", cells=cells, priority=priority + 30))
    return found[::-1]


def _fit(listed: list[Column], width: int) -> list[Column]:
    """Give up columns, the least wanted first, until the rest fits."""
    kept = list(listed)
    while sum(column.width + 2 for column in kept) - 2 > width and len(kept) > 1:
        kept.remove(min(kept, key=lambda column: column.priority))
    return kept


def _layers(row: Sequence[RankPlan]) -> str:
    spans = sorted({rank.layer_span for rank in row if rank.layer_span})
    texts = [f"{start}-{end - 1}" if end > start else "-" for start, end in spans]
    return texts[0] if len(texts) == 1 else f"{texts[0]} … {texts[-1]}"


def _nics(row: Sequence[RankPlan]) -> str:
    names = list(dict.fromkeys(f"{rank.nic} {rank.nic_way}" for rank in row if rank.nic))
    return _first_and_last(names)


def _first_and_last(texts: Sequence[str]) -> str:
    distinct = list(dict.fromkeys(texts))
    if len(distinct) <= 1:
        return distinct[0] if distinct else ""
    return f"{distinct[0]}…{distinct[-1]}"


def _bare(title: str) -> str:
    return title.removeprefix("vcli::")
