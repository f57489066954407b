"""Runs checks side by side: after what they require, each until its deadline.

Each check has a thread of its own, of which at most `MAX_THREADS` count at a time. A thread that
does not answer is left behind: it is a daemon, its late answer is dropped, and its place is free.
"""

import queue
import threading
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from vcli.diagnostics.check import (
    Check,
    CheckResult,
    Finding,
    Status,
    failed,
    result_of,
    skipped,
    unknown,
)
from vcli.diagnostics.context import CheckContext
from vcli.diagnostics.errors import CannotMeasureError
from vcli.topology import VcliError

MAX_THREADS = 8

#: Verdicts after which a check that requires this one makes sense.
_FULFILLED = (Status.PASS, Status.WARN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a thread hands over."""

    check: Check
    finding: Finding
    seconds: float
    trace: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """Results in the order of the checks; `is_interrupted` if ^C ended the run before its end."""

    results: tuple[CheckResult, ...]
    is_interrupted: bool


def run_checks(
    checks: Sequence[Check],
    context: CheckContext,
    *,
    skip_ids: Collection[str] = (),
    on_result: Callable[[CheckResult], None] | None = None,
) -> RunOutcome:
    """One result for each of `checks`, which must hold all that they require.

    Blocks at most for the deadlines along the longest chain of requirements, given enough threads.
    The checks of `skip_ids` are not run, and hinder none that require them.
    """
    run = _Run(checks, context, skip_ids, on_result)
    try:
        run.finish()
    except KeyboardInterrupt:
        run.give_up("interrupted before it answered")
        return RunOutcome(results=run.ordered(), is_interrupted=True)
    return RunOutcome(results=run.ordered(), is_interrupted=False)


class _Run:
    def __init__(
        self,
        checks: Sequence[Check],
        context: CheckContext,
        skip_ids: Collection[str],
        on_result: Callable[[CheckResult], None] | None,
    ) -> None:
        self._checks = checks
        self._context = context
        self._skip_ids = frozenset(skip_ids)
        self._on_result = on_result
        self._answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        # The slow ones first, so that their waiting overlaps with the others.
        self._waiting = sorted(checks, key=lambda check: -check.deadline_s)
        self._ends: dict[str, float] = {}
        self._results: dict[str, CheckResult] = {}

    def finish(self) -> None:
        while len(self._results) < len(self._checks):
            self._start_ready()
            if self._ends:
                self._take_answer()
            self._drop_overdue()

    def give_up(self, reason: str) -> None:
        for check in self._checks:
            if check.id not in self._results:
                self._settle(check, unknown(reason))

    def ordered(self) -> tuple[CheckResult, ...]:
        return tuple(self._results[check.id] for check in self._checks)

    def _start_ready(self) -> None:
        for check in list(self._waiting):
            if check.id in self._skip_ids:
                self._waiting.remove(check)
                self._settle(check, skipped("left out by --skip"))
                continue
            if any(need not in self._results for need in check.requires):
                continue
            unmet = self._unmet(check)
            if unmet is not None:
                self._waiting.remove(check)
                self._settle(check, skipped(unmet))
            elif len(self._ends) < MAX_THREADS:
                self._waiting.remove(check)
                self._start(check)

    def _unmet(self, check: Check) -> str | None:
        """Why the check makes no sense, told by the first requirement that is not fulfilled."""
        for need in check.requires:
            result = self._results[need]
            if need in self._skip_ids or result.status in _FULFILLED:
                continue
            if result.status is Status.SKIP:
                return result.measured
            word = "failed" if result.status is Status.FAIL else "is unknown"
            return f"needs {need}, which {word}"
        return None

    def _start(self, check: Check) -> None:
        self._ends[check.id] = self._context.clock() + check.deadline_s
        thread = threading.Thread(
            target=_answer,
            args=(check, self._context, self._answers),
            name=f"check-{check.id}",
            daemon=True,
        )
        thread.start()

    def _take_answer(self) -> None:
        left_s = min(self._ends.values()) - self._context.clock()
        try:
            answer = self._answers.get(timeout=max(0.0, left_s))
        except queue.Empty:
            return
        if self._ends.pop(answer.check.id, None) is not None:
            self._settle(answer.check, answer.finding, answer.seconds, answer.trace)

    def _drop_overdue(self) -> None:
        now = self._context.clock()
        for check in self._checks:
            end = self._ends.get(check.id)
            if end is not None and end <= now:
                del self._ends[check.id]
                self._settle(
                    check, unknown(f"no answer within {check.deadline_s:g} s"), check.deadline_s
                )

    def _settle(
        self, check: Check, finding: Finding, seconds: float = 0.0, trace: str = ""
    ) -> None:
        settled = result_of(
            check, finding, dialect=self._context.dialect, seconds=seconds, trace=trace
        )
        self._results[check.id] = settled
        if self._on_result is not None:
            self._on_result(settled)


def _answer(check: Check, context: CheckContext, answers: "queue.SimpleQueue[Answer]") -> None:
    begin = context.clock()
    finding, trace = run_check(check, context)
    answers.put(Answer(check=check, finding=finding, seconds=context.clock() - begin, trace=trace))


def run_check(check: Check, context: CheckContext) -> tuple[Finding, str]:
    """The check's finding, whatever happens, and the trace of a crash."""
    try:
        return check.run(context), ""
    except CannotMeasureError as reason:
        return unknown(str(reason)), ""
    except VcliError as error:
        return failed(error.message, remedy=error.hint), ""
    except Exception as error:  # noqa: BLE001 - border: a check that crashes must not end the doctor
        text = f"the check itself crashed: {type(error).__name__}: {error}"
        return unknown(text), traceback.format_exc()
