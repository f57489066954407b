"""The plan as a picture (SVG): nodes, GPUs, groups by colour and hatch, links by dash.

Readable without colour: every TP group has a hatch and a label of its own beside its colour
(Okabe and Ito's palette, which colour-blind people can tell apart). Lines are drawn first, and
every text stands on a plain background. No text is smaller than 11 px.
"""

from collections.abc import Iterator
from html import escape
from typing import Final

from vcli.cli.topo_report import TopoReport
from vcli.cli.views.formats import stage_edges
from vcli.cli.views.layout import headline
from vcli.cli.views.picture_layout import (
    BAND_LABEL_H,
    MARGIN,
    WIDTH,
    Band,
    Box,
    NodeBox,
    PictureLayout,
    lay_out,
)
from vcli.cli.views.text import bytes_text, group_text, plural, seconds_text
from vcli.topology import RankPlan, TopologyPlan
from vcli.topology.links import LinkClass

_COLORS: Final = (
    "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8A7A00", "#555555",
)  # fmt: skip
#: Strokes of an 10 x 10 tile.
_HATCHES: Final = (
    "M0 10L10 0", "M0 0L10 10", "M0 5H10", "M5 0V10", "M0 5H10M5 0V10", "M0 10L10 0M0 0L10 10",
    "M2 2h2v2h-2z", "M0 2H10M0 6H10",
)  # fmt: skip
_TOP: Final = 58
_LINE_H: Final = 20
_MAX_GROUPS: Final = 8
_MAX_CHARS: Final = 150


def svg_view(report: TopoReport) -> str:
    """The whole picture, 1240 wide; at 1280 pixels it is shown as it is."""
    plan = report.plan
    layout = lay_out(plan, top=_TOP)
    notes = list(_notes(report, layout))
    height = layout.bottom + 24 + _LINE_H * len(notes) + MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:g}" '
        f'viewBox="0 0 {WIDTH} {height:g}" role="img" '
        'font-family="DejaVu Sans, Verdana, Arial, sans-serif" font-size="12" fill="#111">',
        f"<title>{escape(headline(plan))}</title>",
        f"<desc>{escape(' '.join(notes))}</desc>",
        _definitions(),
        f'<rect width="{WIDTH}" height="{height:g}" fill="#fff"/>',
        _text(MARGIN, 28, headline(plan).removeprefix("plan").strip(), size=16, bold=True),
        _text(MARGIN, 48, _cut(report.hardware.describe())),
        *_network(report, layout),
        *(_node_frame(node) for node in layout.nodes),
        *(_band_frame(band) for node in layout.nodes for band in node.bands),
        *_edges(plan, layout),
    ]
    for node in layout.nodes:
        parts += _node_labels(report, node)
        for band in node.bands:
            parts += _band_labels(band)
            parts += [piece for rank, box in band.cells for piece in _cell(plan, rank, box, band)]
    for index, note in enumerate(notes):
        parts.append(_text(MARGIN, layout.bottom + 32 + _LINE_H * index, note))
    parts.append("</svg>")
    return "\n".join(parts)


def _definitions() -> str:
    patterns = [
        f'<pattern id="hatch{index}" width="10" height="10" patternUnits="userSpaceOnUse">'
        f'<rect width="10" height="10" fill="{color}" fill-opacity="0.18"/>'
        f'<path d="{hatch}" stroke="{color}" stroke-width="1.4" stroke-opacity="0.7" '
        'fill="none"/></pattern>'
        for index, (color, hatch) in enumerate(zip(_COLORS, _HATCHES, strict=True))
    ]
    arrow = (
        '<marker id="arrow" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" '
        'markerHeight="7" orient="auto-start-reverse"><path d="M0 0L10 5L0 10z"/></marker>'
    )
    return f"<defs>{''.join(patterns)}{arrow}</defs>"


