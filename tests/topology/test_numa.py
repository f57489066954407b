"""Which NUMA node each rank is kept on."""

import pytest

from vcli.topology import GpuFacts, HostFacts, ParallelConfig, plan_topology

TWO_NODES = HostFacts(cpu_count=8, numa_cpus=((0, 1, 2, 3), (4, 5, 6, 7)))


def bound_nodes(
    host: HostFacts | None, *, tp: int = 4, device_type: str = "cpu"
) -> list[int | None]:
    config = ParallelConfig(tensor_parallel_size=tp, numa_bind=True)
    plan = plan_topology(config, host=host, device_type=device_type)
    assert plan.numa_binding is not None
    assert plan.numa_binding in plan.decisions
    nodes = [rank.bound_numa_node for rank in plan.ranks]
    assert [rank.bound_numa_node for rank in plan.nodes[0].ranks] == nodes
    for node in {*nodes} - {None}:
        assert f"node {node} has {nodes.count(node)} rank(s)" in plan.numa_binding.describe()
    return nodes


def test_nothing_is_bound_unless_asked_for() -> None:
    plan = plan_topology(ParallelConfig(tensor_parallel_size=2), host=TWO_NODES)

    assert plan.numa_binding is None
    assert [rank.bound_numa_node for rank in plan.ranks] == [None, None]


@pytest.mark.parametrize(
    ("tp", "nodes"), [(4, [0, 0, 1, 1]), (2, [0, 1]), (1, [0]), (3, [0, 0, 1])]
)
def test_cpu_ranks_are_spread_and_neighbours_stay_together(tp: int, nodes: list[int]) -> None:
    assert bound_nodes(TWO_NODES, tp=tp) == nodes


def test_a_rank_is_bound_to_the_node_of_its_gpu() -> None:
    gpus = tuple(GpuFacts(index=index, numa_node=node) for index, node in enumerate((1, 0, None)))
    host = HostFacts(cpu_count=8, numa_cpus=TWO_NODES.numa_cpus, gpus=gpus)

    assert bound_nodes(host, tp=3, device_type="cuda") == [1, 0, None]


@pytest.mark.parametrize("host", [None, HostFacts(numa_cpus=((0, 1),))])
def test_one_node_needs_no_binding(host: HostFacts | None) -> None:
    assert bound_nodes(host) == [None] * 4
