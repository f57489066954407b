"""One rank of a real gloo world: `gloo_rank.py SCENARIO RANK WORLD_SIZE JSON`, JSON on stdout."""

import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from vcli.runtime.distributed.collectives import (
    all_gather,
    all_reduce,
    barrier,
    broadcast_object,
    recv_tensors,
    send_tensors,
)
from vcli.runtime.distributed.parallel_state import build_parallel_context
from vcli.runtime.distributed.rendezvous import RendezvousTarget, join_world
from vcli.runtime.distributed.verify import verify_groups
from vcli.runtime.worker.progress import ProgressBoard
from vcli.topology.config import ParallelConfig
from vcli.topology.errors import VcliError
from vcli.topology.planner import plan_topology

TIMEOUT_S = 20.0
#: Kept while their lines are written.
BOARDS = []


def context_of(rank, sizes):
    sizes = {name: size for name, size in sizes.items() if name != "is_ring"}
    plan = plan_topology(ParallelConfig(**sizes))
    # As workers do: every operation must be one that the board knows.
    board = ProgressBoard.create(rank + 1)
    BOARDS.append(board)
    return build_parallel_context(plan, rank, timeout_s=TIMEOUT_S, trace=board.line(rank))


def collectives(rank, sizes):
    """TP 2 x PP 2: what each operation gives this rank."""
    context = context_of(rank, sizes)
    summed = all_reduce(torch.tensor([1.0, 10.0]) * (rank + 1), context.tp)
    gathered = all_gather(torch.full((2, 1), rank), context.tp, dim=-1)
    barrier(context.tp)
    received = {}
    if not context.pp.is_last:
        send_tensors({"residual": torch.tensor([rank]), "hidden": torch.ones(2)}, context.pp)
    else:
        buffers = {"hidden": torch.zeros(2), "residual": torch.zeros(1, dtype=torch.long)}
        received = {
            name: tensor.tolist() for name, tensor in recv_tensors(buffers, context.pp).items()
        }
    return {"sum": summed.tolist(), "gathered": gathered.tolist(), "received": received}


def groups(rank, sizes):
    """The groups of this rank and what a checked all-reduce in each gave."""
    context = context_of(rank, sizes)
    reports = verify_groups(context, "cpu")
    return {
        "groups": {group.kind: group.ranks for group in context.groups},
        "reports": [
            [report.kind, report.ranks, report.verified, report.transport, report.note]
            for report in reports
        ],
        "positive_times": all(report.all_reduce_us > 0 for report in reports),
    }


def objects(rank, sizes):
    """What `broadcast_object` gives from each source of the TP group, and whether by a ring."""
    context = context_of(rank, sizes)
    group = context.tp if sizes["is_ring"] else replace(context.tp, objects=None)
    received = []
    for source in (0, 2, 0):
        mine = {"from": source, "tensor": torch.arange(50_000, dtype=torch.bfloat16)}
        given = broadcast_object(mine if rank == source else None, group, src_rank_in_group=source)
        assert torch.equal(given["tensor"], mine["tensor"])
        received.append(given["from"])
    num_rings = Path("/proc/self/maps").read_text().count("memfd:vcli-objects")
    return {"received": received, "num_rings": num_rings, "rank": rank}


def peer_dies(rank, sizes):
    """Rank 1 kills itself instead of summing; what the others' all-reduce says."""
    context = context_of(rank, sizes)
    barrier(context.tp)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        all_reduce(torch.ones(4), context.tp)
    except RuntimeError as error:
        return {"error": str(error)}
    return {"error": ""}


def main():
    scenario, rank, world_size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    options = json.loads(sys.argv[4])
    torch.set_num_threads(1)
    if options.get("is_gated"):
        # So that ranks whose imports took different times begin together.
        print("imported", flush=True)
        sys.stdin.readline()
    try:
        join_world(
            "gloo",
            rank,
            world_size,
            RendezvousTarget(**options["target"]),
            timeout_s=options.get("timeout_s", TIMEOUT_S),
        )
    except VcliError as error:
        print(json.dumps({"join_error": error.message, "exit": int(error.exit_status)}))
        return
    result = globals()[scenario](rank, options["sizes"])
    print(json.dumps(result), flush=True)
    if scenario == "peer_dies":
        os._exit(0)
    dist.destroy_process_group()


main()