def _network(report: TopoReport, layout: PictureLayout) -> Iterator[str]:
    """A line above each row of nodes, joined at the left, with a branch to each node."""
    if report.plan.config.num_hosts < 2:
        return
    style = 'stroke="#111" stroke-width="2" stroke-dasharray="8 4" fill="none"'
    ys = layout.bus_ys
    yield f'<path d="M{MARGIN / 2:g} {ys[0]:g}V{ys[-1]:g}" {style}/>'
    for node in layout.nodes:
        y = max(height for height in ys if height < node.box.y)
        middle = node.box.x + node.box.w / 2
        yield f'<path d="M{MARGIN / 2:g} {y:g}H{middle:g}V{node.box.y:g}" {style}/>'
    network = report.hardware.network
    label = f"network {network.describe()} a node" if network else "network"
    yield _text(MARGIN, ys[0] - 7, label)


def _node_frame(node: NodeBox) -> str:
    return _rect(node.box, 'fill="#f4f4f4" stroke="#111" stroke-width="1.5" rx="8"')


def _band_frame(band: Band) -> str:
    index = band.index % len(_COLORS)
    return _rect(
        band.box,
        f'fill="url(#hatch{index})" stroke="{_COLORS[index]}" stroke-width="2.5" rx="6"',
    )


def _edges(plan: TopologyPlan, layout: PictureLayout) -> Iterator[str]:
    """The hand-over of hidden states: rank to rank within a node, group to group between nodes."""
    cells: dict[int, tuple[Box, Box]] = {}
    for node in layout.nodes:
        for band in node.bands:
            cells |= {id(rank): (box, band.box) for rank, box in band.cells}
    drawn: set[tuple[Box, Box]] = set()
    for first, second in stage_edges(plan):
        start, end = cells.get(id(first)), cells.get(id(second))
        if start is None or end is None:
            continue
        is_network = first.node_rank != second.node_rank
        pair = (start[1], end[1]) if is_network else (start[0], end[0])
        if pair in drawn:
            continue
        drawn.add(pair)
        dash = ' stroke-dasharray="6 4"' if is_network else ""
        yield (
            f'<path d="{_edge_path(*pair)}" stroke="#111" stroke-width="1.8" fill="none"'
            f'{dash} marker-end="url(#arrow)"/>'
        )


def _edge_path(start: Box, end: Box) -> str:
    """Down the right part of the boxes, clear of the label of the group below; or to the side."""
    if end.x > start.x + start.w:
        y, to_y = start.y + start.h / 2, end.y + end.h / 2
        return f"M{start.x + start.w:g} {y:g}L{end.x - 1:g} {to_y:g}"
    if end.y > start.y + start.h:
        x, to_x = start.x + start.w - 8, end.x + end.w - 8
        return f"M{x:g} {start.y + start.h:g}L{to_x:g} {end.y - 1:g}"
    x, to_x = start.x + start.w - 8, end.x + end.w - 8
    return f"M{x:g} {start.y:g}L{to_x:g} {end.y + end.h + 1:g}"


def _node_labels(report: TopoReport, node: NodeBox) -> Iterator[str]:
    plan, box = report.plan, node.box
    role = plan.nodes[node.node_rank].role.split(" (")[0] if plan.nodes else ""
    name = f"node{node.node_rank}"
    yield from _label(box.x + 14, box.y + 22, name, bold=True, fill="#f4f4f4")
    if role:
        shown = _cut(role, int((box.w - 96) / 7.6))
        yield from _label(box.x + 84, box.y + 22, shown, fill="#f4f4f4")
    near = report.hardware.near
    speed = f" {report.hardware.near_bytes_per_s / 1e9:g} GB/s"
    label = f"{near.value}{speed}" if near is not LinkClass.MEMORY else near.value
    yield (
        f'<path d="M{box.x + 14:g} {box.y + box.h - 16:g}H{box.x + box.w - 14:g}" '
        'stroke="#111" stroke-width="4"/>'
    )
    yield from _label(box.x + 26, box.y + box.h - 12, label, fill="#f4f4f4")


def _band_labels(band: Band) -> Iterator[str]:
    ranks = [rank.global_rank for rank, _ in band.cells]
    text = f"TP {group_text(ranks)}"
    if len(text) > 12:
        text = f"TP {ranks[0]}-{ranks[-1]}"
    yield from _label(band.box.x + 8, band.box.y + BAND_LABEL_H - 8, text, bold=True)


