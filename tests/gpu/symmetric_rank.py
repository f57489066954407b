"""One rank on one GPU: `symmetric_rank.py SCENARIO RANK WORLD_SIZE JSON`, JSON on stdout."""

import json
import sys
import time
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F

from vcli.runtime.distributed.group import GroupHandle
from vcli.runtime.distributed.parallel_state import context_of_groups
from vcli.runtime.distributed.rendezvous import RendezvousTarget, join_world
from vcli.runtime.distributed.selection import (
    close_communicators,
    open_memory,
    prepare_groups,
    sum_ways,
)
from vcli.runtime.distributed.symmetric import (
    SERVICE_POLLS,
    AllReduceLimits,
    SymmetricCommunicator,
)

ROW = 4096
#: The last has a number of 16-byte pieces that no number of ranks divides.
SHAPES = (*((rows, ROW) for rows in (1, 2, 7, 96, 97, 256)), (3, 1000))
EPS = 1e-5
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
#: Of a norm, which is not exact.
TOLERANCE = {"bfloat16": 2e-2, "float16": 3e-3, "float32": 1e-5}


class Rank:
    def __init__(self, rank, world, store):
        self.device = torch.device("cuda", rank)
        torch.cuda.set_device(self.device)
        join_world("nccl", rank, world, RendezvousTarget(path=store), timeout_s=120)
        ranks = list(range(world))
        self.group = GroupHandle(
            kind="TP",
            ranks=tuple(ranks),
            rank_in_group=rank,
            cpu_group=dist.new_group(ranks, backend="gloo"),
            device_group=dist.new_group(ranks, backend="nccl"),
        )

    def communicator(self):
        memory, pairs, reasons = open_memory(self.group, self.device)
        assert memory is not None, reasons
        assert pairs == self.group.size * (self.group.size - 1)
        communicator = SymmetricCommunicator(self.group, memory, self.device)
        # Nothing here waits until the other has compiled too.
        communicator.max_polls = SERVICE_POLLS
        return communicator

    def end(self):
        torch.cuda.synchronize()
        dist.barrier(self.group.cpu_group)
        dist.destroy_process_group()


def norm_error(normed, added, weight, dtype_name):
    wanted = (F.rms_norm(added.float(), (added.shape[1],), eps=EPS)).to(added.dtype) * weight
    error = (normed.float() - wanted.float()).abs() / (wanted.float().abs() + 1e-2)
    return not bool(error.max() <= TOLERANCE[dtype_name])


def numbers(shape, seed, device, *, is_whole):
    """Whole ones are so small that sums of eight ranks and three calls are exact in any dtype."""
    generator = torch.Generator(device).manual_seed(seed)
    if is_whole:
        return torch.randint(-8, 9, shape, generator=generator, device=device)
    return torch.randn(shape, generator=generator, device=device)


def gathered(rank, x):
    """The tensors of all ranks, (world, ...) in float32."""
    parts = [torch.empty_like(x) for _ in range(rank.group.size)]
    dist.all_gather(parts, x, group=rank.group.device_group)
    return torch.stack(parts).float()


def in_rank_order(parts, dtype):
    """What the fused kernel promises to the bit: summed in float32, then rounded."""
    total = torch.zeros_like(parts[0])
    for part in parts:
        total += part
    return total.to(dtype)


def is_wrong_sum(summed, parts, *, is_whole):
    """Exact where every order of additions is: whole numbers, or two ranks. Else a unit for each.

    Torch's ways round after each addition.
    """
    expected = in_rank_order(parts, summed.dtype)
    if is_whole or len(parts) == 2:
        return not torch.equal(summed, expected)
    allowed = len(parts) * torch.finfo(summed.dtype).eps * parts.abs().sum(0)
    return not bool(((summed.float() - expected.float()).abs() <= allowed).all())


def is_wrong_norm(residual, normed, first_residual, parts, weight, dtype_name):
    """After three calls that each added the sum to the residual."""
    summed = in_rank_order(parts, normed.dtype)
    added = first_residual
    for _ in range(3):
        added = added + summed
    return not torch.equal(residual, added) or norm_error(normed, added, weight, dtype_name)


