"""Calls in flight: ids, one deadline each, failures at once, replies of old calls dropped.

    submit --> record in the ring ... deliver(reply) by the receiver of each rank --> future
                                      clerk thread: deadlines
                                      fail(report): a rank is gone

Every rank may report the failure of a call, whoever was to reply. A failure that looks like the
consequence of another process' end is held back a moment for the cause to show up.
"""

import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from vcli.runtime.errors import (
    FailureReport,
    ReportedError,
    RpcTimeoutError,
    WorkerDiedError,
    WorkerError,
)
from vcli.runtime.executor.base import HEALTH_METHOD, Aggregate
from vcli.runtime.executor.pending_call import PendingCall
from vcli.runtime.log import get_logger
from vcli.runtime.process.failures import Weight, weigh
from vcli.runtime.process.held import STOPPED_HINT
from vcli.runtime.worker.call_messages import STEP_METHODS, RankActivity
from vcli.topology.errors import VcliError

logger = get_logger(__name__)

#: Longer than the process monitor takes to name the cause of a failure.
_CAUSE_WAIT_S = 0.3
#: Longer than anybody waits, and short enough for the waits of the operating system.
_LONGEST_S = 30 * 86400.0
#: Between two looks at the processes of ranks that owe an answer; two in a row count.
_LOOK_EVERY_S = 1.0
_WAITING_HINT = "a rank in a collective waits for another one: look at what all ranks do"
#: A clerk that wakes so much too late was stopped itself, with its process or the whole host.
_LATE_S = 3.0


