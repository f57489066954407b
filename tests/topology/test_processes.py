"""Titles, process trees, rings, helpers and ports of a plan."""

import pytest

from vcli.topology import GroupKind, ParallelConfig, plan_topology
from vcli.topology.channels import descriptors_needed

MIB = 1024 * 1024


@pytest.mark.parametrize(
    ("values", "rank", "title"),
    [
        ({}, 0, "vcli::Worker"),
        ({"tensor_parallel_size": 2}, 1, "vcli::Worker_TP1"),
        (
            {"tensor_parallel_size": 4, "pipeline_parallel_size": 2},
            7,
            "vcli::Worker_PP1_TP3",
        ),
        (
            {
                "tensor_parallel_size": 2,
                "prefill_context_parallel_size": 2,
                "decode_context_parallel_size": 2,
                "is_moe": True,
                "enable_expert_parallel": True,
            },
            3,
            "vcli::Worker_PCP1_TP1_DCP1_EP3",
        ),
        ({"tensor_parallel_size": 2, "is_moe": True}, 1, "vcli::Worker_TP1"),
    ],
)
def test_worker_titles_name_only_axes_that_are_cut(
    values: dict[str, int], rank: int, title: str
) -> None:
    assert plan_topology(ParallelConfig(**values)).rank_plan(rank).title == title  # type: ignore[arg-type]


def test_replicas_show_in_titles_even_where_their_worlds_are_separate() -> None:
    plan = plan_topology(
        ParallelConfig(tensor_parallel_size=4, pipeline_parallel_size=2, data_parallel_size=2)
    )

    assert plan.rank_plan(7, dp_rank=1).title == "vcli::Worker_DP1_PP1_TP3"
    assert plan.rank_plan(7, dp_rank=1).global_rank == 7
    cores = [row.title for row in plan.node(0).processes if row.kind == "engine_core"]
    assert cores == ["vcli::EngineCore_DP0", "vcli::EngineCore_DP1"]


def test_replicas_of_one_world_have_global_ranks() -> None:
    plan = plan_topology(ParallelConfig(tensor_parallel_size=2, data_parallel_size=2, is_moe=True))
    rank = plan.rank_plan(1, dp_rank=1)

    assert (rank.rank, rank.global_rank, rank.device_index) == (1, 3, 3)
    membership = rank.group(GroupKind.DP)
    assert membership is not None
    assert (membership.ranks, membership.rank_in_group, membership.size) == ((1, 3), 1, 2)
    assert rank.group("EPLB") is None


def test_processes_form_a_tree_from_the_api_server_down() -> None:
    plan = plan_topology(ParallelConfig(tensor_parallel_size=2))

    assert [(row.title, row.parent) for row in plan.node(0).processes] == [
        ("vcli::ApiServer", ""),
        ("vcli::EngineCore", "vcli::ApiServer"),
        ("vcli::Worker_TP0", "vcli::EngineCore"),
        ("vcli::Worker_TP1", "vcli::EngineCore"),
    ]


def test_several_api_servers_have_a_supervisor() -> None:
    plan = plan_topology(ParallelConfig(api_server_count=2))

    assert [(row.title, row.parent) for row in plan.node(0).processes] == [
        ("vcli::Supervisor", ""),
        ("vcli::ApiServer_0", "vcli::Supervisor"),
        ("vcli::ApiServer_1", "vcli::Supervisor"),
        ("vcli::EngineCore", "vcli::Supervisor"),
    ]


def test_colocated_driver_is_rank_zero() -> None:
    plan = plan_topology(
        ParallelConfig(tensor_parallel_size=4, distributed_executor_backend="colocated")
    )

    assert plan.totals is not None
    assert plan.totals.workers == 3
    assert plan.ring_bytes == (32 + 3) * MIB


def test_hybrid_balancing_has_api_servers_on_each_node() -> None:
    plan = plan_topology(
        ParallelConfig(data_parallel_size=4, nnodes=2, data_parallel_hybrid_lb=True, is_moe=True)
    )

    assert [node.counts.api_servers for node in plan.nodes] == [2, 2]
    assert [node.counts.coordinator for node in plan.nodes] == [1, 0]


def test_external_balancing_has_an_instance_for_each_replica() -> None:
    plan = plan_topology(
        ParallelConfig(data_parallel_size=2, nnodes=2, data_parallel_external_lb=True)
    )

    assert [node.counts.api_servers for node in plan.nodes] == [1, 1]
    assert plan.totals is not None
    assert plan.totals.coordinator == 0


def test_ranks_of_an_external_launcher_have_no_parents() -> None:
    plan = plan_topology(
        ParallelConfig(tensor_parallel_size=2, distributed_executor_backend="external_launcher")
    )

    assert [(row.kind, row.parent) for row in plan.node(0).processes] == [("worker", "")] * 2
    assert plan.ring_bytes == 0


def test_rings_are_counted_per_node_and_replica() -> None:
    one = plan_topology(ParallelConfig(tensor_parallel_size=8))
    two = plan_topology(ParallelConfig(tensor_parallel_size=8, pipeline_parallel_size=2, nnodes=2))
    replicas = plan_topology(ParallelConfig(tensor_parallel_size=2, data_parallel_size=4))

    assert one.ring_bytes == 40 * MIB
    assert [node.ring_bytes for node in two.nodes] == [40 * MIB, 40 * MIB]
    assert replicas.ring_bytes == 4 * 34 * MIB
    assert plan_topology(ParallelConfig()).ring_bytes == 0


def test_helpers_follow_the_start_method() -> None:
    def titles(method: str) -> list[str]:
        config = ParallelConfig(tensor_parallel_size=2, nnodes=2, start_method=method)
        return [helper.title for helper in plan_topology(config).helpers]

    assert titles("spawn") == []
    assert titles("forkserver") == ["vcli::ForkServer"] * 2
    assert titles("fork") == []


def test_ports_are_listed_for_the_firewall() -> None:
    several = plan_topology(
        ParallelConfig(tensor_parallel_size=2, nnodes=2, master_addr="10.0.0.1", master_port=7000)
    )

    assert plan_topology(ParallelConfig(tensor_parallel_size=2)).ports == ()
    assert [(port.name, port.host, port.port) for port in several.ports] == [
        ("control", "10.0.0.1", 7001),
        ("rendezvous", "10.0.0.1", 7000),
    ]


@pytest.mark.parametrize(("num_workers", "measured"), [(3, 53), (5, 77)])
def test_descriptors_of_a_core_cover_what_was_measured(num_workers: int, measured: int) -> None:
    plan = plan_topology(ParallelConfig(pipeline_parallel_size=num_workers))
    rows = tuple(row for row in plan.node(0).processes if row.kind != "api_server")

    assert measured <= descriptors_needed(rows, plan.ranks, "cpu") <= 1.2 * measured
    assert plan.node(0).descriptors > 256


def test_channels_of_a_node_are_counted() -> None:
    plan = plan_topology(ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2))
    counts = {channel.name: channel.count for channel in plan.node(0).channels}

    # one core and four workers are children; each rank has one TP and one PP partner
    assert counts == {
        **{"http": 1, "control": 5, "lifeline": 5, "client": 1, "ring": 1 + 4, "mesh": 4 * 2}
    }
