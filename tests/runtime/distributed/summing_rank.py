"""One rank that tries ways to sum: `summing_rank.py SCENARIO RANK WORLD_SIZE JSON`."""

import json
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.support.shared_memory_ranks import FileMemory
from vcli.runtime.distributed.group import GroupHandle
from vcli.runtime.distributed.rendezvous import RendezvousTarget, join_world
from vcli.runtime.distributed.selection import Way, try_ways
from vcli.runtime.distributed.symmetric import (
    INPUT_BYTES,
    AllReduceLimits,
    SymmetricCommunicator,
    regions_bytes,
)
from vcli.runtime.distributed.trials import SumTrial, run_trial, together
from vcli.runtime.distributed.verify import verify_pairs
from vcli.topology.errors import VcliError

EPS = 1e-5
CPU = torch.device("cpu")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def communicator_of(group, options):
    memory = FileMemory(options["memory"], group.rank_in_group, group.size)
    communicator = SymmetricCommunicator(group, memory, CPU)
    communicator.limits = AllReduceLimits(fused_norm=1 << 20)
    return communicator


def numbers(seed, shape, dtype):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def fused(group, options):
    """Calls one after the other, of different sizes: residuals exact, norms close."""
    communicator, dtype = communicator_of(group, options), DTYPES[options["dtype"]]
    errors = []
    for call, (num_rows, row_size) in enumerate(options["shapes"]):
        shape = (num_rows, row_size)
        parts = [numbers(100 * call + rank, shape, dtype) for rank in range(group.size)]
        residual = numbers(100 * call + 50, shape, dtype)
        weight = numbers(100 * call + 51, (row_size,), dtype)
        summed = torch.stack([part.float() for part in parts]).sum(0).to(dtype)
        added = residual + summed
        wanted = weight * F.rms_norm(added.float(), (row_size,), eps=EPS).to(dtype)
        given = communicator.add_rms_norm(parts[group.rank_in_group], residual, weight, EPS)
        normed, given_residual = given
        if given_residual is not residual or not torch.equal(residual, added):
            errors.append(f"call {call}: residual")
        if not torch.allclose(normed.float(), wanted.float(), rtol=1e-2, atol=1e-3):
            errors.append(f"call {call}: norm")
    return {"errors": errors, "lost": communicator.lost_peer()}


def peer_a_call_ahead(group, options):
    """Rank 1 reads what came only when the data of rank 0's next call have come too."""
    if group.rank_in_group == 1:
        from triton.runtime.interpreter import InterpreterBuilder

        memory = FileMemory(options["memory"], 1, group.size)
        flags = memory.own[INPUT_BYTES + regions_bytes(group.size) :].view(torch.int32)
        barriers = []

        def late_barrier(_builder):
            barriers.append(None)
            call, is_before_reading = (len(barriers) + 1) // 2, len(barriers) % 2 == 0
            if is_before_reading and call < len(options["shapes"]):
                deadline = time.monotonic() + 60
                while int(flags.max()) <= call:
                    assert time.monotonic() < deadline, "rank 0 never came a call ahead"
                    time.sleep(0.001)

        InterpreterBuilder.create_barrier = late_barrier
    return fused(group, options)


def peer_stays_away(group, options):
    """Only rank 0 calls; its patience is short."""
    communicator = communicator_of(group, options)
    communicator.max_polls = 50
    if group.rank_in_group == 1:
        return {}
    x = torch.ones(2, 16)
    normed, residual = communicator.add_rms_norm(x, x.clone(), torch.ones(16), EPS)
    return {
        "lost": communicator.lost_peer(),
        "numbers": int(normed.isfinite().sum() + residual.isfinite().sum()),
    }


def choice(group, _options):
    """Ways of which three fail on rank 1 alone, and one for which a rank has no time left."""

    def right(tensor):
        dist.all_reduce(tensor)
        return tensor

    def wrong_on_one_rank(tensor):
        summed = right(tensor)
        summed[5] += group.rank_in_group == 1
        return summed

    def raises_on_one_rank(tensor):
        if group.rank_in_group == 1:
            raise RuntimeError("no such kernel")
        return tensor * group.size

    class Unprepared(SumTrial):
        def prepare(self):
            super().prepare()
            if group.rank_in_group == 1:
                raise RuntimeError("no such kernel")

    def way(reduce, trial=SumTrial):
        return Way(
            name=reduce.__name__,
            sizes=(64, 256),
            make_trial=lambda size: trial(
                reduce.__name__, reduce, group, num_bytes=size, dtype=torch.float32, device=CPU
            ),
        )

    def not_made(tensor):
        raise AssertionError("launched, though one rank could not make it")

    ways = [
        way(wrong_on_one_rank),
        way(raises_on_one_rank),
        way(right),
        way(not_made, trial=Unprepared),
    ]
    times, reasons = try_ways(ways, group, CPU, time.monotonic() + 60)
    # The clock of one rank is over: no rank may go on.
    late = run_trial(
        ways[2].make_trial(64), group, CPU, deadline=time.monotonic() + 60 * group.rank_in_group
    )
    return {"times": times, "reasons": reasons, "late": late.reason}


def pairs(group, options):
    """Every pair works, then what rank 2 writes to rank 0 gets lost."""
    memory = FileMemory(options["memory"], group.rank_in_group, group.size)
    first = verify_pairs(memory, group, CPU)
    memory.own.zero_()
    together(group, lambda: None)
    whole = memory.of_rank
    memory.of_rank = lambda peer: (
        torch.zeros_like(whole(peer)) if (group.rank_in_group, peer) == (2, 0) else whole(peer)
    )
    return {"first": first, "second": verify_pairs(memory, group, CPU)}


def stuck(group, _options):
    """Rank 1's device hangs; all ranks must say so."""
    from vcli.runtime.distributed.trials import DeviceStuckError

    def step():
        if group.rank_in_group == 1:
            raise DeviceStuckError("cuda:1 was still busy after 20 s")

    try:
        together(group, step)
    except VcliError as error:
        return {"error": error.message, "exit": int(error.exit_status)}
    return {"error": ""}


def main():
    scenario, rank, world = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    options = json.loads(sys.argv[4])
    torch.set_num_threads(1)
    join_world("gloo", rank, world, RendezvousTarget(path=options["store"]), timeout_s=60)
    gloo = dist.group.WORLD
    group = GroupHandle(
        kind="TP", ranks=tuple(range(world)), rank_in_group=rank, device_group=gloo, cpu_group=gloo
    )
    result = globals()[scenario](group, options)
    # Nobody may unmap or leave the store while another still needs it.
    dist.barrier()
    print(json.dumps(result), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
