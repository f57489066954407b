"""GPU: faults that the devices and the kernel remember."""

from collections.abc import Callable
from typing import Any, Final

from vcli.diagnostics.check import (
    Finding,
    Level,
    Remedy,
    Status,
    check,
    failed,
    passed,
    skipped,
    warned,
)
from vcli.diagnostics.checks.cuda import NO_GPU
from vcli.diagnostics.context import CheckContext
from vcli.diagnostics.dialect import Dialect
from vcli.diagnostics.errors import CannotMeasureError
from vcli.diagnostics.gpu import DeviceLostError, Nvml
from vcli.diagnostics.kernel_log import find_xids, read_kernel_log
from vcli.diagnostics.text import listing
from vcli.topology import GpuFacts

_UNCORRECTED, _VOLATILE = 1, 0

#: Xids after which the GPU must be reset or replaced, and those that a program may have caused.
FATAL_XIDS: Final = frozenset((48, 62, 64, 74, 79, 94, 95, 119, 120, 140, 143, 154))
NOTED_XIDS: Final = frozenset((13, 31, 32, 43, 45, 63, 68, 69))

_HARDWARE_SLOWDOWNS: Final = {
    0x08: "hardware slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
_SOFTWARE_THERMAL: Final = 0x20

_RESET: Final = Remedy(
    bare_metal="sudo nvidia-smi -i {index} --gpu-reset   (stop what uses it first), or leave it "
    "out: CUDA_VISIBLE_DEVICES={others}",
    kubernetes="kubectl drain the node, and reset GPU {index} there",
    slurm="scontrol update NodeName=$(hostname) State=DRAIN Reason='GPU {index}', and reset it",
)

#: What one GPU says: a verdict and its text; None where it does not support the question.
GpuVerdict = tuple[Status, str] | None
_FINE: Final = (Status.PASS, "")


def judge_each(context: CheckContext, judge: Callable[[Nvml, Any], GpuVerdict]) -> Finding:
    """The worst verdict over the GPUs of the plan, with the texts of all that are not fine.

    A GPU that is lost is GPU-07's affair.
    """
    session = context.open_nvml()
    problems: list[tuple[Status, str, int]] = []
    num_answers = 0
    for gpu in context.gpus:
        try:
            verdict = judge(session, session.handle(gpu))
        except DeviceLostError:
            continue
        if verdict is None:
            continue
        num_answers += 1
        if verdict[0] is not Status.PASS:
            problems.append((verdict[0], f"GPU {gpu.index}: {verdict[1]}", gpu.index))
    if not num_answers:
        return skipped("these GPUs do not tell" if context.gpus else NO_GPU)
    if not problems:
        return passed(f"none on {num_answers} GPU{'s' if num_answers > 1 else ''}")
    text = listing([problem[1] for problem in problems])
    index = problems[0][2]
    others = ",".join(str(gpu.index) for gpu in context.host.gpus if gpu.index != index)
    values = {"index": index, "others": others or "''"}
    if any(status is Status.FAIL for status, _, _ in problems):
        return failed(text, values=values)
    return warned(text, values=values)


@check(
    "GPU-04",
    "no uncorrected memory error",
    level=Level.L1,
    why="results computed with it are wrong, and the next one ends the process",
    expected="no uncorrected ECC error since the last reset",
    remedy=_RESET,
    requires=("CUDA-01",),
)
def ecc(context: CheckContext) -> Finding:
    """Asks each GPU for its volatile counter of uncorrected ECC errors."""

    def judge(session: Nvml, handle: Any) -> GpuVerdict:
        count = session.ask(
            lambda nvml: int(nvml.nvmlDeviceGetTotalEccErrors(handle, _UNCORRECTED, _VOLATILE))
        )
        if count is None:
            return None
        return (Status.FAIL, f"{count} uncorrected errors") if count else _FINE

    return judge_each(context, judge)


@check(
    "GPU-05",
    "memory rows",
    level=Level.L1,
    why="a failed remapping leaves broken memory in use; a pending one waits for a reset",
    expected="no failed and no pending remapping",
    remedy=_RESET,
    requires=("CUDA-01",),
)
def row_remapping(context: CheckContext) -> Finding:
    """Asks each GPU for its remapped rows, on older ones for pages that wait to be retired.

    A failed remapping fails (the board must be replaced), a pending one warns.
    """

    def judge(session: Nvml, handle: Any) -> GpuVerdict:
        rows = session.ask(lambda nvml: tuple(nvml.nvmlDeviceGetRemappedRows(handle)))
        if rows is not None:
            if rows[3]:
                return Status.FAIL, "a row could not be remapped: replace the board"
            return (Status.WARN, "a remapping waits for a reset") if rows[2] else _FINE
        pending = session.ask(lambda nvml: int(nvml.nvmlDeviceGetRetiredPagesPendingStatus(handle)))
        if pending is None:
            return None
        return (Status.WARN, "pages wait to be retired") if pending else _FINE

    return judge_each(context, judge)


@check(
    "GPU-06",
    "no fault in the kernel's log",
    why="the driver has reported a fault of the device",
    expected="no Xid of a broken GPU since boot",
    remedy=Remedy(
        bare_metal="sudo dmesg | grep Xid   shows them all; reset the GPU at {bus}: sudo "
        "nvidia-smi -i {bus} --gpu-reset, or reboot",
        kubernetes="kubectl drain the node and reset the GPU at {bus}, or reboot it",
    ),
    requires=("CUDA-01",),
)
def xids(context: CheckContext) -> Finding:
    """Searches the kernel's messages for Xids of the NVIDIA driver.

    Those of a broken device, bus or memory fail; those that a program may have caused warn. A
    container need not be shown the log.
    """
    try:
        log = read_kernel_log(context.files)
    except CannotMeasureError as reason:
        if context.dialect in (Dialect.DOCKER, Dialect.KUBERNETES):
            return skipped(f"{reason}; on the host: sudo dmesg | grep Xid")
        raise
    found = find_xids(log)
    fatal = [(bus, number) for bus, number in found if number in FATAL_XIDS]
    noted = [(bus, number) for bus, number in found if number in NOTED_XIDS]
    told = list(dict.fromkeys(fatal or noted))
    if not told:
        return passed(f"{len(found)} harmless" if found else "none")
    text = listing([f"Xid {number} at {bus}" for bus, number in told])
    values = {"bus": told[0][0]}
    if fatal:
        return failed(text, values=values)
    return warned(text, why="a program used the GPU wrongly, or was ended by it", values=values)


@check(
    "GPU-07",
    "every GPU answers",
    level=Level.L1,
    why="a GPU that fell off the bus takes its whole group down",
    expected="an answer from each",
    remedy=Remedy(
        bare_metal="{action}; until then leave it out: CUDA_VISIBLE_DEVICES={others}",
        kubernetes="kubectl drain the node, then {action}",
    ),
    requires=("CUDA-01",),
)
def answers(context: CheckContext) -> Finding:
    """Asks each GPU for its name, and tells a lost device from one that must be reset."""
    session = context.open_nvml()
    for gpu in context.host.gpus:
        try:
            _touch(session, gpu)
        except DeviceLostError as error:
            others = ",".join(str(g.index) for g in context.host.gpus if g.index != gpu.index)
            what = "has fallen off the bus" if error.is_lost else "must be reset"
            action = "reboot" if error.is_lost else f"sudo nvidia-smi -i {gpu.index} --gpu-reset"
            return failed(
                f"GPU {gpu.index} ({gpu.pci_bus_id or gpu.uuid}) {what}",
                values={"action": action, "others": others or "''"},
            )
    if not context.host.gpus:
        return skipped(context.gpu_problem or NO_GPU)
    return passed(f"{len(context.host.gpus)} of {len(context.host.gpus)}")


def _touch(session: Nvml, gpu: GpuFacts) -> None:
    """Ask for something that only a living device can say."""
    handle = session.handle(gpu)
    session.ask(lambda nvml: nvml.nvmlDeviceGetTemperature(handle, 0))


@check(
    "GPU-08",
    "not throttled",
    level=Level.L1,
    why="a throttled GPU makes its whole group wait in every step",
    expected="no slowdown by hardware, temperature or power supply",
    remedy=Remedy(
        bare_metal="nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER -i {index}; check fans, airflow "
        "and power cables",
    ),
    requires=("CUDA-01",),
)
def throttled(context: CheckContext) -> Finding:
    """Asks each GPU why its clocks are not at their highest.

    Slowdowns by the hardware fail, by the driver for temperature warn; a power cap and idle clocks
    are normal.
    """

    def judge(session: Nvml, handle: Any) -> GpuVerdict:
        reasons = session.ask(lambda nvml: int(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)))
        if reasons is None:
            reasons = session.ask(
                lambda nvml: int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
            )
        if reasons is None:
            return None
        hardware = [name for bit, name in _HARDWARE_SLOWDOWNS.items() if reasons & bit]
        if hardware:
            return Status.FAIL, ", ".join(hardware)
        return (Status.WARN, "too warm") if reasons & _SOFTWARE_THERMAL else _FINE

    return judge_each(context, judge)


