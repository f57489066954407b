"""What keeps a process from running at all, as the kernel has it: for who waits for it in vain."""

import contextlib
from pathlib import Path
from typing import Final

#: After ") " in /proc/PID/stat: stopped by a signal, stopped by a tracer.
_STOPPED: Final = frozenset({"T", "t"})
_UNINTERRUPTIBLE: Final = "D"

#: What mends a start that is held up, and what may mend one that is slow.
HELD_HINT: Final = "mend what holds it and start again: a longer --start-timeout does not help"
STOPPED_HINT: Final = "it was ended together with the instance: start that again"
SLOW_HINT: Final = "a slow disk or a large model needs a longer --start-timeout"


def is_stopped(pid: int) -> bool:
    """Whether the process `pid` was stopped, by a signal or a tracer."""
    return _state(Path(f"/proc/{pid}")) in _STOPPED


def describe_hold(pid: int) -> str:
    """Why the process `pid` makes no progress, with what lets it go on; empty where it can run."""
    if is_stopped(pid):
        return f"stopped (SIGSTOP or a debugger): kill -CONT {pid}"
    stuck = _uninterruptible_thread(pid)
    if not stuck:
        return ""
    return (
        f"thread {stuck} is in the kernel and can't be interrupted (state D), as by a disk, an "
        f"NFS server or a device that doesn't answer: cat /proc/{pid}/task/{stuck}/stack"
    )


def _uninterruptible_thread(pid: int) -> str:
    """The id of a thread in state D, the main one first; empty where there is none."""
    with contextlib.suppress(OSError):  # it ended meanwhile
        threads = sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda task: int(task.name))
        return next((task.name for task in threads if _state(task) == _UNINTERRUPTIBLE), "")
    return ""


def _state(entry: Path) -> str:
    """One letter; empty where it can't be told. The name before it may have any character."""
    try:
        fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return ""
    return fields[0].decode("ascii", "replace") if fields else ""