def graphs(rank, options):
    """Every way in a graph of its own, replayed with new inputs."""
    communicator, device = rank.communicator(), rank.device
    name, number = options["dtype"], rank.group.rank_in_group
    dtype, wrong = DTYPES[name], []
    ways = {"fused": None}
    if dtype is not torch.float16:
        ways |= {"one-shot": communicator.one_shot, "two-shot": communicator.two_shot}
    for shape in SHAPES:
        weight = torch.rand(shape[1], device=device).to(dtype)
        dist.broadcast(weight, 0, group=rank.group.device_group)
        for way, reduce in ways.items():
            x = torch.zeros(shape, device=device, dtype=dtype)
            residual = torch.zeros_like(x)

            def call(x=x, residual=residual, weight=weight, reduce=reduce):
                if reduce is not None:
                    return reduce(x)
                return communicator.fused_norm(x, residual, weight, EPS)

            call()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                # Odd and one after the other: the halves of the memory don't start over evenly.
                first, second, third = call(), call(), call()
            del first, second
            for replay in range(100):
                is_whole = replay % 2 == 0
                x.copy_(numbers(shape, replay * 64 + number, device, is_whole=is_whole))
                residual.copy_(numbers(shape, replay * 64 + 63, device, is_whole=is_whole))
                first_residual, parts = residual.clone(), gathered(rank, x)
                graph.replay()
                if way == "fused":
                    is_wrong = is_wrong_norm(residual, third, first_residual, parts, weight, name)
                else:
                    is_wrong = is_wrong_sum(third, parts, is_whole=is_whole)
                # Not the end: the others are going on, and wait for this rank.
                if is_wrong:
                    wrong.append(f"{way}, {shape}, replay {replay}")
            graph.reset()
    communicator.close()
    return {"wrong": wrong[:20]}


def stress(rank, options):
    """Thousands of calls without a pause, of changing sizes and ways; every result is compared."""
    communicator, device = rank.communicator(), rank.device
    communicator.limits = AllReduceLimits(one_shot=1 << 18, two_shot=16 << 20, fused_norm=2 << 20)
    bad = torch.zeros((), device=device, dtype=torch.int64)
    weight = torch.ones(ROW, device=device, dtype=torch.bfloat16)
    index = torch.arange(256 * ROW, device=device)
    # Made before: no other kernels than needed between the calls. Sums below 256 are exact.
    inputs = [
        torch.stack([(index + turn + 5 * peer) % 13 for peer in range(rank.group.size)])
        for turn in range(13)
    ]
    own = [parts[rank.group.rank_in_group].bfloat16() for parts in inputs]
    sums = [parts.sum(0).bfloat16() for parts in inputs]
    for call in range(options["calls"]):
        rows = (1, 3, 256, 1, 97, 1)[call % 6]
        x, expected = (whole[call % 13][: rows * ROW].view(rows, ROW) for whole in (own, sums))
        if call % 3 == 2:
            product = communicator.input_buffer((rows * 2, ROW), torch.bfloat16)
            source = torch.cat((x, x))
            summed = communicator.all_reduce(source if product is None else product.copy_(source))[
                :rows
            ]
        else:
            residual = torch.zeros_like(x)
            _, summed = communicator.add_rms_norm(x, residual, weight, EPS)
        bad += (summed != expected).sum()
    num_bad = int(bad)
    communicator.close()
    return {"bad": num_bad, "lost": communicator.lost_peer()}


def prepared(rank, options):
    """The whole choice, as a worker makes it; with `breaks`, a way that fails on one rank."""
    from vcli.runtime.distributed import selection

    if options.get("breaks"):
        whole = sum_ways

        def broken(*arguments):
            one, *others = whole(*arguments)

            def reduce_wrong(tensor, whole_reduce):
                if options["breaks"] == "raises":
                    if rank.group.rank_in_group == 1:
                        raise RuntimeError("no such kernel")
                    return tensor * rank.group.size
                summed = whole_reduce(tensor)
                summed[5] += rank.group.rank_in_group
                return summed

            def make_trial(size):
                trial = one.make_trial(size)
                trial._reduce = partial(reduce_wrong, whole_reduce=trial._reduce)
                return trial

            return [selection.Way(name=one.name, sizes=one.sizes, make_trial=make_trial), *others]

        selection.sum_ways = broken
    context = context_of_groups(
        rank=rank.group.rank_in_group, world_size=rank.group.size, groups=(rank.group,)
    )
    started = time.monotonic()
    context, (report,) = prepare_groups(
        context, rank.device, ways=("symm_mem", "nccl"), dtype=torch.bfloat16, row_size=ROW
    )
    seconds = time.monotonic() - started
    torch.cuda.synchronize()
    close_communicators(context)
    return {
        "all_reduce": report.all_reduce,
        "transport": report.transport,
        "verified": report.verified,
        "pairs": report.p2p_pairs_verified,
        "note": report.note,
        "us": report.all_reduce_us,
        "seconds": seconds,
    }


def main():
    scenario, number, world = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    options = json.loads(sys.argv[4])
    rank = Rank(number, world, options["store"])
    result = globals()[scenario](rank, options)
    rank.end()
    print(json.dumps(result), flush=True)


main()
