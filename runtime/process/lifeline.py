"""The child's side of the death pipe: when the parent is gone, so is the child, within a second.

The parent holds the write end and never writes; its death, however it comes, closes it. Two
watchers, because each covers what the other cannot:

    thread   blocks in poll(); at end of file runs the callbacks, then ends the process
    kernel   the pipe is armed with O_ASYNC: at end of file the process gets a signal whose handler
             is libc's alarm() itself. It needs no interpreter, so it also ends a process whose
             main thread sits in C code and never gives the interpreter lock back (an import).

While the parent lives, it alone ends the child. Signals that ask a process to stop reach all
processes of an instance where an init system or a container sends them; they are left to the
parent, which lets running requests end first, and are only told to `on_signal`.

`PR_SET_PDEATHSIG` is not used: it fires when the parent's *thread* that started the child ends.
"""

import contextlib
import ctypes
import fcntl
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

#: Time that callbacks and an orderly end may take. Below the kernel's second, see `arm_kernel`.
GRACE_S = 0.8

#: Exit code of a process that ended because its parent is gone: as if hung up.
PARENT_GONE_EXIT_CODE = 128 + signal.SIGHUP

#: What asks a process to stop, and is its parent's business.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

#: fcntl command of Linux that names the signal for O_ASYNC; the fcntl module does not have it.
_F_SETSIG = 10

#: Well within the second after which the kernel's watcher ends the process.
_SETTLE_MS = 100


class _PollFd(ctypes.Structure):
    """What poll(2) takes and gives."""

    _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short))


class Lifeline:
    """Watches the read end `descriptor` of the death pipe; armed when the constructor returns.

    The main thread makes it, before there is any other thread.
    """

    def __init__(self, descriptor: int, *, grace_s: float = GRACE_S) -> None:
        self._descriptor = descriptor
        self._grace_s = grace_s
        self._callbacks: list[Callable[[], bool]] = []
        self._on_signal: Callable[[signal.Signals], None] = lambda _: None
        self._will_end = False
        os.set_inheritable(descriptor, False)
        reading = _hear_of_signals()
        arm_kernel(descriptor)
        # Here and in all later threads: only the lifeline's takes it, and sees that it came.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
        threading.Thread(target=self._watch, name="lifeline", daemon=True).start()
        threading.Thread(
            target=self._tell_signals, args=(reading,), name="signals", daemon=True
        ).start()

    def on_parent_death(self, callback: Callable[[], bool]) -> None:
        """Run `callback` in a thread of its own when the parent is gone.

        It gives whether the process will end by itself, for which it then has the rest of the
        grace. Else, and without any callback, it ends at once.
        """
        self._callbacks.append(callback)

    def on_signal(self, callback: Callable[[signal.Signals], None]) -> None:
        """Call `callback`, in a thread of the lifeline, with each signal that is left alone."""
        self._on_signal = callback

    def _watch(self) -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
        self._wait_for_end()
        hard_end = time.monotonic() + self._grace_s
        if self._callbacks:
            runner = threading.Thread(
                target=self._run_callbacks, name="parent-death-callbacks", daemon=True
            )
            runner.start()
            runner.join(self._grace_s)
            if self._will_end:
                time.sleep(max(0.0, hard_end - time.monotonic()))
        os._exit(PARENT_GONE_EXIT_CODE)

    def _wait_for_end(self) -> None:
        """Return at the end of file; take back the alarm that a SIGHUP of anybody else has set.

        By libc's own poll, which a signal interrupts for good; the interpreter's goes on.
        """
        libc = ctypes.CDLL(None)
        awaited = _PollFd(fd=self._descriptor, events=0)
        limit_ms = _SETTLE_MS
        while libc.poll(ctypes.byref(awaited), 1, limit_ms) <= 0:
            # A signal may also come between two waits, or have waited for this thread: so one more
            # look follows, before the alarm goes off.
            if signal.getitimer(signal.ITIMER_REAL)[0] > 0 and not _has_ended(self._descriptor):
                signal.alarm(0)
                self._on_signal(signal.SIGHUP)
                limit_ms = _SETTLE_MS
            else:
                limit_ms = -1

    def _tell_signals(self, reading: int) -> None:
        while numbers := os.read(reading, 64):
            for number in numbers:
                if number in STOP_SIGNALS:
                    self._on_signal(signal.Signals(number))

    def _run_callbacks(self) -> None:
        answers = [callback() for callback in list(self._callbacks)]
        self._will_end = all(answers)


@contextlib.contextmanager
def stop_signals_held() -> Iterator[None]:
    """A process that this thread starts meanwhile takes them when its lifeline is armed."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def arm_kernel(descriptor: int) -> None:
    """Have the kernel end this process 1 s after end of file on `descriptor`; needs no thread.

    signal(SIGHUP, alarm): the handler's argument is the signal's number, and SIGHUP is 1, so the
    kernel calls alarm(1); the SIGALRM that follows has its default action. Elsewhere than on Linux
    the thread is alone.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    libc.signal.restype = ctypes.c_void_p
    libc.signal(int(signal.SIGHUP), ctypes.cast(libc.alarm, ctypes.c_void_p))
    _signal_at_end(descriptor, signal.SIGHUP)
    if _has_ended(descriptor):
        libc.alarm(1)


def end_with(descriptor: int) -> None:
    """Have the kernel end this process at the end of file on `descriptor`, with no time left."""
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    _signal_at_end(descriptor, signal.SIGIO)
    if _has_ended(descriptor):
        os._exit(PARENT_GONE_EXIT_CODE)


def _signal_at_end(descriptor: int, number: signal.Signals) -> None:
    with contextlib.suppress(OSError):  # a file that knows no O_ASYNC: the thread is alone
        fcntl.fcntl(descriptor, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(descriptor, _F_SETSIG, int(number))
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_ASYNC)


def _has_ended(descriptor: int) -> bool:
    """Whether the other end is closed: the signal comes at that moment only."""
    poller = select.poll()
    poller.register(descriptor, 0)
    return bool(poller.poll(0))


def _hear_of_signals() -> int:
    """Do nothing at SIGINT and SIGTERM; gives a pipe that their numbers are written to.

    A handler runs in the main thread only, when that comes to it; the pipe is written at once.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
        # What the main thread is in goes on.
        signal.siginterrupt(number, False)
    return reading
