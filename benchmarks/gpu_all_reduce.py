"""Sums over GPUs inside a CUDA graph, us a call: NCCL, one-shot, two-shot, fused with the norm.

    python benchmarks/gpu_all_reduce.py [--devices 0,1] [--row-size 4096] [--dtype bfloat16]

Starts a process for each GPU and prints one table at the end. The input stands where the way wants
it, as a product writes it there. `separate` is the fastest sum with an addition and a norm of
torch after it, what `fused` replaces. Times are those of the slowest rank, the median of replays.
"""

import argparse
import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
import torch.nn.functional as F

from vcli.runtime.distributed.group import GroupHandle
from vcli.runtime.distributed.rendezvous import RendezvousTarget, join_world
from vcli.runtime.distributed.selection import bytes_text, open_memory
from vcli.runtime.distributed.symmetric import (
    INPUT_BYTES,
    SERVICE_POLLS,
    AllReduceLimits,
    SymmetricCommunicator,
    fits_regions,
)
from vcli.runtime.distributed.trials import timing_event, together, wait_for_device

ROWS = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048)
WAYS = ("nccl", "one-shot", "two-shot", "fused", "separate")
CALLS = 20
REPLAYS = 20
DEADLINE_S = 55
EPS = 1e-5


def measure(call, device):
    """Seconds of one call."""
    call()
    wait_for_device(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(CALLS):
            call()
    events = [timing_event() for _ in range(REPLAYS + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    wait_for_device(device)
    graph.reset()
    times = sorted(a.elapsed_time(b) for a, b in pairwise(events))
    return times[len(times) // 2] / 1e3 / CALLS


def calls_of(communicator, rows, row_size, dtype, device):
    """What is measured for so many rows, by name."""
    x = torch.zeros(rows, row_size, device=device, dtype=dtype)
    residual, weight = torch.zeros_like(x), torch.ones(row_size, device=device, dtype=dtype)
    calls = {"nccl": lambda: communicator.nccl(x)}
    summed = communicator.nccl
    if x.nbytes <= INPUT_BYTES and dtype is not torch.float16:
        communicator.limits = AllReduceLimits(one_shot=INPUT_BYTES)
        staged = communicator.input_buffer((rows, row_size), dtype)
        calls["one-shot"] = lambda: communicator.one_shot(staged)
        calls["two-shot"] = lambda: communicator.two_shot(staged)
        summed = communicator.one_shot if x.nbytes <= 1 << 19 else communicator.two_shot
        x_or_staged = staged
    else:
        x_or_staged = x
    if fits_regions(rows, row_size, dtype.itemsize):
        calls["fused"] = lambda: communicator.fused_norm(x, residual, weight, EPS)

    def separate():
        residual.add_(summed(x_or_staged))
        return F.rms_norm(residual, (row_size,), weight, EPS)

    return calls | {"separate": separate}


def run_rank(rank, devices, options):
    device = torch.device("cuda", devices[rank])
    torch.cuda.set_device(device)
    join_world("nccl", rank, len(devices), RendezvousTarget(path=options.store), timeout_s=40)
    ranks = list(range(len(devices)))
    group = GroupHandle(
        kind="TP",
        ranks=tuple(ranks),
        rank_in_group=rank,
        cpu_group=dist.new_group(ranks, backend="gloo"),
        device_group=dist.new_group(ranks, backend="nccl"),
    )
    memory, _, reasons = open_memory(group, device)
    if memory is None:
        raise SystemExit("; ".join(reasons))
    communicator = SymmetricCommunicator(group, memory, device)
    communicator.max_polls = SERVICE_POLLS
    dtype = getattr(torch, options.dtype)
    for rows in ROWS:
        times = {}
        for name, call in calls_of(communicator, rows, options.row_size, dtype, device).items():
            report = together(group, lambda call=call: measure(call, device))
            times[name] = report.reason or report.seconds * 1e6
        if rank == 0:
            size = rows * options.row_size * dtype.itemsize
            print(json.dumps({"rows": rows, "bytes": size, "us": times}), flush=True)
    communicator.close()
    dist.barrier(group.cpu_group)
    dist.destroy_process_group()


def run_all(devices, options):
    descriptor = os.memfd_create("vcli-bench-store")
    command = [
        sys.executable, __file__, "--devices", options.devices, "--dtype", options.dtype,
        "--row-size", str(options.row_size), "--store", f"/proc/{os.getpid()}/fd/{descriptor}",
    ]  # fmt: skip
    children = [
        subprocess.Popen([*command, "--rank", str(rank)], stdout=subprocess.PIPE, text=True)
        for rank in range(len(devices))
    ]
    try:
        output, _ = children[0].communicate(timeout=DEADLINE_S)
        is_late = False
    except subprocess.TimeoutExpired:
        is_late = True
    finally:
        for child in children:
            child.kill()
            child.wait()
    if is_late:
        output, _ = children[0].communicate()
    print_table([json.loads(line) for line in output.splitlines() if line.startswith("{")], options)
    if is_late:
        print(f"stopped after {DEADLINE_S} s")
    return 1 if is_late else 0


def print_table(lines, options):
    failed = {}
    print(f"us a call in a graph, {options.dtype}, rows of {options.row_size}")
    print(f"{'rows':>6}{'size':>10}" + "".join(f"{way:>10}" for way in WAYS))
    for line in lines:
        cells = []
        for way in WAYS:
            value = line["us"].get(way, "-")
            if isinstance(value, str) and value != "-":
                failed[way], value = value, "failed"
            cells.append(f"{value:>10.1f}" if isinstance(value, float) else f"{value:>10}")
        print(f"{line['rows']:>6}{bytes_text(line['bytes']):>10}" + "".join(cells))
    for way, reason in failed.items():
        print(f"{way}: {reason}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", default="0,1")
    parser.add_argument("--row-size", type=int, default=4096)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--rank", type=int)
    parser.add_argument("--store")
    options = parser.parse_args()
    devices = [int(index) for index in options.devices.split(",")]
    if options.rank is None:
        sys.exit(run_all(devices, options))
    run_rank(options.rank, devices, options)


if __name__ == "__main__":
    main()
