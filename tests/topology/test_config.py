"""Every rule of a valid deployment, with the hint that mends it."""

from typing import Any

import pytest

from vcli.topology import ConfigError, ExitStatus, ParallelConfig

BROKEN: list[tuple[dict[str, Any], str, str]] = [
    ({"tensor_parallel_size": 0}, "tensor_parallel_size=0 must be at least 1", "-size 1"),
    ({"pipeline_parallel_size": -1}, "must be at least 1", "--pipeline-parallel-size 1"),
    ({"external_data_parallel_size": 0}, "must be at least 1", ""),
    ({"nnodes": 0}, "nnodes=0 must be at least 1", "--nnodes 1"),
    ({"master_port": 0}, "master_port=0", "29501"),
    ({"master_port": 65535}, "master_port=65535", "29501"),
    ({"tensor_parallel_size": 8, "decode_context_parallel_size": 3}, "must divide", ": 1, 2, 4, 8"),
    ({"tensor_parallel_size": 8, "nnodes": 3}, "must divide the 8 ranks", "--nnodes: 1, 2, 4, 8"),
    ({"node_rank": -1}, "node_rank=-1 must lie in 0..0", "--node-rank 0"),
    ({"data_parallel_backend": "x"}, "'x' is unknown", "mp, ray"),
    ({"data_parallel_size": 2, "data_parallel_size_local": 3}, "must lie in 1..2", "1, 2"),
    ({"data_parallel_size": 2, "data_parallel_size_local": 0}, "must lie in 1..2", "1, 2"),
    ({"data_parallel_size": 2, "data_parallel_rank": 2}, "must lie in 0..1", "raise"),
    (
        {"data_parallel_size": 2, "data_parallel_rank": 0, "data_parallel_hybrid_lb": True},
        "exclude each other",
        "--data-parallel-hybrid-lb",
    ),
    (
        {"data_parallel_size": 2, "data_parallel_hybrid_lb": True},
        "needs the number of replicas",
        "--data-parallel-size-local",
    ),
    (
        {
            "data_parallel_size": 4,
            "data_parallel_size_local": 2,
            "data_parallel_hybrid_lb": True,
            "headless": True,
        },
        "headless nodes have no API server",
        "--headless",
    ),
    (
        {"data_parallel_size": 4, "data_parallel_size_local": 2, "data_parallel_rank": 1},
        "must be 1 with external",
        "--data-parallel-size-local 1",
    ),
    (
        {"data_parallel_size": 2, "data_parallel_external_lb": True},
        "leaves open which replica",
        "--data-parallel-rank 0..1",
    ),
    ({"data_parallel_size": 3, "tensor_parallel_size": 2, "nnodes": 2}, "evenly", "1, 3"),
    ({"data_parallel_size": 5, "tensor_parallel_size": 2, "nnodes": 2}, "evenly", "1, 5"),
    ({"num_redundant_experts": -1}, "must not be negative", "0"),
    ({"api_server_count": -1}, "must not be negative", "1"),
    ({"api_server_count": 2, "headless": True}, "contradicts headless", "--headless"),
    ({"api_server_count": 0}, "no API server on the first node", "--headless"),
    ({"pipeline_parallel_size": 2, "pp_layer_partition": (1, 2, 3)}, "must be 2 numbers", "evenly"),
    ({"pipeline_parallel_size": 2, "pp_layer_partition": (0, 2)}, "above 0", "evenly"),
]


@pytest.mark.parametrize(("values", "message", "hint"), BROKEN, ids=str)
def test_broken_rule_is_told_with_values_and_remedy(
    values: dict[str, Any], message: str, hint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        ParallelConfig(**values)

    assert message in caught.value.message
    assert hint in caught.value.hint
    assert caught.value.hint
    assert caught.value.exit_status is ExitStatus.USAGE


def test_hybrid_balancing_of_one_replica_is_external() -> None:
    config = ParallelConfig(
        data_parallel_size=4, data_parallel_size_local=1, data_parallel_hybrid_lb=True, nnodes=4
    )

    assert config.is_external_lb
    assert not config.is_hybrid_lb


def test_instances_started_by_hand_count_as_hosts() -> None:
    config = ParallelConfig(data_parallel_size=5, data_parallel_size_local=2)

    assert config.num_hosts == 3


def test_own_host_follows_from_the_data_parallel_rank_without_nodes() -> None:
    alone = ParallelConfig(data_parallel_size=4, data_parallel_rank=3)
    node = ParallelConfig(data_parallel_size=4, nnodes=2, node_rank=1, data_parallel_rank=3)

    assert (alone.own_node_rank, node.own_node_rank) == (3, 1)


def test_dense_replicas_are_independent_worlds() -> None:
    dense = ParallelConfig(tensor_parallel_size=2, data_parallel_size=4)
    moe = ParallelConfig(tensor_parallel_size=2, data_parallel_size=4, is_moe=True)

    assert (dense.torch_world, dense.worlds) == (2, 4)
    assert (moe.torch_world, moe.worlds) == (8, 1)


def test_external_launcher_has_one_world_even_for_dense_models() -> None:
    config = ParallelConfig(
        tensor_parallel_size=2,
        data_parallel_size=4,
        distributed_executor_backend="external_launcher",
    )

    assert (config.torch_world, config.worlds) == (8, 1)
