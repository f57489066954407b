"""The child's side of the death pipe: when the parent is gone, so is the child, within a second.

The parent holds the write end and never writes; its death, however it comes, closes it. Two
watchers, because each covers what the other cannot:

    thread   blocks in read(); at end of file runs the callbacks, then ends the process
    kernel   the pipe is armed with O_ASYNC: at end of file the process gets a signal whose handler
             is libc's alarm() itself. It needs no interpreter, so it also ends a process whose
             main thread sits in C code and never gives the interpreter lock back (an import).

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
from collections.abc import Callable

#: Time that callbacks and an orderly end may take. Below the kernel's second, see `arm_kernel`.
GRACE_S = 0.8

#: Exit code of a process that ended because its parent is gone: as if hung up.
PARENT_GONE_EXIT_CODE = 128 + signal.SIGHUP

#: fcntl command of Linux that names the signal for O_ASYNC; the fcntl module does not have it.
_F_SETSIG = 10


class Lifeline:
    """Watches the read end `descriptor` of the death pipe; armed when the constructor returns."""

    def __init__(self, descriptor: int, *, grace_s: float = GRACE_S) -> None:
        self._descriptor = descriptor
        self._grace_s = grace_s
        self._callbacks: list[Callable[[], bool]] = []
        self._will_end = False
        os.set_inheritable(descriptor, False)
        arm_kernel(descriptor)
        threading.Thread(target=self._watch, name="lifeline", daemon=True).start()

    def on_parent_death(self, callback: Callable[[], bool]) -> None:
        """Run `callback` in a thread of its own when the parent is gone.

        It gives whether the process will end by itself, for which it then has the rest of the
        grace. Else, and without any callback, it ends at once.
        """
        self._callbacks.append(callback)

    def _watch(self) -> None:
        while os.read(self._descriptor, 1):
            pass
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

    def _run_callbacks(self) -> None:
        answers = [callback() for callback in list(self._callbacks)]
        self._will_end = all(answers)


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
    with contextlib.suppress(OSError):  # a file that knows no O_ASYNC: the thread is alone
        fcntl.fcntl(descriptor, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(descriptor, _F_SETSIG, int(signal.SIGHUP))
        libc.signal(int(signal.SIGHUP), ctypes.cast(libc.alarm, ctypes.c_void_p))
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_ASYNC)
        # The signal comes at the moment of the end of file only: look for one that was before.
        poller = select.poll()
        poller.register(descriptor, 0)
        if poller.poll(0):
            libc.alarm(1)
