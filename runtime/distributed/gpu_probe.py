"""Tries devices together in processes that can be killed: `python -m ... --devices 0,1 --json`.

A process for each device joins the others as the ranks of one node do. Each writes a line when it
begins a step and when the step is done, so that a hang names the step and the ranks in it; a step
that takes too long ends them all. Lines (JSON objects, one each): `rank`, `step`, `state`
(started, done, failed, hung), `seconds`, and what the step found.

Exit codes: 0 everything worked, 1 something failed or hung.
"""

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import msgspec
import torch
import torch.distributed as dist

from vcli.runtime.distributed.device_measures import (
    check_product,
    device_facts,
    measure_host_copies,
)
from vcli.runtime.distributed.gpu_measures import (
    SIZES,
    copy_pairs,
    measure_all_reduce,
    pair_rounds,
    replay_all_reduce,
    wrong_collectives,
)
from vcli.runtime.distributed.group import GroupHandle
from vcli.runtime.distributed.probe_ranks import (
    MODULE,
    Emit,
    Event,
    Groups,
    ProbeRanks,
    open_store,
    rank_commands,
)
from vcli.runtime.distributed.rendezvous import RendezvousTarget, join_world
from vcli.runtime.distributed.symmetric import PeerMemory
from vcli.runtime.distributed.trials import together
from vcli.runtime.process.facts import process_facts
from vcli.topology.errors import UnfitError
from vcli.topology.start_method import decide_start_method

STEP_LIMIT_S: Final = 60.0
LARGEST: Final = SIZES[-1]


def probe(devices: Sequence[int], emit: Emit, *, step_limit_s: float = STEP_LIMIT_S) -> bool:
    """Runs a process for each of `devices`, passes on what they write; whether all went well."""
    _emit_memory(devices, emit, "memory before")
    with open_store() as store:
        ranks = ProbeRanks(rank_commands(devices, store), emit)
        try:
            is_well = ranks.follow(step_limit_s)
        finally:
            ranks.end()
    _emit_memory(devices, emit, "memory after")
    return is_well


def _emit_memory(devices: Sequence[int], emit: Emit, step: str) -> None:
    """What NVML says, which needs no context on a GPU."""
    try:
        used = [torch.cuda.device_memory_used(device) for device in devices]
    except Exception as error:  # noqa: BLE001 - border: NVML is optional, and fails in many ways
        emit({"step": step, "state": "failed", "message": f"{type(error).__name__}: {error}"})
        return
    emit({"step": step, "state": "done", "used_bytes": used})