class RpcClient:
    """Books calls and settles their futures. Thread-safe.

    `titles` are the processes by rank; `activity(rank)` says what a rank does now.
    `on_step_failure` gets the failure of a step before the step's future is settled. A step that
    takes longer than `stall_s` is told in the log, with what `diagnose` knows of its cause.
    `stopped` gives the ranks whose process is stopped, each with a sentence: they are named while
    a step waits for them, and are to blame if it waits in vain.
    """

    def __init__(
        self,
        titles: Sequence[str],
        *,
        activity: Callable[[int], RankActivity | None],
        on_step_failure: Callable[[FailureReport], None],
        stall_s: float = math.inf,
        diagnose: Callable[[], str] = lambda: "",
        stopped: Callable[[], Mapping[int, str]] = lambda: {},
    ) -> None:
        self._titles = titles
        self._activity = activity
        self._on_step_failure = on_step_failure
        self._stall_s = stall_s
        self._diagnose = diagnose
        self._find_stopped = stopped
        self._seen_stopped: Mapping[int, str] = {}
        self._told_stopped: set[int] = set()
        self._changed = threading.Condition()
        self._pending: dict[int, PendingCall] = {}
        self.cause_wait_s = _CAUSE_WAIT_S
        self._next_id = 0
        self._stuck: PendingCall | None = None  # the step that was told last
        self._failure: ReportedError | None = None
        self._clerk_wakes_s = math.inf
        self._clerk = threading.Thread(target=self._watch_deadlines, name="rpc-clerk", daemon=True)
        self._is_closed = False

    def start(self) -> None:
        """Keep deadlines from now on."""
        self._clerk.start()

    def book(
        self,
        method: str,
        *,
        timeout_s: float,
        reply_rank: int | None,
        aggregate: Aggregate | None = None,
    ) -> PendingCall:
        """A new call with its id, to be sent; its time runs from here.

        Raises:
            WorkerError, WorkerDiedError: what ended the executor before.
        """
        ranks = range(len(self._titles)) if reply_rank is None else (reply_rank,)
        with self._changed:
            if self._failure is not None:
                raise type(self._failure)(self._failure.report)
            self._next_id += 1
            call = self._new_call(self._next_id, method, frozenset(ranks), reply_rank, timeout_s)
            call.aggregate = aggregate
            return call

    @property
    def has_pending(self) -> bool:
        """Whether a call waits for replies."""
        return bool(self._pending)

    def note_sent(self, call: PendingCall) -> None:
        """Watch the deadline of a call that is on its way."""
        with self._changed:
            call.is_sent = True
            if call.method in STEP_METHODS:
                now_s = time.monotonic()
                call.stalls_at_s = now_s + self._stall_s
                call.looks_at_s = now_s + _LOOK_EVERY_S
            self._wake_clerk(call.due_s)

    def deliver(self, rank: int, call_id: int, result: Any) -> None:
        """Note a rank's result; a call that is settled already ignores it."""
        with self._changed:
            call = self._pending.get(call_id)
            if call is None or rank not in call.expected:
                return
            call.results[rank] = result
            if call.missing:
                return
            del self._pending[call_id]
        call.settle()

    def deliver_output_of_failed(
        self, rank: int, call_id: int, report: FailureReport, output: Any
    ) -> None:
        """Note a rank that failed and handed `output` on: a reply, if somebody aggregates them."""
        with self._changed:
            call = self._pending.get(call_id)
            if call is not None and call.aggregate is not None:
                call.failures[rank] = report
        if call is not None and call.aggregate is not None:
            self.deliver(rank, call_id, output)
        else:
            self.deliver_failure(call_id, report)

    def deliver_failure(self, call_id: int, report: FailureReport) -> None:
        """Note that a rank, any rank, failed in this call; also when others have completed it."""
        with self._changed:
            call = self._pending.get(call_id)
            if call is None:
                if report.phase not in STEP_METHODS or self._failure is not None:
                    return
                call = self._new_call(call_id, report.phase, frozenset(), None, 0.0)
            if weigh(report) is Weight.CONSEQUENCE or self._follows_suspect(call):
                if call.suspect is None:
                    call.suspect = report
                    call.suspect_until_s = time.monotonic() + self.cause_wait_s
                    self._wake_clerk(call.suspect_until_s)
                return
        self._settle_failed(call, WorkerError(report))

    def abandon(self, call: PendingCall, error: VcliError) -> None:
        """Settle a call that could not be sent in time."""
        self._settle_failed(call, error)

    def fail(self, error: ReportedError) -> None:
        """Settle everything with `error`, and refuse calls from now on; the first one counts."""
        with self._changed:
            if self._failure is None:
                self._failure = error
            calls = list(self._pending.values())
            self._pending.clear()
            self._changed.notify_all()
        for call in calls:
            call.future.set_exception(type(error)(error.report))

    def close(self) -> None:
        """End the clerk; `fail` comes before it."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._clerk.ident is not None:
            self._clerk.join()

    # ---- settling ---------------------------------------------------------------------------

    def _follows_suspect(self, call: PendingCall) -> bool:
        """Whether a step before this one failed, perhaps: then this one fails over that."""
        return call.method in STEP_METHODS and any(
            earlier.suspect is not None and earlier.method in STEP_METHODS
            for earlier in self._pending.values()
            if earlier.call_id < call.call_id
        )

    def _new_call(
        self,
        call_id: int,
        method: str,
        expected: frozenset[int],
        reply_rank: int | None,
        timeout_s: float,
    ) -> PendingCall:
        call = PendingCall(
            call_id=call_id,
            method=method,
            expected=expected,
            reply_rank=reply_rank,
            timeout_s=timeout_s,
            deadline_s=time.monotonic() + min(timeout_s, _LONGEST_S),
        )
        # Workers can't take a call back, so its future can't be cancelled.
        call.future.set_running_or_notify_cancel()
        self._pending[call_id] = call
        return call

    def _settle_failed(self, call: PendingCall, error: VcliError) -> None:
        with self._changed:
            if self._pending.get(call.call_id) is not call:
                return
            if call.method not in STEP_METHODS:
                del self._pending[call.call_id]
        if call.method not in STEP_METHODS:
            call.future.set_exception(error)
            return
        if isinstance(error, ReportedError):
            self._on_step_failure(error.report)
            self.fail(error)
            return
        report = self._timeout_report(call, error)
        self._on_step_failure(report)
        with self._changed:
            is_mine = self._pending.pop(call.call_id, None) is call
        if is_mine:
            call.future.set_exception(error)
        self.fail(WorkerDiedError(report))

    def _timeout_error(self, call: PendingCall) -> RpcTimeoutError:
        # First: it may bring news of what ranks do. A probe does not wait for that.
        cause = "" if call.method == HEALTH_METHOD else self._diagnose()
        stopped = "; ".join(self._find_stopped().values())
        missing = self._describe(call.missing)
        others = {*range(len(self._titles))} - {*call.missing}
        busy = self._describe(rank for rank in sorted(others) if self._activity(rank))
        return RpcTimeoutError(
            f"{call.method}: no answer within {call.timeout_s:g} s from {missing}"
            + (f"; meanwhile {busy}" if busy else "")
            + (f"; {cause}" if cause else "")
            + (f"; {stopped}" if stopped else ""),
            hint=STOPPED_HINT if stopped else _WAITING_HINT,
            ranks=call.missing,
        )

    def _stall_text(self, call: PendingCall) -> str:
        known = filter(None, [self._diagnose(), *self._find_stopped().values()])
        cause = "; ".join(known) or "no rank says what it waits for"
        ranks = self._describe(range(len(self._titles)))
        return f"{call.method} runs for over {self._stall_s:g} s: {cause}; {ranks}"

    def _timeout_report(self, call: PendingCall, error: VcliError) -> FailureReport:
        # Others only wait for one that is stopped.
        rank = min(self._find_stopped() or call.missing or call.expected)
        return FailureReport(
            process=self._titles[rank],
            phase=call.method,
            kind=type(error).__name__,
            message=error.message,
            rank=rank,
            hint=error.hint,
        )

    def _describe(self, ranks: Iterable[int]) -> str:
        found = ((rank, self._activity(rank)) for rank in ranks)
        return "; ".join(
            f"rank {rank} ({self._titles[rank]}{f', {doing.describe()}' if doing else ''})"
            for rank, doing in found
        )

    # ---- clerk ------------------------------------------------------------------------------

    def _wake_clerk(self, due_s: float) -> None:
        # Steps have far and growing deadlines, so the hot path finds the clerk asleep for long
        # enough and does not wake it.
        if due_s < self._clerk_wakes_s:
            self._changed.notify_all()

    def _watch_deadlines(self) -> None:
        busy_until_s = -math.inf
        while True:
            with self._changed:
                if self._is_closed:
                    return
                now_s = time.monotonic()
                nearest_s = min((c.due_s for c in self._pending.values()), default=math.inf)
                self._put_off(now_s - max(nearest_s, busy_until_s))
                due = [call for call in self._pending.values() if call.due_s <= now_s]
                if not due:
                    nearest_s = min((c.due_s for c in self._pending.values()), default=math.inf)
                    self._clerk_wakes_s = nearest_s
                    self._changed.wait(None if nearest_s == math.inf else nearest_s - now_s)
                    continue
            for call in due:
                if not call.future.done():
                    self._attend(call, now_s)
            busy_until_s = time.monotonic()

    def _put_off(self, late_s: float) -> None:
        """Nobody is to blame for what did not come while this process was stopped itself."""
        if late_s <= _LATE_S:
            return
        logger.warning(
            "this process did not run for %.0f s (it or its host was stopped): the deadlines of "
            "%d calls are put off",
            late_s,
            len(self._pending),
        )
        for call in self._pending.values():
            call.put_off(late_s)

    def _attend(self, call: PendingCall, now_s: float) -> None:
        """Do what is due for a call that has no result yet."""
        if call.suspect is not None:
            self._settle_failed(call, WorkerError(call.suspect))
        elif call.deadline_s <= now_s:
            self._settle_failed(call, self._timeout_error(call))
        elif call.looks_at_s <= now_s:
            call.looks_at_s = now_s + _LOOK_EVERY_S
            self._look(call)
        elif self._stuck is not None and not self._stuck.future.done():
            call.stalls_at_s = now_s + self._stall_s  # behind it: the same stall
        else:
            self._stuck, call.stalls_at_s = call, math.inf
            logger.error("%s", self._stall_text(call))

    def _look(self, call: PendingCall) -> None:
        """Name who is stopped; once, until it runs again. A debugger stops one for a moment."""
        before, self._seen_stopped = self._seen_stopped, self._find_stopped()
        self._told_stopped &= self._seen_stopped.keys()
        for rank in self._seen_stopped.keys() & before.keys() - self._told_stopped:
            self._told_stopped.add(rank)
            logger.error("%s waits: %s", call.method, self._seen_stopped[rank])
