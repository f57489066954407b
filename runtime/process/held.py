"""What keeps a process from running at all, as the kernel has it: for who waits for it in vain."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_PROC: Final = Path("/proc")

#: In /proc/PID/status: stopped by a signal, stopped by a tracer; waits and can't be interrupted.
_STOPPED: Final = ("T", "t")
_UNINTERRUPTIBLE: Final = "D"

#: A thread reads from a disk in state D too, and is woken for each piece: one that is not even
#: woken for so long waits for something that doesn't answer.
HELD_AFTER_S: Final = 2.0

#: What mends a start that is held up, and what may mend one that is slow.
HELD_HINT: Final = "mend what holds it and start again: a longer --start-timeout does not help"
STOPPED_HINT: Final = "it was ended together with the instance: start that again"
SLOW_HINT: Final = "a slow disk or a large model needs a longer --start-timeout"


@dataclass(frozen=True, slots=True)
class Hold:
    """Why a process makes no progress, with what lets it go on; no text: it can run."""

    text: str = ""
    is_stopped: bool = False


class HoldWatch:
    """Looks at one process now and then.

    That it is stopped is known at one look; that it is stuck in the kernel by two looks,
    `HELD_AFTER_S` apart, between which the thread did not run and the process read nothing.
    """

    def __init__(
        self, pid: int, *, clock: Callable[[], float] = time.monotonic, proc: Path = _PROC
    ) -> None:
        self._pid = pid
        self._clock = clock
        self._proc = proc
        self._since_s: dict[tuple[str, ...], float] = {}

    @property
    def is_in_doubt(self) -> bool:
        """Whether a later look may find a thread stuck that was in the kernel at the last one."""
        return bool(self._since_s)

    def look(self) -> Hold:
        """What holds the process now; doesn't block."""
        stop = describe_stop(self._pid, self._proc)
        if stop:
            return Hold(stop, is_stopped=True)
        now_s = self._clock()
        waits = _uninterruptible_waits(self._proc / str(self._pid))
        self._since_s = {wait: self._since_s.get(wait, now_s) for wait in waits}
        for (thread, *_), since_s in self._since_s.items():
            if now_s - since_s >= HELD_AFTER_S:
                return Hold(
                    f"thread {thread} is in the kernel and can't be interrupted (state D), as by "
                    "a disk, an NFS server or a device that doesn't answer: "
                    f"cat /proc/{self._pid}/task/{thread}/stack"
                )
        return Hold()


def describe_stop(pid: int, proc: Path = _PROC) -> str:
    """That the process `pid` was stopped, with what lets it go on; empty where it was not."""
    is_stopped = _fields(proc / str(pid) / "status").get("State", "").startswith(_STOPPED)
    return f"stopped (SIGSTOP or a debugger): kill -CONT {pid}" if is_stopped else ""


def describe_holds(pids: Sequence[int]) -> list[str]:
    """What holds each process, empty for nothing; takes `HELD_AFTER_S` where a look leaves doubt.

    In the order of `pids`.
    """
    watches = [HoldWatch(pid) for pid in pids]
    holds = [watch.look() for watch in watches]
    if any(watch.is_in_doubt for watch in watches):
        time.sleep(HELD_AFTER_S)
        holds = [watch.look() for watch in watches]
    return [hold.text for hold in holds]


def _uninterruptible_waits(entry: Path) -> Iterator[tuple[str, ...]]:
    """Each thread in state D, the main one first, with what is another once it has gone on."""
    try:
        threads = sorted((entry / "task").iterdir(), key=lambda task: int(task.name))
    except OSError:  # it ended meanwhile
        return
    for thread in threads:
        status = _fields(thread / "status")
        if status.get("State", "").startswith(_UNINTERRUPTIBLE):
            num_switches = status.get("voluntary_ctxt_switches", "")
            yield thread.name, num_switches, _fields(entry / "io").get("read_bytes", "")


def _fields(file: Path) -> dict[str, str]:
    """`name: value` of each line; empty where it can't be read."""
    try:
        text = file.read_bytes().decode("ascii", "replace")
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.splitlines())
    return {name: value.strip() for name, _, value in pairs}
