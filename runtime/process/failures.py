"""Failures of processes as reports, and which of several is the cause of the others.

When one process falls, its peers fall over it. The group collects reports for a moment and asks
here; the judgement is made of pure functions.
"""

import os
import signal
import socket
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import msgspec

from vcli.runtime.errors import FailureReport, ReportedError
from vcli.runtime.process.lifeline import PARENT_GONE_EXIT_CODE
from vcli.topology.errors import ExitStatus, VcliError

#: Exit code of a process that has ended, nobody knows how: no status of a process is that large.
LOST_EXIT_CODE = 256

#: Most of a message or traceback that a process reports.
_SENT_CHARS = 64 << 10

#: Most of a message where it has to fit a line.
_LINE_CHARS = 240

#: Exception types that tell of another process' end (PyTorch's Dist... wrap NCCL and the store).
_CONSEQUENCE_KINDS = frozenset(
    {
        "BrokenPipeError",
        "ConnectionAbortedError",
        "ConnectionRefusedError",
        "ConnectionResetError",
        "DistBackendError",
        "DistNetworkError",
        "DistStoreError",
        "EOFError",
        "PeerDiedError",
        "QueueCancelled",
    }
)

#: Parts of messages that tell of another process' end, in lower case.
_CONSEQUENCE_WORDS = (
    "broken pipe",
    "closed by peer",
    "closed by remote peer",
    "connection refused",
    "connection reset",
    "gloo",
    "nccl",
    "remote process exited",
    "socket closed",
    "timed out waiting for clients",
)

#: Signals that end a process over a failure elsewhere as easily as over one of its own: NCCL's
#: watchdog aborts the followers, an init system terminates everybody.
_AMBIGUOUS_SIGNALS = frozenset({signal.SIGABRT, signal.SIGTERM, signal.SIGALRM})

_SIGNAL_HINTS = {
    signal.SIGKILL: "often the kernel's out-of-memory killer: look for the pid in `dmesg`, "
    "or somebody's kill -9",
    signal.SIGBUS: "often memory that could not be provided: a full /dev/shm or a cgroup limit",
    signal.SIGSEGV: "a crash in native code; the stack is in the process' log",
}

#: Exit statuses that an error keeps when it ends a start; others become START_FAILED.
_KEPT_STATUSES = frozenset(
    {
        ExitStatus.UNFIT,
        ExitStatus.USAGE,
        ExitStatus.PEERS_MISSING,
        ExitStatus.PEERS_DISAGREE,
    }
)


class Weight(IntEnum):
    """How likely a failure is the cause of the others; the lowest wins."""

    KILLED = 0
    EXPLAINED = 1
    UNEXPLAINED = 2
    CONSEQUENCE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedFailure:
    """A failure and when it was seen, on the monotonic clock."""

    report: FailureReport
    seen_s: float


def report_error(
    error: BaseException, *, process: str, phase: str, rank: int | None, is_serving: bool
) -> FailureReport:
    """`error`, raised in this process, as a report; a report that it carries is passed on as is.

    Before ready the exit status is the error's own, where that says what the user can mend.
    """
    if isinstance(error, ReportedError):
        return error.report
    exit_status = ExitStatus.DIED_SERVING if is_serving else ExitStatus.START_FAILED
    hint = ""
    if isinstance(error, VcliError):
        hint = error.hint
        if not is_serving and error.exit_status in _KEPT_STATUSES:
            exit_status = error.exit_status
    return FailureReport(
        process=process,
        phase=phase,
        kind=type(error).__name__,
        message=_sendable(_text(error)),
        rank=rank,
        pid=os.getpid(),
        host=socket.gethostname(),
        traceback=_sendable("".join(traceback.format_exception(error))),
        hint=hint,
        exit_status=int(exit_status),
    )


def _text(error: BaseException) -> str:
    try:
        return str(error).strip() or repr(error)
    except Exception as second:  # noqa: BLE001 - border: an exception of foreign code
        return f"its text can't be had: {type(second).__name__} in __str__ or __repr__"


def _sendable(text: str) -> str:
    """`text` as a control socket takes it: cut in the middle, without halves of surrogate pairs."""
    if len(text) > _SENT_CHARS:
        text = f"{text[: _SENT_CHARS // 2]} ... {text[-_SENT_CHARS // 2 :]}"
    return text.encode(errors="backslashreplace").decode()


def one_line(error: BaseException) -> str:
    """Type and message of an error in one line, however many it has; the end is cut off."""
    text = " ".join(str(error).split())
    cut = text if len(text) <= _LINE_CHARS else f"{text[:_LINE_CHARS]} ..."
    return f"{type(error).__name__}: {cut}" if cut else repr(error)


def with_status(report: FailureReport, status: ExitStatus) -> FailureReport:
    """`report` with this exit status, unless its own says what the user can mend."""
    if report.exit_status in _KEPT_STATUSES:
        return report
    return msgspec.structs.replace(report, exit_status=int(status))


def weigh(report: FailureReport) -> Weight:
    """Whether `report` looks like a cause or like a consequence of another failure."""
    is_death = not report.kind
    if is_death and report.exit_code is not None:
        if report.exit_code < 0 and -report.exit_code not in _AMBIGUOUS_SIGNALS:
            return Weight.KILLED
        if report.exit_code == PARENT_GONE_EXIT_CODE:
            return Weight.CONSEQUENCE
        return Weight.UNEXPLAINED
    message = report.message.lower()
    if report.kind in _CONSEQUENCE_KINDS or any(word in message for word in _CONSEQUENCE_WORDS):
        return Weight.CONSEQUENCE
    return Weight.EXPLAINED


def first_cause(observed: Sequence[ObservedFailure]) -> FailureReport:
    """The most likely cause among `observed`: the best weight, and of equals the earliest."""
    return min(observed, key=lambda failure: (weigh(failure.report), failure.seen_s)).report


def describe_exit(exit_code: int) -> str:
    """What the exit code of a process says, in words; negative codes are signals."""
    if exit_code < 0:
        return f"killed by {_signal_name(-exit_code)}"
    if exit_code == PARENT_GONE_EXIT_CODE:
        return "ended because its parent was gone"
    if exit_code == 128 + signal.SIGTERM:
        return "ended by SIGTERM"
    if exit_code == LOST_EXIT_CODE:
        return "ended; its exit status was lost with the fork server"
    return f"exited with status {exit_code}"


def exit_hint(exit_code: int) -> str:
    """Where to look after such an exit; empty when the code alone says nothing."""
    return {-int(number): hint for number, hint in _SIGNAL_HINTS.items()}.get(exit_code, "")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
