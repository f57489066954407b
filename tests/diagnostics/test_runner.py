"""The runner: deadlines, requirements, crashes, order, ^C."""

import threading
import time
from pathlib import Path

import pytest

from tests.support.fake_host import make_context
from vcli.diagnostics import (
    Check,
    CheckContext,
    CheckRegistry,
    Finding,
    Remedy,
    Status,
    check,
    failed,
    passed,
    run_checks,
    skipped,
    warned,
)
from vcli.diagnostics.errors import CannotMeasureError
from vcli.topology import UnfitError


def make(id_: str, run, *, requires: tuple[str, ...] = (), deadline_s: float = 5.0) -> Check:
    return check(
        id_, id_, why="w", expected="e", remedy=Remedy(bare_metal="do {it}", docker="run {it}"),
        requires=requires, deadline_s=deadline_s,
    )(run)  # fmt: skip


def always(finding: Finding):
    return lambda context: finding


def results_of(checks: list[Check], context: CheckContext, **more):
    outcome = run_checks(CheckRegistry(checks).checks, context, **more)
    return {result.id: result for result in outcome.results}


def test_a_crash_is_unknown_with_its_trace(tmp_path: Path) -> None:
    def crash(context: CheckContext) -> Finding:
        raise ZeroDivisionError("oops")

    results = results_of(
        [make("HOST-01", crash), make("HOST-02", always(passed("fine")))], make_context(tmp_path)
    )
    assert results["HOST-01"].status is Status.UNKNOWN
    assert "ZeroDivisionError: oops" in results["HOST-01"].measured
    assert "in crash" in results["HOST-01"].trace
    assert results["HOST-02"].status is Status.PASS


def test_a_hung_check_costs_its_deadline_and_hinders_nobody(tmp_path: Path) -> None:
    release = threading.Event()

    def hang(context: CheckContext) -> Finding:
        release.wait(60)
        return passed("late")

    begin = time.monotonic()
    results = results_of(
        [
            make("HOST-01", hang, deadline_s=0.2),
            make("HOST-02", always(passed("fine"))),
            make("HOST-03", always(passed("fine")), requires=("HOST-01",)),
        ],
        make_context(tmp_path),
    )
    release.set()
    assert time.monotonic() - begin < 5
    assert results["HOST-01"].status is Status.UNKNOWN
    assert "no answer within 0.2 s" in results["HOST-01"].measured
    assert results["HOST-02"].status is Status.PASS
    assert results["HOST-03"].status is Status.SKIP
    assert results["HOST-03"].measured == "needs HOST-01, which is unknown"


def test_more_hung_checks_than_threads_do_not_stop_the_rest(tmp_path: Path) -> None:
    release = threading.Event()

    def hang(context: CheckContext) -> Finding:
        release.wait(60)
        return passed("late")

    checks = [make(f"HOST-{index:02}", hang, deadline_s=0.1) for index in range(20)]
    results = results_of([*checks, make("NET-01", always(passed("x")))], make_context(tmp_path))
    release.set()
    assert results["NET-01"].status is Status.PASS
    assert results["HOST-19"].status is Status.UNKNOWN


def test_checks_run_side_by_side(tmp_path: Path) -> None:
    meeting = threading.Barrier(4, timeout=5)

    def meet(context: CheckContext) -> Finding:
        meeting.wait()
        return passed("met")

    results = results_of(
        [make(f"HOST-{index:02}", meet) for index in range(4)], make_context(tmp_path)
    )
    assert {result.status for result in results.values()} == {Status.PASS}


@pytest.mark.parametrize(
    ("finding", "status", "says"),
    [
        (failed("x", values={"it": 1}), Status.SKIP, "needs HOST-01, which failed"),
        (skipped("one node"), Status.SKIP, "one node"),
        (warned("x", values={"it": 1}), Status.PASS, "ran"),
        (passed("x"), Status.PASS, "ran"),
    ],
)
def test_a_check_runs_only_after_what_it_requires(
    tmp_path: Path, finding: Finding, status: Status, says: str
) -> None:
    results = results_of(
        [
            make("NET-01", always(passed("ran")), requires=("HOST-01",)),
            make("HOST-01", always(finding)),
        ],
        make_context(tmp_path),
    )
    assert results["NET-01"].status is status
    assert results["NET-01"].measured == says


def test_a_skipped_requirement_hinders_nobody(tmp_path: Path) -> None:
    results = results_of(
        [
            make("HOST-01", always(failed("x", values={"it": 1}))),
            make("NET-01", always(passed("ran")), requires=("HOST-01",)),
        ],
        make_context(tmp_path),
        skip_ids=["HOST-01"],
    )
    assert results["HOST-01"].status is Status.SKIP
    assert results["NET-01"].status is Status.PASS


def test_what_cannot_be_measured_is_unknown_without_a_trace(tmp_path: Path) -> None:
    def unreadable(context: CheckContext) -> Finding:
        raise CannotMeasureError("/sys/x cannot be read: Permission denied")

    result = results_of([make("HOST-01", unreadable)], make_context(tmp_path))["HOST-01"]
    assert (result.status, result.trace) == (Status.UNKNOWN, "")
    assert "Permission denied" in result.measured


def test_an_error_of_vcli_is_a_failure_with_its_hint(tmp_path: Path) -> None:
    def refuse(context: CheckContext) -> Finding:
        raise UnfitError("too small", hint="--shm-size")

    result = results_of([make("HOST-01", refuse)], make_context(tmp_path))["HOST-01"]
    assert (result.status, result.measured, result.remedy) == (
        Status.FAIL, "too small", "--shm-size",
    )  # fmt: skip


def test_an_interrupt_keeps_what_is_known(tmp_path: Path) -> None:
    def on_result(result) -> None:
        if result.id == "HOST-01":
            raise KeyboardInterrupt

    outcome = run_checks(
        CheckRegistry(
            [
                make("HOST-01", always(passed("known"))),
                make("HOST-02", always(passed("never")), requires=("HOST-01",)),
            ]
        ).checks,
        make_context(tmp_path),
        on_result=on_result,
    )
    assert outcome.is_interrupted
    first, second = outcome.results
    assert (first.status, first.measured) == (Status.PASS, "known")
    assert second.status is Status.UNKNOWN


def test_remedies_are_written_for_where_it_runs(tmp_path: Path) -> None:
    from vcli.diagnostics import Dialect

    bad = make("HOST-01", always(failed("x", values={"it": "this"})))
    texts = {
        dialect: results_of([bad], make_context(tmp_path, dialect=dialect))["HOST-01"].remedy
        for dialect in Dialect
    }
    assert texts == {
        Dialect.BARE_METAL: "do this",
        Dialect.DOCKER: "run this",
        Dialect.KUBERNETES: "run this",
        Dialect.SLURM: "do this",
    }
