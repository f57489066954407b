"""Signals that ask a server to stop, counted inside the event loop."""

import asyncio
import signal

from vcli.topology.errors import ExitStatus

_STATUS = {
    signal.SIGINT: ExitStatus.INTERRUPTED,
    signal.SIGTERM: ExitStatus.TERMINATED,
}


class StopSignals:
    """The first ^C or SIGTERM asks for a drain, the second for an end at once.

    `exit_status` is that of the first one. Belongs to the running event loop.
    """

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self.exit_status = ExitStatus.OK
        self._loop = asyncio.get_running_loop()

    def install(self) -> None:
        """Take the signals over from here on."""
        for number in _STATUS:
            self._loop.add_signal_handler(number, self._on_signal, number)

    def uninstall(self) -> None:
        """Give them back."""
        for number in _STATUS:
            self._loop.remove_signal_handler(number)

    def ask(self, number: signal.Signals) -> None:
        """Stop as if this signal had come: another node was asked to."""
        self._on_signal(number)

    def _on_signal(self, number: signal.Signals) -> None:
        if self.first.is_set():
            self.second.set()
            return
        self.exit_status = _STATUS[number]
        self.first.set()
