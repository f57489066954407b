"""Prints the stacks of all threads when work does not end; off while nothing runs.

The printing is armed ahead of time, in a thread of the interpreter's C code, and put off while the
work goes on: so it also comes when the interpreter itself is stuck in native code.

    begin ... end, begin ... end     a look each quarter: something happened, so put it off
    begin .......................    a look: nothing happened since; at `stall_s` the stacks come
    end ................             a look: nothing ran since, so disarm and sleep until `begin`

One for a process, since the interpreter has one such timer.
"""

import faulthandler
import sys
import threading
from typing import TextIO

from vcli.runtime.process.live_page import LivePage


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
        seen = 0
        while not self._is_closed:
            if self._num_beats == seen and not self._is_busy:
                faulthandler.cancel_dump_traceback_later()
                self._sleep(seen)
                continue
            if self._num_beats != seen:
                seen = self._num_beats
                faulthandler.dump_traceback_later(self._stall_s, file=self._stream)
            self._wake.wait(self._stall_s / 4)
            self._wake.clear()
        faulthandler.cancel_dump_traceback_later()

    def _sleep(self, seen: int) -> None:
        self._is_asleep = True
        # `begin` counts before it looks whether to wake; so one of the two sees the other. Work
        # that has ended by now counts too: short work must not wake this thread each time.
        while self._num_beats == seen and not self._is_closed:
            self._wake.wait()
            self._wake.clear()
        self._is_asleep = False
