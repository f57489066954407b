"""Failures of running processes, as data that crosses process borders and as exceptions."""

from collections.abc import Sequence
from typing import Any

import msgspec

from vcli.topology.errors import ExitStatus, VcliError


class FailureReport(msgspec.Struct, frozen=True, kw_only=True):
    """One failure with everything that is needed to name its cause far from where it happened.

    `process` is the title without prefix (`Worker_TP1`, `EngineCore`), `rank` the global rank or
    None for a process without one, `phase` the start-up state or the RPC method that ran.
    `exit_code` is negative for a signal, as `subprocess` has it; None while the process lives.
    `exit_status` is what `vcli` shall exit with, when this is the cause.
    """

    process: str
    phase: str
    kind: str
    message: str
    rank: int | None = None
    pid: int | None = None
    host: str = ""
    traceback: str = ""
    exit_code: int | None = None
    hint: str = ""
    exit_status: int = int(ExitStatus.DIED_SERVING)

    def describe(self) -> str:
        """One line: who, which pid, doing what, why."""
        who = self.process if self.rank is None else f"{self.process} (rank {self.rank})"
        if self.pid is not None:
            who += f" pid {self.pid}"
        if self.host:
            who += f" on {self.host}"
        kind = f"{self.kind}: " if self.kind else ""
        return f"{who} failed in {self.phase}: {kind}{self.message}"


class ReportedError(VcliError):
    """An exception that carries a `FailureReport`."""

    def __init__(self, report: FailureReport) -> None:
        super().__init__(report.describe(), hint=report.hint)
        self.report = report
        self.exit_status = ExitStatus(report.exit_status)


class StartupError(ReportedError):
    """A process failed, died or was missing before everything was ready (exit 5)."""


class WorkerError(ReportedError):
    """A worker's method raised while serving; the traceback is the remote one."""


class FailedWithOutput(VcliError):
    """Raised by a worker's method that fails and has something to hand on all the same.

    `output` reaches the aggregator of the call, if it has one; else this is a failure as any.
    """

    def __init__(self, message: str, output: Any) -> None:
        super().__init__(message)
        self.output = output


class WorkerDiedError(ReportedError):
    """A process died while serving (exit 6)."""


class EngineDeadError(ReportedError):
    """The engine can serve nothing any more; the report names the first cause."""


class RpcTimeoutError(VcliError):
    """A call's deadline passed; the message names the method and the ranks that did not answer.

    `ranks` are these; none where it is not known who is to blame.
    """

    exit_status = ExitStatus.DIED_SERVING

    def __init__(self, message: str, *, hint: str = "", ranks: Sequence[int] = ()) -> None:
        super().__init__(message, hint=hint)
        self.ranks = tuple(ranks)


class RequestError(VcliError):
    """One request is wrong; the engine is well. `parameter` names the field, for HTTP 400."""

    exit_status = ExitStatus.USAGE

    def __init__(self, message: str, *, parameter: str | None = None, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.parameter = parameter
