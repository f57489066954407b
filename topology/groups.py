"""The table of group kinds: which axes of the rank grid each one spans.

    kind   ranks that differ only in ...        order of the axes, last fastest
    TP     TP                                   Ext DP PP PCP TP
    DCP    a slice of PCP x TP, PCP first       Ext DP PP TP PCP   (dcp = 1: each rank alone)
    PCP    PCP                                  Ext DP PP TP PCP
    PP     PP                                   Ext DP TP PCP PP
    DP     DP                                   Ext TP PP PCP DP
    EP     DP, PCP and TP (one per PP stage)    Ext PP DP PCP TP   (only models with experts)
    EPLB   as EP                                as EP              (only with load balancing)

The order decides in which sequence groups are created, which must be the same on all ranks.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum

from vcli.topology.grid import Axis, RankGrid, torch_world_grid
from vcli.topology.sizes import ParallelSizes

Groups = tuple[tuple[int, ...], ...]


class GroupKind(StrEnum):
    """What a group of ranks does together."""

    TP = "TP"
    DCP = "DCP"
    PCP = "PCP"
    PP = "PP"
    DP = "DP"
    EP = "EP"
    EPLB = "EPLB"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """One row of the table: `spanned` axes stand last in `order`; `meaning` is one sentence."""

    kind: GroupKind
    order: tuple[Axis, ...]
    spanned: tuple[Axis, ...]
    meaning: str


_EXT, _DP, _PP, _PCP, _TP = Axis

GROUP_SPECS: tuple[GroupSpec, ...] = (
    GroupSpec(
        kind=GroupKind.TP,
        order=(_EXT, _DP, _PP, _PCP, _TP),
        spanned=(_TP,),
        meaning="share each layer's weights; all-reduce after attention and MLP",
    ),
    GroupSpec(
        kind=GroupKind.DCP,
        order=(_EXT, _DP, _PP, _TP, _PCP),
        spanned=(_TP, _PCP),
        meaning="share the KV cache of a sequence while decoding",
    ),
    GroupSpec(
        kind=GroupKind.PCP,
        order=(_EXT, _DP, _PP, _TP, _PCP),
        spanned=(_PCP,),
        meaning="share the tokens of a prompt while prefilling",
    ),
    GroupSpec(
        kind=GroupKind.PP,
        order=(_EXT, _DP, _TP, _PCP, _PP),
        spanned=(_PP,),
        meaning="hand the hidden states on from stage to stage",
    ),
    GroupSpec(
        kind=GroupKind.DP,
        order=(_EXT, _TP, _PP, _PCP, _DP),
        spanned=(_DP,),
        meaning="hold the same weights for different requests",
    ),
    GroupSpec(
        kind=GroupKind.EP,
        order=(_EXT, _PP, _DP, _PCP, _TP),
        spanned=(_DP, _PCP, _TP),
        meaning="share the experts of a layer",
    ),
    GroupSpec(
        kind=GroupKind.EPLB,
        order=(_EXT, _PP, _DP, _PCP, _TP),
        spanned=(_DP, _PCP, _TP),
        meaning="move experts between ranks to balance their load",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMembership:
    """One group as a member sees it; `ranks` are ranks of the torch world."""

    kind: GroupKind
    ranks: tuple[int, ...]
    rank_in_group: int

    @property
    def size(self) -> int:
        """Members of the group."""
        return len(self.ranks)


def build_groups(config: ParallelSizes) -> dict[GroupKind, Groups]:
    """All groups of one torch world, kinds and groups in the order in which they are created."""
    grid = torch_world_grid(config)
    return {
        spec.kind: grid.slices(_order(spec, config), _group_size(spec, grid, config))
        for spec in GROUP_SPECS
        if is_built(spec.kind, config)
    }


def is_built(kind: GroupKind, config: ParallelSizes) -> bool:
    """Whether a deployment has groups of this kind at all."""
    if kind is GroupKind.EP:
        return config.is_moe
    if kind is GroupKind.EPLB:
        return config.is_moe and config.enable_eplb
    return True


def groups_of_rank(groups: Mapping[GroupKind, Groups], rank: int) -> tuple[GroupMembership, ...]:
    """The groups that `rank` (of the torch world) belongs to, one of each kind."""
    return tuple(
        GroupMembership(kind=kind, ranks=ranks, rank_in_group=ranks.index(rank))
        for kind, kind_groups in groups.items()
        for ranks in kind_groups
        if rank in ranks
    )


def group_memberships(
    groups: Mapping[GroupKind, Groups], wanted: Collection[int]
) -> dict[int, tuple[GroupMembership, ...]]:
    """`groups_of_rank` for every rank in `wanted`, in one pass."""
    table: dict[int, list[GroupMembership]] = {rank: [] for rank in wanted}
    has_no_wanted = table.keys().isdisjoint
    for kind, kind_groups in groups.items():
        for ranks in kind_groups:
            if has_no_wanted(ranks):
                continue
            for rank_in_group, rank in enumerate(ranks):
                if rank in table:
                    table[rank].append(
                        GroupMembership(kind=kind, ranks=ranks, rank_in_group=rank_in_group)
                    )
    return {rank: tuple(row) for rank, row in table.items()}


def group_spec(kind: GroupKind) -> GroupSpec:
    """The row of the table for `kind`."""
    return next(spec for spec in GROUP_SPECS if spec.kind is kind)


def _order(spec: GroupSpec, config: ParallelSizes) -> tuple[Axis, ...]:
    # Groups of one rank are created in the order of the ranks.
    return tuple(Axis) if spec.kind is GroupKind.DCP and config.dcp == 1 else spec.order


def _group_size(spec: GroupSpec, grid: RankGrid, config: ParallelSizes) -> int:
    if spec.kind is GroupKind.DCP:
        return config.dcp
    size = 1
    for axis in spec.spanned:
        size *= grid.sizes[axis]
    return size
