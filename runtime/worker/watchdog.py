"""Prints the stacks of all threads when work does not end; off while nothing runs.

A thread prints them while it holds the interpreter: stacks of threads that run Python code
meanwhile could crash the process. If it can't have the interpreter, since native code keeps it, a
timer in C code prints them a second later; that one is armed ahead of time.

    begin ... end, begin ... end     a look each quarter: something happened, so put it off
    begin .......................    a look: nothing happened since; at `stall_s` the stacks come
    end ................             a look: nothing ran since, so disarm and sleep until `begin`

One for a process, since the interpreter has one such timer.
"""

import faulthandler
import math
import sys
import threading
import time
from datetime import timedelta
from typing import Final, TextIO

from vcli.runtime.process.live_page import LivePage

#: What the thread may be late before the timer prints.
_PATIENCE_S: Final = 1.0


class Watchdog:
    """`begin` and `end` stand around the work and cost nothing; any thread may call them."""

    def __init__(
        self, stall_s: float, *, stream: TextIO | None = None, page: LivePage | None = None
    ) -> None:
        """The page of this process, if it is given, counts the pieces of work as steps."""
        self._stall_s = stall_s
        self._page = page
        self._stream = stream or sys.stderr
        self._num_beats = 0
        self._is_busy = False
        self._is_asleep = False
        self._is_closed = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """Work starts, or goes on."""
        self._num_beats += 1
        self._is_busy = True
        if self._page is not None:
            self._page.begin_step()
        if self._is_asleep:
            self._wake.set()

    def end(self) -> None:
        """Nothing runs."""
        self._num_beats += 1
        self._is_busy = False
        if self._page is not None:
            self._page.end_step()

    def close(self) -> None:
        """Disarm and end the thread."""
        self._is_closed = True
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        seen, due_s = 0, math.inf
        while not self._is_closed:
            if self._num_beats == seen and not self._is_busy:
                faulthandler.cancel_dump_traceback_later()
                self._sleep(seen)
                continue
            now_s = time.monotonic()
            if self._num_beats != seen:
                seen, due_s = self._num_beats, now_s + self._stall_s
                faulthandler.dump_traceback_later(self._stall_s + _PATIENCE_S, file=self._stream)
            elif now_s >= due_s:
                if now_s < due_s + _PATIENCE_S:  # the timer has not
                    self._print_stacks()
                due_s = math.inf
            self._wake.wait(min(self._stall_s / 4, max(due_s - now_s, 0.0)))
            self._wake.clear()
        faulthandler.cancel_dump_traceback_later()

    def _print_stacks(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        print(f"Timeout ({timedelta(seconds=self._stall_s)})!", file=self._stream, flush=True)
        faulthandler.dump_traceback(file=self._stream, all_threads=True)

    def _sleep(self, seen: int) -> None:
        self._is_asleep = True
        # `begin` counts before it looks whether to wake; so one of the two sees the other. Work
        # that has ended by now counts too: short work must not wake this thread each time.
        while self._num_beats == seen and not self._is_closed:
            self._wake.wait()
            self._wake.clear()
        self._is_asleep = False
