"""Which report a dying engine core tells: the first cause, not what fell over it."""

import os
import socket
import threading
import traceback

import msgspec

from vcli.runtime.errors import FailureReport, ReportedError
from vcli.runtime.process.failures import Weight, weigh
from vcli.topology.errors import ExitStatus, VcliError

_CAUSE_WAIT_S = 0.3
"""How long a failure that looks like a consequence waits for the executor to name its cause."""

_KEPT_STATUSES = frozenset(
    {
        ExitStatus.UNFIT,
        ExitStatus.USAGE,
        ExitStatus.PEERS_MISSING,
        ExitStatus.PEERS_DISAGREE,
    }
)
"""Statuses that mean the same before and after ready."""


class FailureCause:
    """Collects what the executor's monitor says and what the loop ran into. Thread-safe."""

    def __init__(self, process: str) -> None:
        self._process = process
        self._is_serving = False
        self._observed: FailureReport | None = None
        self._has_observed = threading.Event()

    def set_serving(self) -> None:
        """From now on a failure is one while serving (6), no longer of the start (5)."""
        self._is_serving = True

    def observe(self, report: FailureReport) -> FailureReport:
        """Take what the executor saw; gives the report to tell, the first one if called again."""
        if self._observed is None:
            self._observed = self._with_status(report)
            self._has_observed.set()
        return self._observed

    def of(self, error: BaseException) -> FailureReport:
        """The report for an exception that ended the loop.

        What the executor saw is preferred. An error that looks like a peer's end, or that the
        core cannot explain by itself, waits a moment for it.
        """
        report = self._report_of(error)
        is_own = isinstance(error, VcliError) and weigh(report) is not Weight.CONSEQUENCE
        self._has_observed.wait(0 if is_own else _CAUSE_WAIT_S)
        return report if self._observed is None else self._observed

    def _report_of(self, error: BaseException) -> FailureReport:
        if isinstance(error, ReportedError):
            return self._with_status(error.report)
        status = error.exit_status if isinstance(error, VcliError) else ExitStatus.BUG
        if status is ExitStatus.DIED_SERVING and not self._is_serving:
            status = ExitStatus.START_FAILED
        return FailureReport(
            process=self._process,
            phase="serving" if self._is_serving else "start",
            kind=type(error).__name__,
            message=str(error) or repr(error),
            pid=os.getpid(),
            host=socket.gethostname(),
            # An error of ours says all there is to know; anything else needs its place.
            traceback=""
            if isinstance(error, VcliError)
            else "".join(traceback.format_exception(error)),
            hint=error.hint if isinstance(error, VcliError) else "",
            exit_status=int(status),
        )

    def _with_status(self, report: FailureReport) -> FailureReport:
        if report.exit_status in _KEPT_STATUSES:
            return report
        status = ExitStatus.DIED_SERVING if self._is_serving else ExitStatus.START_FAILED
        return msgspec.structs.replace(report, exit_status=int(status))
