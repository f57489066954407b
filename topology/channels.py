"""What joins the processes of a node - sockets, pipes, rings - and the descriptors that takes.

Counted for the busiest process of the node:

    engine core   per worker 12: control socket, lifeline, pidfds, a bell of the broadcast ring;
                  memory, bells, cancel event and peer of its reply ring
    worker        control, lifeline, both rings (8), and for each group of more than one rank a
                  listener, a poller and a connection to each other member; on a GPU the driver's
    API server    a connection for each request that is being served

Measured on a CPU: 53 in a core with 3 workers, 77 with 5; 31 in a worker of TP 3, 35 of PP 5.
"""

from collections.abc import Sequence
from typing import Final

from vcli.topology.plan import ChannelPlan, ProcessRow, RankPlan

#: Standard streams, event loop, log, libraries.
BASE_DESCRIPTORS: Final = 24
CORE_DESCRIPTORS_PER_WORKER: Final = 12
WORKER_DESCRIPTORS: Final = 12
#: For the CUDA driver and NCCL in a process with one GPU; an estimate.
CUDA_DESCRIPTORS: Final = 96
#: Requests that an API server serves at once by default.
HTTP_CONNECTIONS: Final = 256


def node_channels(
    processes: Sequence[ProcessRow], ranks: Sequence[RankPlan], ring_bytes: int
) -> tuple[ChannelPlan, ...]:
    """The channels of one node, those with nothing in them left out."""
    kinds = [row.kind for row in processes]
    children = sum(row.parent != "" for row in processes)
    workers, cores = kinds.count("worker"), kinds.count("engine_core")
    mesh = sum(group.size - 1 for rank in ranks for group in rank.groups if group.size > 1)
    rows = (
        ("http", kinds.count("api_server"), "ApiServer listens at --host:--port (127.0.0.1:8000)"),
        ("control", children, "socket pair of a parent and its child: states, failures"),
        ("lifeline", children, "pipe that ends a child when its parent is gone"),
        ("client", cores, "socket pair of an API server and an engine core: requests, tokens"),
        (
            "ring",
            (len({row.dp_rank for row in processes if row.kind == "worker"}) + workers)
            if ring_bytes
            else 0,
            "memory file: one to all workers of a replica, one back from each",
        ),
        ("mesh", mesh, "connections of torch's groups, one end here; random ports"),
    )
    return tuple(
        ChannelPlan(name=name, count=count, purpose=purpose)
        for name, count, purpose in rows
        if count
    )


def descriptors_needed(
    processes: Sequence[ProcessRow], ranks: Sequence[RankPlan], device_type: str
) -> int:
    """Open files of the busiest process on a node, for `ulimit -n`."""
    workers: dict[int | None, int] = {}
    for row in processes:
        if row.kind == "worker":
            workers[row.dp_rank] = workers.get(row.dp_rank, 0) + 1
    core = CORE_DESCRIPTORS_PER_WORKER * max(workers.values(), default=0)
    meshes = [sum(group.size + 1 for group in rank.groups if group.size > 1) for rank in ranks]
    worker = WORKER_DESCRIPTORS + max(meshes, default=0)
    if device_type == "cuda":
        worker += CUDA_DESCRIPTORS
    server = HTTP_CONNECTIONS if any(row.kind == "api_server" for row in processes) else 0
    return BASE_DESCRIPTORS + max(core, worker, server)
