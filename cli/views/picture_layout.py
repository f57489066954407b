"""Where everything stands in the picture of a plan: boxes of nodes, TP groups and ranks.

Pixels at scale 1; y grows downwards. A TP group of more than six ranks is broken into rows of
four, so that two nodes of eight GPUs stand side by side.
"""

from dataclasses import dataclass
from typing import Final

from vcli.topology import RankPlan, TopologyPlan

WIDTH: Final = 1240
MARGIN: Final = 16
CELL_W: Final = 124
CELL_H: Final = 88
GAP: Final = 12
PAD: Final = 14
BAND_PAD: Final = 8
BAND_LABEL_H: Final = 24
BAND_GAP: Final = 30
HEADER_H: Final = 34
FOOTER_H: Final = 34
#: Space above a row of nodes for the network.
BUS_H: Final = 48
#: Nodes beyond these are told in words.
MAX_NODES: Final = 8
MAX_RANKS: Final = 128
_ROW_OF_MANY: Final = 4
_LONGEST_ROW: Final = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A rectangle."""

    x: float
    y: float
    w: float
    h: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """The ranks of one TP group on one node; `index` counts the TP groups of the plan."""

    box: Box
    index: int
    cells: tuple[tuple[RankPlan, Box], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeBox:
    """One node with its bands."""

    box: Box
    node_rank: int
    bands: tuple[Band, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureLayout:
    """Nodes in rows; `bus_ys` are the heights of the network above each row."""

    nodes: tuple[NodeBox, ...]
    bus_ys: tuple[float, ...]
    bottom: float
    num_hidden_nodes: int


def lay_out(plan: TopologyPlan, *, top: float) -> PictureLayout:
    """The boxes of the first nodes of `plan`, below `top`."""
    groups = _bands_of_nodes(plan)
    shown = _shown(groups)
    nodes: list[NodeBox] = []
    bus_ys: list[float] = []
    x, y, row_h = float(MARGIN), top + BUS_H, 0.0
    for node_rank in shown:
        bands = groups[node_rank]
        width, height = _node_size(bands)
        if nodes and x + width > WIDTH - MARGIN:
            x, y, row_h = float(MARGIN), y + row_h + BUS_H, 0.0
        if x == MARGIN:
            bus_ys.append(y - BUS_H / 2)
        nodes.append(_node(node_rank, bands, Box(x=x, y=y, w=width, h=height)))
        x += width + 2 * GAP
        row_h = max(row_h, height)
    return PictureLayout(
        nodes=tuple(nodes),
        bus_ys=tuple(bus_ys),
        bottom=y + row_h,
        num_hidden_nodes=len(groups) - len(shown),
    )


def _bands_of_nodes(plan: TopologyPlan) -> dict[int, list[tuple[int, list[RankPlan]]]]:
    """For each node its TP groups, with their numbers in the plan."""
    found: dict[int, dict[int, list[RankPlan]]] = {}
    for position, rank in enumerate(plan.ranks):
        index = position // plan.config.tp
        found.setdefault(rank.node_rank, {}).setdefault(index, []).append(rank)
    return {node: list(bands.items()) for node, bands in found.items()}


def _shown(groups: dict[int, list[tuple[int, list[RankPlan]]]]) -> list[int]:
    shown: list[int] = []
    num_ranks = 0
    for node_rank, bands in groups.items():
        num_ranks += sum(len(ranks) for _, ranks in bands)
        if shown and (num_ranks > MAX_RANKS or len(shown) == MAX_NODES):
            break
        shown.append(node_rank)
    return shown


def _num_columns(num_ranks: int) -> int:
    return num_ranks if num_ranks <= _LONGEST_ROW else _ROW_OF_MANY


def _band_size(num_ranks: int) -> tuple[float, float]:
    columns = _num_columns(num_ranks)
    rows = -(-num_ranks // columns)
    width = 2 * BAND_PAD + columns * CELL_W + (columns - 1) * GAP
    return width, BAND_LABEL_H + rows * CELL_H + (rows - 1) * GAP + BAND_PAD


def _node_size(bands: list[tuple[int, list[RankPlan]]]) -> tuple[float, float]:
    sizes = [_band_size(len(ranks)) for _, ranks in bands]
    # The header has to fit above a node of one GPU.
    width = max(2 * PAD + max(width for width, _ in sizes), 250)
    inner = sum(height for _, height in sizes) + BAND_GAP * (len(sizes) - 1)
    return width, HEADER_H + inner + FOOTER_H


def _node(node_rank: int, bands: list[tuple[int, list[RankPlan]]], box: Box) -> NodeBox:
    placed = []
    y = box.y + HEADER_H
    for index, ranks in bands:
        width, height = _band_size(len(ranks))
        band = Box(x=box.x + PAD, y=y, w=width, h=height)
        columns = _num_columns(len(ranks))
        cells = tuple(
            (
                rank,
                Box(
                    x=band.x + BAND_PAD + position % columns * (CELL_W + GAP),
                    y=band.y + BAND_LABEL_H + position // columns * (CELL_H + GAP),
                    w=CELL_W,
                    h=CELL_H,
                ),
            )
            for position, rank in enumerate(ranks)
        )
        placed.append(Band(box=band, index=index, cells=cells))
        y += height + BAND_GAP
    return NodeBox(box=box, node_rank=node_rank, bands=tuple(placed))
