"""Which of several failures an engine core tells, and with which exit status."""

import threading

import pytest

from vcli.runtime.core.failure_cause import FailureCause
from vcli.runtime.errors import FailureReport, RpcTimeoutError, WorkerError
from vcli.topology.errors import ConfigError, ExitStatus, UnfitError


def report(kind: str, message: str = "x", **fields) -> FailureReport:
    return FailureReport(process="Worker_TP1", phase="p", kind=kind, message=message, **fields)


def test_what_the_executor_saw_first_is_told_for_every_later_error() -> None:
    cause = FailureCause("EngineCore")
    cause.set_serving()
    killed = report("", "killed by SIGKILL", exit_code=-9)

    assert cause.observe(killed) == killed
    assert cause.observe(report("ValueError")) == killed
    assert cause.of(KeyError("a")) == killed


def test_error_that_looks_like_a_consequence_waits_for_its_cause() -> None:
    cause = FailureCause("EngineCore")
    cause.set_serving()
    killed = report("", "killed by SIGKILL", exit_code=-9)
    consequence = WorkerError(report("RuntimeError", "gloo: connection closed by peer"))
    timer = threading.Timer(0.05, cause.observe, [killed])
    timer.start()

    assert cause.of(consequence) == killed
    timer.join()


def test_consequence_is_told_when_nothing_else_is_known() -> None:
    cause = FailureCause("EngineCore")
    cause.set_serving()
    consequence = report("RuntimeError", "connection reset")

    assert cause.of(WorkerError(consequence)) == consequence


@pytest.mark.parametrize(
    ("error", "before_ready", "serving"),
    [
        (ConfigError("a"), ExitStatus.USAGE, ExitStatus.USAGE),
        (UnfitError("a"), ExitStatus.UNFIT, ExitStatus.UNFIT),
        (RpcTimeoutError("a"), ExitStatus.START_FAILED, ExitStatus.DIED_SERVING),
        (WorkerError(report("E")), ExitStatus.START_FAILED, ExitStatus.DIED_SERVING),
        (
            WorkerError(report("E", exit_status=int(ExitStatus.USAGE))),
            ExitStatus.USAGE,
            ExitStatus.USAGE,
        ),
        (KeyError("a"), ExitStatus.BUG, ExitStatus.BUG),
    ],
)
def test_exit_status_depends_on_whether_the_core_was_ready(
    error: Exception, before_ready: ExitStatus, serving: ExitStatus
) -> None:
    cause = FailureCause("EngineCore")
    assert cause.of(error).exit_status == before_ready

    cause.set_serving()
    assert cause.of(error).exit_status == serving


def test_own_error_keeps_its_hint_and_needs_no_traceback() -> None:
    cause = FailureCause("EngineCore")
    try:
        raise ConfigError("too small", hint="--max-model-len 8")
    except ConfigError as error:
        told = cause.of(error)

    assert (told.process, told.kind, told.message) == ("EngineCore", "ConfigError", "too small")
    assert told.hint == "--max-model-len 8"
    assert told.traceback == ""


def test_foreign_error_keeps_the_place_where_it_was_raised() -> None:
    cause = FailureCause("EngineCore")
    try:
        raise ZeroDivisionError("a bug")
    except ZeroDivisionError as error:
        told = cause.of(error)

    assert told.kind == "ZeroDivisionError"
    assert "test_foreign_error" in told.traceback