@check(
    "GPU-10",
    "no replays on PCIe",
    level=Level.L1,
    why="packets that must be sent again slow every copy to and from the host",
    expected="a counter that stands still",
    remedy=Remedy(
        bare_metal="reseat GPU {index}, its riser and cables; update the system's firmware"
    ),
    requires=("CUDA-01",),
    deadline_s=4.0,
)
def replays(context: CheckContext) -> Finding:
    """Reads each GPU's replay counter twice, a fifth of a second apart."""
    session = context.open_nvml()
    before: dict[int, int | None] = {}

    def count(handle: Any) -> int | None:
        return session.ask(lambda nvml: int(nvml.nvmlDeviceGetPcieReplayCounter(handle)))

    for gpu in context.gpus:
        try:
            before[gpu.index] = count(session.handle(gpu))
        except DeviceLostError:
            before[gpu.index] = None
    if any(value is not None for value in before.values()):
        context.pause(0.2)
    grown = []
    for gpu in context.gpus:
        first = before[gpu.index]
        now = count(session.handle(gpu)) if first is not None else None
        if first is not None and now is not None and now > first:
            grown.append((gpu.index, now - first))
    if grown:
        text = listing([f"GPU {index}: {more} replays in 0.2 s" for index, more in grown])
        return warned(text, values={"index": grown[0][0]})
    if all(value is None for value in before.values()):
        return skipped("these GPUs do not tell" if context.gpus else NO_GPU)
    return passed("none")


@check(
    "GPU-11",
    "driver stays loaded",
    level=Level.L1,
    why="without persistence each first use initialises the GPU again, for seconds",
    expected="persistence mode on",
    remedy=Remedy(
        bare_metal="sudo systemctl enable --now nvidia-persistenced   (or sudo nvidia-smi -pm 1)",
        docker="on the host: sudo systemctl enable --now nvidia-persistenced",
    ),
    requires=("CUDA-01",),
)
def persistence(context: CheckContext) -> Finding:
    """Asks each GPU for its persistence mode."""

    def judge(session: Nvml, handle: Any) -> GpuVerdict:
        mode = session.ask(lambda nvml: int(nvml.nvmlDeviceGetPersistenceMode(handle)))
        if mode is None:
            return None
        return _FINE if mode else (Status.WARN, "persistence mode is off")

    return judge_each(context, judge)


CHECKS = (ecc, row_remapping, xids, answers, throttled, replays, persistence)
