"""How the rank grid is turned and cut into the groups of one kind, with the user's own numbers."""

from dataclasses import dataclass
from typing import Final

from vcli.topology.errors import ConfigError
from vcli.topology.grid import Axis, torch_world_grid
from vcli.topology.groups import GroupKind, Groups, build_groups, group_spec, is_built
from vcli.topology.sizes import ParallelSizes

AXIS_NAMES: Final = {
    Axis.EXTERNAL_DP: "ExternalDP",
    Axis.DP: "DP",
    Axis.PP: "PP",
    Axis.PCP: "PCP",
    Axis.TP: "TP",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupExplanation:
    """`order` lists the axes after the turn, last fastest; `row` the ranks in that order.

    `swaps` is what turns the grid, as torch spells it; `group_size` cuts the row.
    """

    kind: GroupKind
    meaning: str
    shape: tuple[tuple[str, int], ...]
    swaps: tuple[str, ...]
    order: tuple[tuple[str, int], ...]
    row: tuple[int, ...]
    group_size: int
    groups: Groups
    note: str

    @property
    def code(self) -> str:
        """The same as one line of torch."""
        sizes = ", ".join(str(size) for _, size in self.shape)
        turned = "".join(f".{swap}" for swap in self.swaps)
        reshape = f".reshape(-1, {self.group_size})"
        return f"torch.arange({len(self.row)}).reshape({sizes}){turned}{reshape}"


def parse_kind(name: str) -> GroupKind:
    """The kind that the user calls `name`, in any case.

    Raises:
        ConfigError: no kind of group.
    """
    try:
        return GroupKind(name.upper())
    except ValueError:
        kinds = ", ".join(kind.lower() for kind in GroupKind)
        raise ConfigError(f"{name!r} is no kind of group", hint=f"one of {kinds}") from None


def explain_group(kind: GroupKind, sizes: ParallelSizes) -> GroupExplanation:
    """How the groups of `kind` are made.

    Raises:
        ConfigError: this deployment has no groups of the kind.
    """
    if not is_built(kind, sizes):
        needs = "--enable-eplb" if sizes.is_moe else "a model with experts, or --moe"
        raise ConfigError(f"this plan has no {kind} groups", hint=f"{kind} needs {needs}")
    spec, grid = group_spec(kind), torch_world_grid(sizes)
    # Groups of one rank are left in the order of the ranks.
    order = tuple(Axis) if kind is GroupKind.DCP and sizes.dcp == 1 else spec.order
    groups = build_groups(sizes)[kind]
    return GroupExplanation(
        kind=kind,
        meaning=spec.meaning,
        shape=tuple((AXIS_NAMES[axis], grid.sizes[axis]) for axis in Axis),
        swaps=_swaps(order),
        order=tuple((AXIS_NAMES[axis], grid.sizes[axis]) for axis in order),
        row=tuple(rank for group in groups for rank in group),
        group_size=len(groups[0]),
        groups=groups,
        note=_note(kind, sizes),
    )


def _swaps(order: tuple[Axis, ...]) -> tuple[str, ...]:
    """Transpositions that turn the grid's own order into `order`."""
    current, swaps = list(Axis), []
    for position, axis in enumerate(order):
        found = current.index(axis)
        if found != position:
            current[position], current[found] = current[found], current[position]
            swaps.append(f"transpose({position}, {found})")
    return tuple(swaps)


def _note(kind: GroupKind, sizes: ParallelSizes) -> str:
    if kind is GroupKind.DCP and sizes.dcp > 1:
        return "a slice of PCP x TP, PCP first, so that tokens are shared before heads are"
    if kind in (GroupKind.EP, GroupKind.EPLB):
        return "one group per stage holds all its DP x PCP x TP ranks, the last axes fastest"
    if kind is GroupKind.DP and sizes.worlds > 1:
        return "replicas of a dense model are worlds of their own: no rank has a DP partner"
    return ""
