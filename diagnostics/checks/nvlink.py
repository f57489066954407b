"""LINK: NVLink and the fabric behind it, as NVML counts them."""

import ctypes
from typing import Any, Final

from vcli.diagnostics.check import Finding, Level, Remedy, check, failed, passed, skipped, warned
from vcli.diagnostics.checks.cuda import NO_GPU
from vcli.diagnostics.context import CheckContext
from vcli.diagnostics.gpu import DeviceLostError, Nvml
from vcli.diagnostics.text import listing
from vcli.topology import GpuFacts

_MAX_NVLINKS: Final = 18
_FABRIC_STATES: Final = {1: "not started", 2: "in progress", 3: "completed"}
_COMPLETED: Final = 3


@check(
    "LINK-03",
    "NVLinks are up",
    level=Level.L1,
    why="a group is as slow as its slowest link",
    expected="as many active links on each GPU as on the others",
    remedy=Remedy(
        bare_metal="nvidia-smi nvlink -s -i {index}; restart the fabric manager, then reset or "
        "reseat GPU {index}",
    ),
    requires=("CUDA-01",),
)
def nvlinks(context: CheckContext) -> Finding:
    """Counts the active NVLinks of each GPU; fails where one has fewer than the others."""
    if not context.host.gpus:
        return skipped(NO_GPU)
    session = context.open_nvml()
    counts = {gpu.index: _active_links(session, gpu) for gpu in context.host.gpus}
    most = max(counts.values())
    if most == 0:
        return skipped("no NVLink")
    fewer = {index: count for index, count in counts.items() if count < most}
    if fewer:
        text = listing([f"GPU {index} has {count} of {most}" for index, count in fewer.items()])
        return failed(f"{text} links up", values={"index": min(fewer)})
    return passed(f"{most} links up on each GPU")


def _active_links(session: Nvml, gpu: GpuFacts) -> int:
    try:
        handle = session.handle(gpu)
        states = [_link_state(session, handle, link) for link in range(_MAX_NVLINKS)]
    except DeviceLostError:
        return 0
    return sum(state == 1 for state in states)


def _link_state(session: Nvml, handle: Any, link: int) -> int | None:
    return session.ask(lambda nvml: int(nvml.nvmlDeviceGetNvLinkState(handle, link)))


@check(
    "LINK-04",
    "no new errors on NVLink",
    level=Level.L1,
    why="packets that must be sent again slow every collective",
    expected="counters that stand still",
    remedy=Remedy(
        bare_metal="nvidia-smi nvlink -e -i {index}; reseat GPU {index} or its NVLink bridge"
    ),
    requires=("LINK-03",),
    deadline_s=4.0,
)
def nvlink_errors(context: CheckContext) -> Finding:
    """Reads the error counters of each active link twice, a fifth of a second apart."""
    session = context.open_nvml()
    before = _link_errors(session, context.host.gpus)
    if not before:
        return skipped("these GPUs do not count them")
    context.pause(0.2)
    after = _link_errors(session, context.host.gpus)
    grown = [key for key, count in after.items() if count > before.get(key, count)]
    if grown:
        text = listing([f"GPU {index} link {link}" for index, link in grown])
        return warned(f"errors grow on {text}", values={"index": grown[0][0]})
    return passed("none")


def _link_errors(session: Nvml, gpus: tuple[GpuFacts, ...]) -> dict[tuple[int, int], int]:
    found: dict[tuple[int, int], int] = {}
    for gpu in gpus:
        try:
            handle = session.handle(gpu)
            for link in range(_MAX_NVLINKS):
                counts = [_error_count(session, handle, link, kind) for kind in (0, 1, 2)]
                known = [count for count in counts if count is not None]
                if known:
                    found[gpu.index, link] = sum(known)
        except DeviceLostError:
            continue
    return found


def _error_count(session: Nvml, handle: Any, link: int, kind: int) -> int | None:
    return session.ask(lambda nvml: int(nvml.nvmlDeviceGetNvLinkErrorCounter(handle, link, kind)))


@check(
    "LINK-07",
    "fabric manager",
    level=Level.L1,
    why="GPUs behind an NVSwitch fail with CUDA error 802 until the fabric is ready",
    expected="the fabric's state is completed, its health not degraded",
    remedy=Remedy(
        bare_metal="sudo systemctl enable --now nvidia-fabricmanager   (the version of the driver: "
        "{driver})",
        docker="on the host: sudo systemctl enable --now nvidia-fabricmanager   ({driver})",
    ),
    requires=("CUDA-01",),
)
def fabric(context: CheckContext) -> Finding:
    """Asks each GPU for the state of its registration with the NVLink fabric."""
    session = context.open_nvml()
    states = {gpu.index: _fabric_state(session, gpu) for gpu in context.host.gpus}
    known = {index: state for index, state in states.items() if state}
    if not known:
        return skipped("no NVSwitch fabric")
    waiting = {index: state for index, state in known.items() if state != _COMPLETED}
    if waiting:
        text = listing([f"GPU {i}: {_FABRIC_STATES.get(s, s)}" for i, s in waiting.items()])
        return failed(text, values={"driver": context.host.driver_version or "see nvidia-smi"})
    return passed("completed")


def _fabric_state(session: Nvml, gpu: GpuFacts) -> int:
    """1 not started, 2 in progress, 3 completed; 0 without a fabric."""

    def ask(nvml: Any) -> int:
        info = nvml.c_nvmlGpuFabricInfoV_t()
        # The module hands this argument on to C as it is: a structure would go by value.
        nvml.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(info))
        return int(info.state)

    try:
        handle = session.handle(gpu)
        return session.ask(ask) or 0
    except DeviceLostError:
        return 0


CHECKS = (nvlinks, nvlink_errors, fabric)
