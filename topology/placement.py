"""Which node and device each rank runs on."""

from collections import Counter
from functools import lru_cache
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


class _Blocks(NamedTuple):
    """All that placement takes from a deployment; layouts of as many ranks have it in common."""

    external_size: int
    dp: int
    world_size: int
    local_world_size: int
    replicas_on_node: int
    nnodes_within_dp: int
    is_one_world: bool


def place_ranks(config: ParallelSizes) -> tuple[RankPlacement, ...]:
    """All ranks, ordered by external copy, replica and rank.

    The ranks of a replica fill its nodes one after the other, replicas fill the devices of a node
    one after the other. Copies for an external trainer are placed as if on one node: where they
    run is the trainer's affair.
    """
    return _place(_blocks(config))


def world_places(config: ParallelSizes) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Node and device of each rank of a torch world, by global rank; of several, the last."""
    return _world_places(_blocks(config))


def _blocks(config: ParallelSizes) -> _Blocks:
    return _Blocks(
        external_size=config.external_data_parallel_size,
        dp=config.dp,
        world_size=config.world_size,
        local_world_size=config.local_world_size,
        replicas_on_node=config.node_data_parallel_size,
        nnodes_within_dp=config.nnodes_within_dp,
        is_one_world=config.is_one_world,
    )


@lru_cache(maxsize=16)
def _place(blocks: _Blocks) -> tuple[RankPlacement, ...]:
    world_size, local_world_size = blocks.world_size, blocks.local_world_size
    world_across_dp = world_size * blocks.dp
    copy_size = world_across_dp if blocks.is_one_world else world_size
    placements = []
    for external_dp_rank in range(blocks.external_size):
        for dp_rank in range(blocks.dp):
            node_group, dp_local_rank = divmod(dp_rank, blocks.replicas_on_node)
            first_node = node_group * blocks.nnodes_within_dp
            first_device = external_dp_rank * world_across_dp + dp_local_rank * local_world_size
            first_global = external_dp_rank * copy_size + (
                dp_rank * world_size if blocks.is_one_world else 0
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


@lru_cache(maxsize=16)
def _world_places(blocks: _Blocks) -> tuple[tuple[int, ...], tuple[int, ...]]:
    placed = {place.global_rank: place for place in _place(blocks)}
    ordered = [placed[rank] for rank in range(len(placed))]
    return (
        tuple(place.node_rank for place in ordered),
        tuple(place.device_index for place in ordered),
    )


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
