"""Properties of every layout up to 64 ranks."""

from collections import Counter
from collections.abc import Iterator
from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from vcli.topology import (
    Coords,
    GroupKind,
    ParallelConfig,
    RankGrid,
    TopologyPlan,
    VcliError,
    build_groups,
    groups_of_rank,
    layer_ranges,
    num_local_experts,
    place_experts,
    plan_to_json,
    plan_topology,
)

SIZES = (1, 2, 3, 4, 8)


def layouts(max_ranks: int) -> Iterator[ParallelConfig]:
    """Every valid config of these sizes, dense and with experts, with every fitting DCP."""
    for tp, pp, pcp, dp, ext in product(SIZES, SIZES, (1, 2, 3), SIZES, (1, 2)):
        if tp * pp * pcp * dp * ext > max_ranks:
            continue
        for dcp, is_moe in product(sorted({1, 2, 4, pcp, tp * pcp}), (False, True)):
            try:
                yield ParallelConfig(
                    tensor_parallel_size=tp,
                    pipeline_parallel_size=pp,
                    prefill_context_parallel_size=pcp,
                    decode_context_parallel_size=dcp,
                    data_parallel_size=dp,
                    external_data_parallel_size=ext,
                    is_moe=is_moe,
                    enable_expert_parallel=is_moe,
                    enable_eplb=is_moe and tp * pcp * dp > 1,
                )
            except VcliError:
                continue


def expected_group_size(kind: str, config: ParallelConfig) -> int:
    shared_dp = config.dp if config.is_one_world else 1
    return {
        "TP": config.tp,
        "DCP": config.dcp,
        "PCP": config.pcp,
        "PP": config.pp,
        "DP": shared_dp,
        "EP": shared_dp * config.pcp * config.tp,
        "EPLB": shared_dp * config.pcp * config.tp,
    }[kind]


def test_every_kind_partitions_the_world_in_groups_of_its_size() -> None:
    count = 0
    for config in layouts(64):
        count += 1
        world = list(range(config.torch_world))
        for kind, groups in build_groups(config).items():
            assert sorted(rank for ranks in groups for rank in ranks) == world, (config, kind)
            assert {len(ranks) for ranks in groups} == {expected_group_size(kind, config)}
            assert all(list(ranks) == sorted(ranks) for ranks in groups if kind != "DCP")
    assert count > 500


def test_each_rank_is_in_exactly_one_group_of_a_kind() -> None:
    for config in layouts(16):
        groups = build_groups(config)
        for rank in range(config.torch_world):
            mine = groups_of_rank(groups, rank)
            assert [membership.kind for membership in mine] == list(groups)
            assert all(membership.ranks[membership.rank_in_group] == rank for membership in mine)


def test_groups_hold_the_other_coordinates_fixed() -> None:
    config = ParallelConfig(
        tensor_parallel_size=2,
        pipeline_parallel_size=2,
        prefill_context_parallel_size=2,
        data_parallel_size=2,
        external_data_parallel_size=2,
        is_moe=True,
    )
    grid = RankGrid(sizes=(2, 2, 2, 2, 2))
    free = {"TP": {4}, "PCP": {3}, "PP": {2}, "DP": {1}, "EP": {1, 3, 4}}

    for kind, groups in build_groups(config).items():
        if kind is GroupKind.DCP:
            continue
        for ranks in groups:
            coords = [grid.coords(rank) for rank in ranks]
            varying = {axis for axis in range(5) if len({c[axis] for c in coords}) > 1}
            assert varying == free[kind]


def test_dcp_groups_go_over_context_ranks_first() -> None:
    config = ParallelConfig(
        tensor_parallel_size=4, prefill_context_parallel_size=2, decode_context_parallel_size=8
    )

    assert build_groups(config)[GroupKind.DCP] == ((0, 4, 1, 5, 2, 6, 3, 7),)


@given(st.tuples(*[st.integers(1, 4)] * 5))
@settings(max_examples=50, deadline=None)
def test_rank_and_coords_are_inverse(sizes: tuple[int, int, int, int, int]) -> None:
    grid = RankGrid(sizes=sizes)

    for rank in range(grid.num_ranks):
        coords = grid.coords(rank)
        assert grid.rank(coords) == rank
        assert all(0 <= value < size for value, size in zip(coords, sizes, strict=True))
    assert grid.coords(0) == Coords(0, 0, 0, 0, 0)


