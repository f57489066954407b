"""Which node and device each rank runs on."""

from collections import Counter
from typing import NamedTuple

from vcli.topology.errors import PlacementError
from vcli.topology.facts import HostFacts
from vcli.topology.sizes import ParallelSizes


class RankPlacement(NamedTuple):
    """Where one rank runs.

    `rank` counts within its replica, `global_rank` within its torch world. `local_rank` counts the
    ranks of the replica on the node, `device_index` all ranks on the node.
    """

    external_dp_rank: int
    dp_rank: int
    rank: int
    global_rank: int
    node_rank: int
    local_rank: int
    device_index: int


def place_ranks(config: ParallelSizes) -> tuple[RankPlacement, ...]:
    """All ranks, ordered by external copy, replica and rank.

    The ranks of a replica fill its nodes one after the other, replicas fill the devices of a node
    one after the other. Copies for an external trainer are placed as if on one node: where they
    run is the trainer's affair.
    """
    world_size, local_world_size = config.world_size, config.local_world_size
    replicas_on_node, nnodes_within_dp = config.node_data_parallel_size, config.nnodes_within_dp
    is_one_world, world_across_dp = config.is_one_world, config.world_size_across_dp
    copy_size = world_across_dp if is_one_world else world_size
    placements = []
    for external_dp_rank in range(config.external_data_parallel_size):
        for dp_rank in range(config.dp):
            node_group, dp_local_rank = divmod(dp_rank, replicas_on_node)
            first_node = node_group * nnodes_within_dp
            first_device = external_dp_rank * world_across_dp + dp_local_rank * local_world_size
            first_global = external_dp_rank * copy_size + (
                dp_rank * world_size if is_one_world else 0
            )
            for rank in range(world_size):
                node_in_group, local_rank = divmod(rank, local_world_size)
                placements.append(
                    RankPlacement(
                        external_dp_rank=external_dp_rank,
                        dp_rank=dp_rank,
                        rank=rank,
                        global_rank=first_global + rank,
                        node_rank=first_node + node_in_group,
                        local_rank=local_rank,
                        device_index=first_device + local_rank,
                    )
                )
    return tuple(placements)


def max_ranks_on_a_node(placements: tuple[RankPlacement, ...]) -> int:
    """Ranks on the fullest node."""
    return max(Counter(placement.node_rank for placement in placements).values())


def check_devices(num_local_ranks: int, host: HostFacts) -> None:
    """Whether the host has a GPU for each of its ranks; nothing is asked of an assumed host.

    Raises:
        PlacementError: it has not.
    """
    num_gpus = len(host.gpus)
    if num_local_ranks <= num_gpus or host.is_assumed:
        return
    nodes = -(-num_local_ranks // num_gpus) if num_gpus else 0
    more = f"spread the ranks over more nodes (--nnodes {nodes}), " if nodes > 1 else ""
    raise PlacementError(
        f"{num_local_ranks} ranks on one node need as many GPUs, {host.hostname} has {num_gpus}",
        hint=f"{more}lower --tensor-parallel-size or --pipeline-parallel-size, or --device cpu",
    )
