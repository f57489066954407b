"""The cause is named, not who stumbled over it."""

import itertools

import msgspec
import pytest

from vcli.runtime.errors import FailureReport, StartupError
from vcli.runtime.process.failures import (
    ObservedFailure,
    Weight,
    describe_exit,
    first_cause,
    report_error,
    weigh,
)
from vcli.topology.errors import ConfigError, ExitStatus, UnfitError


def report(kind: str = "", message: str = "", exit_code: int | None = None) -> FailureReport:
    return FailureReport(
        process="Worker", phase="serving", kind=kind, message=message, exit_code=exit_code
    )


KILLED = report(message="killed by SIGKILL", exit_code=-9)
CRASHED = report(message="killed by SIGSEGV", exit_code=-11)
RAISED = report("ValueError", "tensor is missing")
EXITED = report(message="exited with status 3", exit_code=3)
ABORTED = report(message="killed by SIGABRT", exit_code=-6)
RESET = report("ConnectionResetError", "[Errno 104]")
GLOO = report("RuntimeError", "[../gloo/transport/tcp/pair.cc] Connection closed by peer [::1]:1")
NCCL = report("DistBackendError", "NCCL error: remote process exited or there was a network error")
ORPHANED = report(message="ended because its parent was gone", exit_code=129)


@pytest.mark.parametrize(
    ("failure", "weight"),
    [
        (KILLED, Weight.KILLED),
        (CRASHED, Weight.KILLED),
        (RAISED, Weight.EXPLAINED),
        (EXITED, Weight.UNEXPLAINED),
        (ABORTED, Weight.UNEXPLAINED),
        (RESET, Weight.CONSEQUENCE),
        (GLOO, Weight.CONSEQUENCE),
        (NCCL, Weight.CONSEQUENCE),
        (ORPHANED, Weight.CONSEQUENCE),
    ],
)
def test_failure_is_weighed_by_how_it_came(failure: FailureReport, weight: Weight) -> None:
    assert weigh(failure) is weight


def test_exit_code_after_an_exception_does_not_hide_the_exception() -> None:
    assert weigh(report("ValueError", "tensor is missing", exit_code=-9)) is Weight.EXPLAINED


@pytest.mark.parametrize("order", list(itertools.permutations([KILLED, RAISED, EXITED, GLOO])))
def test_kill_is_the_cause_in_whatever_order_failures_are_seen(
    order: tuple[FailureReport, ...],
) -> None:
    seen = [ObservedFailure(report=one, seen_s=float(i)) for i, one in enumerate(order)]
    assert first_cause(seen) is KILLED


def test_exception_outweighs_the_abort_of_a_follower_that_came_first() -> None:
    seen = [
        ObservedFailure(report=ABORTED, seen_s=1.0),
        ObservedFailure(report=RAISED, seen_s=1.1),
    ]
    assert first_cause(seen) is RAISED


def test_earliest_of_equals_is_the_cause() -> None:
    later = report("KeyError", "x")
    seen = [ObservedFailure(report=later, seen_s=2.0), ObservedFailure(report=RAISED, seen_s=1.0)]
    assert first_cause(seen) is RAISED


def test_exits_are_told_in_words() -> None:
    assert describe_exit(-9) == "killed by SIGKILL"
    assert describe_exit(-63) == "killed by signal 63"
    assert describe_exit(5) == "exited with status 5"
    assert describe_exit(143) == "ended by SIGTERM"


@pytest.mark.parametrize(
    ("error", "is_serving", "status"),
    [
        (ValueError("x"), False, ExitStatus.START_FAILED),
        (ValueError("x"), True, ExitStatus.DIED_SERVING),
        (ConfigError("x"), False, ExitStatus.USAGE),
        (UnfitError("x"), False, ExitStatus.UNFIT),
        (ConfigError("x"), True, ExitStatus.DIED_SERVING),
    ],
)
def test_status_says_whose_fault_it_is_only_before_ready(
    error: Exception, is_serving: bool, status: ExitStatus
) -> None:
    made = report_error(error, process="W", phase="weights", rank=1, is_serving=is_serving)
    assert made.exit_status == status


def test_report_inside_an_error_is_passed_on_as_it_is() -> None:
    error = StartupError(RAISED)
    assert report_error(error, process="W", phase="p", rank=1, is_serving=True) is RAISED


class NoText(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


@pytest.mark.parametrize(
    ("error", "kind", "part"),
    [
        (ValueError("half \ud800 of a pair"), "ValueError", "half \\ud800 of a pair"),
        (ValueError("x" * 3_000_000 + "end"), "ValueError", "x ... x"),
        (NoText(), "NoText", "RuntimeError in __str__"),
    ],
)
def test_any_error_becomes_a_report_that_can_be_sent(
    error: Exception, kind: str, part: str
) -> None:
    made = report_error(error, process="W", phase="p", rank=1, is_serving=False)
    assert made.kind == kind
    assert part in made.message
    assert len(msgspec.msgpack.encode(made)) < 1 << 18
