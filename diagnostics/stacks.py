"""Stacks of all threads of a process of ours, also of one that hangs.

    flock, cut the file behind the page, signal -> a handler in C appends the stacks -> read

The handler runs even while the main thread sits in native code. That it is done is seen in /proc:
the signal is neither pending nor blocked any more, as it is in a thread while its handler runs.
"""

import fcntl
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from vcli.diagnostics.errors import CannotMeasureError
from vcli.diagnostics.files import HostFiles
from vcli.diagnostics.instances import VcliProcess

#: A handler answers within a millisecond, on a machine with more work than CPUs within a second.
DEADLINE_S: Final = 3.0
#: How the reason of a process that hangs in the kernel begins.
NO_ANSWER: Final = "no answer"
_POLL_S: Final = 0.01
_MAX_BYTES: Final = 1 << 20
_MEMFD: Final = "/memfd:vcli-"
_THREAD: Final = re.compile(r"^(Current thread|Thread) (0x[0-9a-f]+)")
_FRAME: Final = re.compile(r'^  File "(.*)", line (\d+|\?+) in (.*)$')


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A line of a stack."""

    path: str
    line: str
    function: str

    @property
    def short(self) -> str:
        """`runtime/worker/worker_proc.py:121 _serve_one`."""
        return f"{'/'.join(self.path.split('/')[-3:])}:{self.line} {self.function}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadStack:
    """The frames of a thread, the innermost first."""

    thread: str
    is_main: bool
    frames: tuple[Frame, ...]


def dump_stacks(
    files: HostFiles,
    process: VcliProcess,
    descriptor: int,
    *,
    signum: int,
    begin: int,
    deadline_s: float = DEADLINE_S,
) -> tuple[ThreadStack, ...]:
    """Ask the process and wait for the answer; stacks stand in its `descriptor` behind `begin`.

    Raises:
        CannotMeasureError: it cannot be asked, or does not answer; the text says why.
    """
    end_s = time.monotonic() + deadline_s
    try:
        pidfd = os.pidfd_open(process.pid)
    except OSError as error:
        raise CannotMeasureError(f"pid {process.pid}: {error.strerror}") from error
    try:
        # From here on the pid cannot become another process'.
        _check_can_ask(files, process, signum)
        page = _open_page(process, descriptor)
        try:
            _until(lambda: _can_lock(page), end_s, lambda: "another doctor is asking it")
            before = _blocking_threads(files, process.pid, signum)
            os.ftruncate(page, begin)
            _send(pidfd, signum)
            _until(
                lambda: _is_done(files, process.pid, signum, page, begin, before),
                end_s,
                lambda: _why_not(files, process.pid),
            )
            return parse_stacks(os.pread(page, _MAX_BYTES, begin).decode(errors="replace"))
        finally:
            os.close(page)
    finally:
        os.close(pidfd)


def parse_stacks(text: str) -> tuple[ThreadStack, ...]:
    """What faulthandler writes; the main thread is the last, being the oldest."""
    threads: list[tuple[str, list[Frame]]] = []
    for line in text.splitlines():
        head, frame = _THREAD.match(line), _FRAME.match(line)
        if head:
            threads.append((head[2], []))
        elif frame and threads:
            threads[-1][1].append(Frame(path=frame[1], line=frame[2], function=frame[3]))
    return tuple(
        ThreadStack(thread=name, is_main=place == len(threads) - 1, frames=tuple(frames))
        for place, (name, frames) in enumerate(threads)
    )


def _open_page(process: VcliProcess, descriptor: int) -> int:
    name = f"/proc/{process.pid}/fd/{descriptor}"
    try:
        page = os.open(name, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise CannotMeasureError(f"its page cannot be opened: {error.strerror}") from error
    # It will be cut, and the process may have put any other file there since it was looked at.
    if not str(Path(f"/proc/self/fd/{page}").readlink()).startswith(_MEMFD):
        os.close(page)
        raise CannotMeasureError(f"{name} is no page of ours")
    return page


def _send(pidfd: int, signum: int) -> None:
    try:
        signal.pidfd_send_signal(pidfd, signum)
    except OSError as error:
        raise CannotMeasureError(f"it cannot be signalled: {error.strerror}") from error


def _is_done(  # noqa: PLR0917 - what belongs to one question
    files: HostFiles, pid: int, signum: int, page: int, begin: int, before: frozenset[str]
) -> bool:
    # The size first: behind the first byte the handler has begun, so that it has ended shows.
    if os.fstat(page).st_size <= begin or _is_pending(files, pid, signum):
        return False
    return _blocking_threads(files, pid, signum) <= before


def _why_not(files: HostFiles, pid: int) -> str:
    now = files.read(f"/proc/{pid}/stat")
    if not now:
        return "it ended meanwhile"
    place = (files.read(f"/proc/{pid}/wchan") or "").strip("0\n ")
    waits = f", the main thread waits in {place}" if place else ""
    return f"{NO_ANSWER} (state {now.rpartition(')')[2].split()[0]}{waits})"


def _check_can_ask(files: HostFiles, process: VcliProcess, signum: int) -> None:
    fields = (files.read(f"/proc/{process.pid}/stat") or "").rpartition(")")[2].split()
    if len(fields) < 20 or int(fields[19]) != process.start_ticks:
        raise CannotMeasureError(f"pid {process.pid} has ended meanwhile")
    if fields[0] in "Tt":
        raise CannotMeasureError(f"it is stopped; kill -CONT {process.pid} lets it go on")
    if not _mask(files, f"/proc/{process.pid}/status", "SigCgt") >> (signum - 1) & 1:
        name = signal.Signals(signum).name
        raise CannotMeasureError(f"it does not catch {name} yet, which would end it")


def _can_lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_pending(files: HostFiles, pid: int, signum: int) -> bool:
    name = f"/proc/{pid}/status"
    pending = _mask(files, name, "ShdPnd") | _mask(files, name, "SigPnd")
    return bool(pending >> (signum - 1) & 1)


def _blocking_threads(files: HostFiles, pid: int, signum: int) -> frozenset[str]:
    return frozenset(
        thread
        for thread in files.names(f"/proc/{pid}/task")
        if _mask(files, f"/proc/{pid}/task/{thread}/status", "SigBlk") >> (signum - 1) & 1
    )


def _mask(files: HostFiles, name: str, field: str) -> int:
    for line in (files.read(name) or "").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.partition(":")[2], 16)
    return 0


def _until(is_done: Callable[[], bool], end_s: float, why_not: Callable[[], str]) -> None:
    while not is_done():
        if time.monotonic() > end_s:
            raise CannotMeasureError(why_not())
        time.sleep(_POLL_S)
