"""One child under watch: its last state, whether it is ready, and how it ended."""

import socket
import time
from typing import Any

import msgspec

from vcli.runtime.errors import FailureReport
from vcli.runtime.messages import ChildFailure, ChildMessage, ChildReady, ChildState
from vcli.runtime.process.child import SERVING
from vcli.runtime.process.control import ControlReader
from vcli.runtime.process.failures import describe_exit, exit_hint
from vcli.runtime.process.held import HoldWatch
from vcli.runtime.process.starter import StartedChild
from vcli.topology.errors import ExitStatus


class WatchedChild:
    """A started child and what is known of it; changed by the group's monitor only."""

    def __init__(self, child: StartedChild) -> None:
        self.child = child
        self.spec = child.spec
        self.hold_watch = HoldWatch(child.pid)
        self.reader = ControlReader(child.control)
        self.is_ready = False
        self.payload: Any = None
        self.report: FailureReport | None = None
        self.exit_code: int | None = None
        self.control_closed_s: float | None = None
        self._state = "started"
        self._fraction: float | None = None
        self._state_since_s = time.monotonic()

    @property
    def name(self) -> str:
        """Title, rank and pid, for messages."""
        rank = "" if self.spec.rank is None else f"rank {self.spec.rank}, "
        return f"{self.spec.title} ({rank}pid {self.child.pid})"

    @property
    def phase(self) -> str:
        """The last state that the child reported; `serving` once it is ready."""
        return SERVING if self.is_ready else self._state

    def describe_state(self, hold: str) -> str:
        """Who it is, in which state, for how long, and `hold`: what keeps it from running."""
        progress = "" if self._fraction is None else f" {self._fraction:.0%}"
        seconds = time.monotonic() - self._state_since_s
        return f"{self.name} in state {self.phase}{progress} for {seconds:.1f} s" + (
            f", {hold}" if hold else ""
        )

    def take(self, message: ChildMessage) -> FailureReport | None:
        """Note what the child said of itself; gives its failure when that is what it said.

        What it passes on of its own children (another process' name) changes nothing here.
        """
        match message:
            case ChildFailure():
                self.report = message.report
                return message.report
            case ChildReady() if message.pid == self.child.pid:
                self.is_ready = True
                self.payload = message.payload
            case ChildState() if message.pid == self.child.pid:
                if message.state != self._state:
                    self._state_since_s = time.monotonic()
                self._state, self._fraction = message.state, message.fraction
            case _:
                pass
        return None

    def failed_with(
        self, kind: str, message: str, *, is_serving: bool, exit_code: int | None = None
    ) -> FailureReport:
        """A report in the name of a child that could not make one itself."""
        status = ExitStatus.DIED_SERVING if is_serving else ExitStatus.START_FAILED
        self.report = FailureReport(
            process=self.spec.title,
            phase=self.phase,
            kind=kind,
            message=message,
            rank=self.spec.rank,
            pid=self.child.pid,
            host=socket.gethostname(),
            exit_code=exit_code,
            hint="" if exit_code is None else exit_hint(exit_code),
            exit_status=int(status),
        )
        return self.report

    def ended(self, exit_code: int, *, is_serving: bool) -> FailureReport:
        """Note the exit; gives the failure it means, with the child's own words if it had any."""
        self.exit_code = exit_code
        if self.report is None:
            return self.failed_with(
                "", describe_exit(exit_code), is_serving=is_serving, exit_code=exit_code
            )
        if self.report.pid == self.child.pid:
            self.report = msgspec.structs.replace(self.report, exit_code=exit_code)
        return self.report
