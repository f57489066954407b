"""Signals that ask a server to stop, counted inside the event loop."""

import asyncio
import signal
from collections.abc import Callable

from vcli.topology.errors import ExitStatus

_STATUS = {
    signal.SIGINT: ExitStatus.INTERRUPTED,
    signal.SIGTERM: ExitStatus.TERMINATED,
    signal.SIGHUP: ExitStatus.TERMINATED,
}


class StopSignals:
    """The first ^C, SIGTERM or SIGHUP asks for a drain, a second ^C or SIGTERM for an end at once.

    `on_first` is told why, once. `exit_status` is that of the first one. Belongs to the running
    event loop.
    """

    def __init__(self, on_first: Callable[[str], None] = lambda _: None) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self.exit_status = ExitStatus.OK
        self._on_first = on_first
        self._was_counted = False
        self._loop = asyncio.get_running_loop()
        # Where the terminal's end was to be ignored from the start (nohup), it still is.
        self._numbers = [
            number
            for number in _STATUS
            if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
        ]

    def install(self) -> None:
        """Take the signals over from here on."""
        for number in self._numbers:
            self._loop.add_signal_handler(number, self._on_signal, number)

    def uninstall(self) -> None:
        """Give them back."""
        for number in self._numbers:
            self._loop.remove_signal_handler(number)

    def ask(self, status: ExitStatus, reason: str) -> None:
        """Stop as after a signal with this exit status, unless one came: another node was asked."""
        if not self.first.is_set():
            self.exit_status = status
            self._on_first(reason)
            self.first.set()

    def _on_signal(self, number: signal.Signals) -> None:
        # SIGHUP does not count: a shell and the kernel both send it at a terminal's end, systemd
        # beside SIGTERM. Nor does another node's wish, which may come of the same signal to all.
        if number is not signal.SIGHUP:
            if self._was_counted:
                self.second.set()
            self._was_counted = True
        self.ask(_STATUS[number], f"stopping: {number.name}")