def _cell(plan: TopologyPlan, rank: RankPlan, box: Box, band: Band) -> Iterator[str]:
    color = _COLORS[band.index % len(_COLORS)]
    width = 3 if rank.is_output else 1.5
    yield _rect(box, f'fill="#fff" stroke="{color}" stroke-width="{width}" rx="4"')
    device = "GPU" if plan.device_type == "cuda" else "CPU part"
    numa = f" NUMA {rank.numa_node}" if rank.numa_node is not None else ""
    yield _text(box.x + 8, box.y + 18, f"rank {rank.rank}", size=13, bold=True)
    lines = [f"{device} {rank.device_index}{numa}", _coordinates(plan, rank), *_last_lines(rank)]
    for row, line in enumerate(line for line in lines if line):
        yield _text(box.x + 8, box.y + 36 + 15 * row, line, size=11)
    mark = _mark(plan, rank)
    if mark:
        yield _rect(
            Box(x=box.x + box.w - 34, y=box.y + 5, w=29, h=17),
            'fill="#fff" stroke="#111" stroke-width="1" rx="3"',
        )
        yield _text(box.x + box.w - 31, box.y + 18, mark, size=11)


def _coordinates(plan: TopologyPlan, rank: RankPlan) -> str:
    sizes = plan.config
    axes = (
        ("dp", rank.dp_rank, sizes.dp),
        ("pp", rank.pp_rank, sizes.pp),
        ("pcp", rank.pcp_rank, sizes.pcp),
        ("tp", rank.tp_rank, sizes.tp),
    )
    return " ".join(f"{name}{index}" for name, index, size in axes if size > 1)


def _last_lines(rank: RankPlan) -> Iterator[str]:
    span = rank.layer_span
    if span and span[1] > span[0]:
        yield f"layers {span[0]}-{span[1] - 1}"
    if rank.is_output:
        yield "replies"


def _mark(plan: TopologyPlan, rank: RankPlan) -> str:
    """Which group of experts, or else which replica: `E0`, `D3`."""
    group = rank.group("EP")
    if group is not None and group.size > 1:
        groups = plan.groups["EP"]
        return f"E{groups.index(group.ranks)}"
    return f"D{rank.dp_rank}" if plan.config.dp > 1 else ""


def _notes(report: TopoReport, layout: PictureLayout) -> Iterator[str]:
    plan = report.plan
    if layout.num_hidden_nodes:
        yield f"and {plural(layout.num_hidden_nodes, 'more node')} (vcli topo --format csv has all)"
    marks = []
    if plan.config.dp > 1:
        marks.append("D0, D1: replica")
    if any(kind == "EP" and len(groups[0]) > 1 for kind, groups in plan.groups.items()):
        marks = ["E0, E1: group that shares the experts"]
    legend = [
        "hatched box: a tensor-parallel group",
        *(
            ["arrow: hidden states to the next stage (dashed: network)"]
            if plan.config.pp > 1
            else []
        ),
        "thick frame: replies",
        *marks,
    ]
    yield " · ".join(legend)
    for kind, groups in plan.groups.items():
        if len(groups[0]) > 1:
            shown = " ".join(f"[{group_text(group)}]" for group in groups[:_MAX_GROUPS])
            more = " …" if len(groups) > _MAX_GROUPS else ""
            yield _cut(f"{kind}: {shown}{more}")
    for item in report.transfers:
        if plan.model is not None:
            yield _cut(
                f"{item.kind} sends {bytes_text(item.bytes_per_token)} a token over "
                f"{item.link.value}, {seconds_text(item.seconds)} a step of "
                f"{plural(report.step_tokens, 'token')}"
            )


def _label(
    x: float, y: float, text: str, *, bold: bool = False, fill: str = "#fff"
) -> Iterator[str]:
    """Text with a plain background."""
    width = len(text) * (8.3 if bold else 7.6) + 8
    yield _rect(Box(x=x - 4, y=y - 13, w=width, h=18), f'fill="{fill}" rx="3"')
    yield _text(x, y, text, bold=bold)


def _text(x: float, y: float, text: str, *, size: int = 12, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}"{weight}>{escape(text)}</text>'


def _rect(box: Box, style: str) -> str:
    return f'<rect x="{box.x:g}" y="{box.y:g}" width="{box.w:g}" height="{box.h:g}" {style}/>'


def _cut(text: str, most: int = _MAX_CHARS) -> str:
    return text if len(text) <= most else text[: max(most - 1, 1)] + "…"