class _Rank:
    """One process: the steps, in order. What a CPU has no part in is left out on one."""

    def __init__(
        self, rank: int, devices: Sequence[int], store: str, device_type: str, groups: Groups
    ) -> None:
        self._rank = rank
        self._world = len(devices)
        self._is_cuda = device_type == "cuda"
        self._device = torch.device("cuda", devices[rank]) if self._is_cuda else torch.device("cpu")
        self._store = store
        everybody = tuple(range(self._world))
        kinds = [(kind, tuple(ranks)) for kind, ranks in groups]
        if everybody not in [ranks for _, ranks in kinds]:
            kinds.insert(0, ("world", everybody))
        self._kinds = kinds
        self._uuid = ""

    def run(self) -> None:
        self._step("device", self._take_device)
        if self._is_cuda:
            self._step("start method", _start_methods)
        self._step("product", lambda: check_product(self._device))
        if self._is_cuda:
            self._step("host copies", lambda: measure_host_copies(self._device, self._uuid))
        if self._world > 1:
            self._try_together()
        self._step("end", self._leave)

    def _try_together(self) -> None:
        self._step("join", self._join)
        made: list[GroupHandle] = []
        self._step("gloo", lambda: self._make_groups(made))
        world, own = made[0], [group for group in made if self._rank in group.ranks]
        if self._is_cuda:
            self._step("peer memory", lambda: self._copy_pairs(world))
        for group in own:
            self._group_step("first sum", group, partial(self._sum_once, group))
        for group in own:
            self._group_step("results", group, partial(self._compare, group))
        if self._is_cuda:
            self._try_speed(world, own)

    def _try_speed(self, world: GroupHandle, own: Sequence[GroupHandle]) -> None:
        for size in SIZES:
            self._group_step(f"all-reduce {size}", world, partial(self._sum, world, size))
        for group in own:
            if group is not world:
                name = f"{group.kind} all-reduce {LARGEST}"
                self._group_step(name, group, partial(self._sum, group, LARGEST))
        deadline = time.monotonic() + STEP_LIMIT_S
        self._step("graph", lambda: {"us": replay_all_reduce(world, self._device, deadline)})

    def _group_step(self, name: str, group: GroupHandle, step: Callable[[], Event]) -> None:
        self._step(name, step, {"kind": group.kind, "ranks": list(group.ranks)})

    def _step(self, name: str, step: Callable[[], Event], about: Event | None = None) -> None:
        started = time.monotonic()
        lead = {"rank": self._rank, "step": name}
        about = about or {}
        _write({**lead, "state": "started", **about})
        try:
            found = step()
        except Exception as error:  # noqa: BLE001 - border: any failure is a result here
            text = (str(error).splitlines() or [""])[0]
            message = text if isinstance(error, UnfitError) else f"{type(error).__name__}: {text}"
            _write({**lead, "state": "failed", "message": message, **about})
            os._exit(1)  # leaving in order could wait for the others
        seconds = round(time.monotonic() - started, 3)
        _write({**lead, "state": "done", "seconds": seconds, **about, **found})

    def _take_device(self) -> Event:
        if not self._is_cuda:
            return {"name": "CPU", "torch": torch.__version__}
        if self._device.index >= torch.cuda.device_count():
            raise UnfitError(f"{self._device}: {torch.cuda.device_count()} CUDA devices are there")
        torch.cuda.set_device(self._device)
        # Together: that there is a kernel for this architecture.
        torch.zeros(1, device=self._device).add_(1).item()
        facts = device_facts(self._device)
        self._uuid = facts["uuid"]
        return facts

    def _join(self) -> Event:
        join_world(
            "nccl" if self._is_cuda else "gloo", self._rank, self._world,
            RendezvousTarget(path=self._store), timeout_s=STEP_LIMIT_S,
        )  # fmt: skip
        return {}

    def _make_groups(self, made: list[GroupHandle]) -> Event:
        """The world first. Every rank makes every group; a sum over gloo joins the processes."""
        kinds = sorted(self._kinds, key=lambda item: len(item[1]) < self._world)
        for kind, ranks in kinds:
            is_world = len(ranks) == self._world
            gloo = dist.new_group(list(ranks), backend="gloo")
            device_group = gloo
            if self._is_cuda:
                device_group = dist.group.WORLD if is_world else dist.new_group(list(ranks))
            made.append(
                GroupHandle(
                    kind=kind,
                    ranks=ranks,
                    rank_in_group=ranks.index(self._rank) if self._rank in ranks else 0,
                    device_group=device_group,
                    cpu_group=gloo,
                )
            )
        number = torch.tensor([float(self._rank + 1)])
        dist.all_reduce(number, group=made[0].cpu_group)
        expected = self._world * (self._world + 1) / 2
        if number.item() != expected:
            raise UnfitError(f"the sum over gloo is {number.item():g}, expected {expected:g}")
        return {}

    def _sum_once(self, group: GroupHandle) -> Event:
        dist.all_reduce(torch.zeros(1, device=self._device), group=group.device_group)
        if self._is_cuda:
            torch.cuda.synchronize(self._device)
        return {}

    def _sum(self, group: GroupHandle, num_bytes: int) -> Event:
        found = measure_all_reduce(group, self._device, num_bytes, STEP_LIMIT_S)
        return dict(msgspec.to_builtins(found))

    def _compare(self, group: GroupHandle) -> Event:
        return {"wrong": wrong_collectives(group, self._device)}

    def _copy_pairs(self, group: GroupHandle) -> Event:
        opened: list[PeerMemory] = []
        reason = together(group, lambda: opened.append(PeerMemory(group.size, self._device))).reason
        if not reason:
            reason = together(group, lambda: opened[0].meet(group)).reason
        copies = []
        try:
            for pairs in () if reason else pair_rounds(self._world):
                copies += copy_pairs(opened[0], group, self._device, pairs)
        finally:
            for memory in opened:
                memory.close()
        return {"pairs": msgspec.to_builtins(copies), "reason": reason}

    def _leave(self) -> Event:
        if self._is_cuda:
            torch.cuda.synchronize(self._device)
        if self._world > 1:
            dist.destroy_process_group()
        return {}


def _start_methods() -> Event:
    """What this process, which has CUDA in use, would start its children by."""
    facts = process_facts({})
    by_default, forked = (decide_start_method(facts, wanted) for wanted in (None, "fork"))
    return {
        "cuda_initialized": facts.cuda_initialized,
        "default": by_default.value,
        "fork": forked.value,
        "reasons": list(forked.reasons),
    }


def _watch_lifeline() -> None:
    def watch() -> None:
        # Not through sys.stdin, whose lock a thread must not hold when the interpreter ends.
        os.read(0, 1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _write(event: Event) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def _write_text(event: Event) -> None:
    if event["state"] == "started":
        return
    fixed = ("rank", "step", "state")
    who = f"rank {event['rank']}: " if "rank" in event else ""
    found = "  ".join(f"{name}={value}" for name, value in event.items() if name not in fixed)
    sys.stdout.write(f"{who}{event['step']}: {event['state']}  {found}\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """The parent, or with `--rank` one of its processes."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}")
    parser.add_argument("--devices", required=True, help="indices of CUDA devices: 0,1")
    parser.add_argument("--json", action="store_true", help="a JSON object per line")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    parser.add_argument("--device-type", default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--groups", type=json.loads, default=[], help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        devices = [int(index) for index in options.devices.split(",")]
    except ValueError:
        parser.error(f"--devices {options.devices!r}: wanted is a list like 0,1")
    if min(devices) < 0 or len(set(devices)) < len(devices):
        parser.error(f"--devices {options.devices}: wanted are different indices")
    if options.rank is None:
        return 0 if probe(devices, _write if options.json else _write_text) else 1
    _watch_lifeline()
    _Rank(options.rank, devices, options.store, options.device_type, options.groups).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