def check_plan(plan: TopologyPlan) -> None:
    config = plan.config
    assert len(plan.ranks) == config.world_size_across_dp * config.external_data_parallel_size
    assert sum(rank.is_output for rank in plan.ranks) == len(plan.ranks) // config.world_size
    for node in plan.nodes:
        devices = [rank.device_index for rank in node.ranks]
        assert sorted(devices) == list(range(len(devices)))
        per_replica = Counter(rank.dp_rank for rank in node.ranks)
        assert set(per_replica.values()) == {config.local_world_size}
        titles = [row.title for row in node.processes]
        assert all(row.parent == "" or row.parent in titles for row in node.processes)
        assert len(titles) == len(set(titles))
        assert node.counts.all == len(node.processes)
    if plan.nodes:
        assert sum(len(node.ranks) for node in plan.nodes) == len(plan.ranks)
        assert plan.totals is not None
        assert plan.totals.engine_cores == config.dp
    for rank in plan.ranks[: config.world_size]:
        assert plan.rank_plan(rank.rank) is rank
        assert rank in plan.local_ranks(rank.node_rank)


def test_every_layout_plans_and_adds_up() -> None:
    for config in layouts(24):
        check_plan(plan_topology(config))


@given(
    st.fixed_dictionaries(
        {
            "tensor_parallel_size": st.integers(1, 8),
            "pipeline_parallel_size": st.integers(1, 4),
            "prefill_context_parallel_size": st.sampled_from((1, 1, 2)),
            "decode_context_parallel_size": st.sampled_from((1, 1, 2, 4)),
            "data_parallel_size": st.integers(1, 6),
            "data_parallel_size_local": st.none() | st.integers(1, 6),
            "data_parallel_rank": st.none() | st.integers(0, 3),
            "data_parallel_external_lb": st.booleans(),
            "data_parallel_hybrid_lb": st.booleans(),
            "nnodes": st.integers(1, 8),
            "node_rank": st.integers(0, 3),
            "headless": st.booleans(),
            "is_moe": st.booleans(),
            "enable_expert_parallel": st.booleans(),
            "enable_eplb": st.booleans(),
            "api_server_count": st.none() | st.integers(0, 3),
            "distributed_executor_backend": st.sampled_from(
                (None, "uni", "mp", "colocated", "ray", "a.b.Executor", "nonsense")
            ),
        }
    )
)
@settings(max_examples=400, deadline=None)
def test_any_flags_give_a_consistent_plan_or_a_user_error(values: dict[str, object]) -> None:
    try:
        plan = plan_topology(ParallelConfig(**values))  # type: ignore[arg-type]
    except VcliError:
        return
    check_plan(plan)
    plan_to_json(plan)


@given(st.integers(1, 200), st.integers(1, 64))
def test_stages_cover_all_layers_evenly(num_layers: int, num_stages: int) -> None:
    if num_stages > num_layers:
        return
    ranges = layer_ranges(num_layers, num_stages)

    assert [layer for layers in ranges for layer in layers] == list(range(num_layers))
    sizes = {len(layers) for layers in ranges}
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(1, 256), st.integers(1, 64), st.sampled_from(("linear", "round_robin")))
def test_each_expert_has_one_owner(num_experts: int, ep_size: int, placement: str) -> None:
    if ep_size > num_experts:
        return
    placed = place_experts(num_experts, ep_size, placement)  # type: ignore[arg-type]
    held = sorted(expert for experts in placed.experts_of_rank for expert in experts)

    assert held == list(range(num_experts))
    sizes = [len(experts) for experts in placed.experts_of_rank]
    assert sorted(sizes, reverse=True) == sizes
    assert sizes[0] - sizes[-1] <= 1
    assert sizes == [num_local_experts(num_experts, ep_size, rank) for rank in range(ep_size)]
    assert num_experts - 1 in placed.experts_of_rank[placed.owner(num_experts - 1)]
