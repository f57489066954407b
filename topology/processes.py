"""Which processes run on each node, and which of them starts which.

supervisor (only with several API servers) > API server, engine core > worker
API server (alone)                         > engine core > worker, coordinator
headless (replicas without an API server)  > engine core > worker
follower (the rest of a replica's ranks)   > worker
"""

from enum import StrEnum
from typing import Final

from vcli.topology.names import API_SERVER, engine_core_title, titled
from vcli.topology.plan import HelperPlan, ProcessRow, ProcessTotals, RankPlan
from vcli.topology.sizes import EXTERNAL_LAUNCHER, ParallelSizes

MIB: Final = 1024 * 1024
BROADCAST_RING_BYTES: Final = 32 * MIB
REPLY_RING_BYTES: Final = 1 * MIB


class NodeRole(StrEnum):
    """What a node does in the deployment."""

    HEAD = "head"
    FOLLOWER = "executor follower (headless, no engine core)"
    HEADLESS = "headless engine-core node"
    SERVING = "serving engine-core node"
    EXTERNAL = "ranks started by an external launcher"


def node_role(config: ParallelSizes, node_rank: int) -> NodeRole:
    """The role of one node."""
    if config.distributed_executor_backend == EXTERNAL_LAUNCHER:
        return NodeRole.EXTERNAL
    if node_rank == 0:
        return NodeRole.HEAD
    if node_rank % config.nnodes_within_dp:
        return NodeRole.FOLLOWER
    if config.is_hybrid_lb or config.is_external_lb:
        return NodeRole.SERVING
    return NodeRole.HEADLESS


def node_processes(
    config: ParallelSizes, backend: str, node_rank: int, ranks: tuple[RankPlan, ...]
) -> tuple[ProcessRow, ...]:
    """The processes of one node, parents before children; `ranks` are those on the node."""
    role = node_role(config, node_rank)
    replicas = sorted({rank.dp_rank for rank in ranks})
    if role is NodeRole.EXTERNAL:
        return tuple(_worker(rank, parent="") for rank in ranks)
    if role is NodeRole.FOLLOWER:
        title = titled("Follower")
        rows = [ProcessRow(title=title, kind="follower", parent="")]
        return (*rows, *(_worker(rank, parent=title) for rank in ranks))
    rows, parents = _front_processes(config, role, node_rank, replicas)
    if node_rank == 0 and has_coordinator(config):
        title = titled("DPCoordinator")
        rows.append(ProcessRow(title=title, kind="coordinator", parent=parents[replicas[0]]))
    for dp_rank in replicas:
        title = engine_core_title(dp_rank, config.dp)
        rows.append(
            ProcessRow(title=title, kind="engine_core", parent=parents[dp_rank], dp_rank=dp_rank)
        )
        rows.extend(
            _worker(rank, parent=title)
            for rank in ranks
            if rank.dp_rank == dp_rank and has_worker_process(backend, rank.rank)
        )
    return tuple(rows)


def count_processes(rows: tuple[ProcessRow, ...]) -> ProcessTotals:
    """Number of processes by kind."""
    kinds = [row.kind for row in rows]
    return ProcessTotals(
        supervisor_or_launcher=sum(
            kind in ("supervisor", "follower", "headless") for kind in kinds
        ),
        api_servers=kinds.count("api_server"),
        engine_cores=kinds.count("engine_core"),
        workers=kinds.count("worker"),
        coordinator=kinds.count("coordinator"),
    )


def has_coordinator(config: ParallelSizes) -> bool:
    """Whether the first node runs a coordinator of the replicas."""
    return config.dp > 1 and (config.is_moe or not config.is_external_lb)


def has_worker_process(backend: str, rank: int) -> bool:
    """Whether a rank is a process of its own rather than a part of its engine core."""
    return backend != "uni" and not (backend == "colocated" and rank == 0)


def node_ring_bytes(backend: str, ranks: tuple[RankPlan, ...]) -> int:
    """Rings on one node: per replica one to all its ranks, and one back from each rank."""
    if backend == EXTERNAL_LAUNCHER:
        return 0
    readers = [rank for rank in ranks if has_worker_process(backend, rank.rank)]
    replicas = {rank.dp_rank for rank in readers}
    return len(replicas) * BROADCAST_RING_BYTES + len(readers) * REPLY_RING_BYTES


def helper_processes(start_method: str, num_nodes: int) -> tuple[HelperPlan, ...]:
    """What runs beside the deployment's own processes on each node: the fork server, if any.

    Children are started by our own launcher, so there is no resource tracker.
    """
    if start_method != "forkserver":
        return ()
    return tuple(
        HelperPlan(
            title=titled("ForkServer"),
            node_rank=node_rank,
            reason="workers are copies of it",
        )
        for node_rank in range(num_nodes)
    )


def _front_processes(
    config: ParallelSizes, role: NodeRole, node_rank: int, replicas: list[int]
) -> tuple[list[ProcessRow], dict[int, str]]:
    """What serves HTTP on a node, and the parent of each replica's engine core."""
    is_headless = config.headless and node_rank == config.own_node_rank
    if is_headless or role is NodeRole.HEADLESS:
        title = titled("Headless")
        row = ProcessRow(title=title, kind="headless", parent="")
        return [row], dict.fromkeys(replicas, title)
    if config.is_external_lb:
        rows: list[ProcessRow] = []
        parents: dict[int, str] = {}
        for dp_rank in replicas:
            instance, parents[dp_rank] = _api_servers(
                config.api_server_count or 1, ("DP", dp_rank, config.dp)
            )
            rows.extend(instance)
        return rows, parents
    count = config.api_server_count or (len(replicas) if config.is_hybrid_lb else config.dp)
    rows, parent = _api_servers(count)
    return rows, dict.fromkeys(replicas, parent)


def _api_servers(count: int, *parts: tuple[str, int, int]) -> tuple[list[ProcessRow], str]:
    """One API server, or a supervisor with several beneath it; and the title on top."""
    base = titled(API_SERVER, *parts)
    if count == 1:
        return [ProcessRow(title=base, kind="api_server", parent="")], base
    top = titled("Supervisor", *parts)
    rows = [ProcessRow(title=top, kind="supervisor", parent="")]
    rows.extend(
        ProcessRow(title=f"{base}_{index}", kind="api_server", parent=top) for index in range(count)
    )
    return rows, top


def _worker(rank: RankPlan, *, parent: str) -> ProcessRow:
    return ProcessRow(
        title=rank.title, kind="worker", parent=parent, dp_rank=rank.dp_rank, rank=rank.rank
    )
