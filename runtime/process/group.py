"""Children that live and fail together: start all, wait for all, watch all, end all.

The monitor watches in a thread of its own; everybody else waits on its condition.

    start --> monitor: states, ready, failures --> wait_ready gives payloads or StartupError
                                               --> then on_failure, once, with the first cause
    shutdown: asked > lifelines closed > SIGKILL, until all are reaped
"""

import logging
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from vcli.runtime.errors import FailureReport, StartupError
from vcli.runtime.log import get_logger
from vcli.runtime.messages import ChildMessage
from vcli.runtime.process.child import ChildSpec
from vcli.runtime.process.held import HELD_AFTER_S, HELD_HINT, SLOW_HINT
from vcli.runtime.process.monitor import CAUSE_WINDOW_S, ChildMonitor
from vcli.runtime.process.starter import SpawnStarter, Starter
from vcli.runtime.process.watched import WatchedChild

logger = get_logger(__name__)

#: Part of the shutdown's time in which children that were asked may end by themselves.
_ASKED_UNTIL = 0.4

#: The first look at who is not ready, before the deadline: two tell what holds a process.
_FIRST_LOOK_S = HELD_AFTER_S + 0.5

#: A killed process leaves at once, unless the kernel holds it (a device that doesn't answer).
_KILL_WAIT_S = 2.0


class ChildGroup:
    """Starts children and answers for their life.

    `on_message` is called by the monitor with everything a child says and must not block.
    `on_failure` is called once, in a thread of its own, with the first cause of the first failure
    after all were ready; failures before that are raised by `wait_ready`.
    """

    def __init__(
        self,
        on_message: Callable[[ChildMessage], None],
        on_failure: Callable[[FailureReport], None],
    ) -> None:
        self._on_message = on_message
        self._on_failure = on_failure
        self._children: list[WatchedChild] = []
        self._monitor: ChildMonitor | None = None
        self._shutdown_lock = threading.Lock()
        self._is_closed = False

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids in the order of the specs."""
        return tuple(watched.child.pid for watched in self._children)

    @property
    def exit_codes(self) -> tuple[int | None, ...]:
        """Exit codes in the order of the specs; None for those that run."""
        return tuple(watched.exit_code for watched in self._children)

    @property
    def failure(self) -> FailureReport | None:
        """The cause of the group's failure, once it is known."""
        return self._monitor.cause if self._monitor is not None else None

    def start(
        self,
        specs: Sequence[ChildSpec],
        *,
        starter: Starter | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Start all children, by `starter` or else by spawn, wait for none; may be called once.

        A starter that has to be waited for gets `timeout_s` for all of them.

        Raises:
            UnfitError: the system gives no more processes; those that were started are ended.
            StartupError: the starter did not answer in time; likewise.
        """
        if self._monitor is not None:
            raise RuntimeError("a ChildGroup is started once")
        starter = starter or SpawnStarter()
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        self._monitor = ChildMonitor(self._children, self._on_message, self._on_failure)
        try:
            for spec in specs:
                self._children.append(WatchedChild(starter.start(spec, end_s=end_s)))
        except BaseException:
            self._monitor.start()
            self.shutdown(1.0, asked=False)
            raise
        self._monitor.start()

    def wait_ready(
        self, deadline_s: float, *, left_s: float | None = None, patience_s: float = 0.0
    ) -> list[Any]:
        """Wait until every child is ready; gives their payloads in the order of the specs.

        `left_s` is what is left of `deadline_s`. Children that wait for others with the same
        deadline get `patience_s` more, to tell who is missing there, unless they can't run.

        Raises:
            StartupError: the first cause of a failure; or after the deadline, naming who is
                missing, in which state, and what keeps it from running.
        """
        monitor = self._started_monitor()
        end_s = time.monotonic() + (deadline_s if left_s is None else left_s)
        with monitor.changed:
            while monitor.cause is None:
                missing = [watched for watched in self._children if not watched.is_ready]
                if not missing and not monitor.observed:
                    monitor.is_serving = True
                    return [watched.payload for watched in self._children]
                if monitor.is_ending:
                    raise StartupError(self._ended_report())
                left_s = end_s - time.monotonic()
                if left_s <= _FIRST_LOOK_S:
                    holds = [(watched, watched.hold_watch.look().text) for watched in missing]
                    is_late = left_s <= (0 if any(hold for _, hold in holds) else -patience_s)
                    if is_late and not monitor.observed:
                        raise StartupError(self._missing_report(holds, deadline_s))
                next_s = left_s - _FIRST_LOOK_S if left_s > _FIRST_LOOK_S else left_s
                monitor.changed.wait(max(next_s, CAUSE_WINDOW_S))
            raise StartupError(monitor.cause)

    def expect_end(self) -> None:
        """From now on a child that ends does so as it was told; nothing is a failure any more."""
        monitor = self._started_monitor()
        with monitor.changed:
            monitor.is_ending = True
            monitor.changed.notify_all()

    def shutdown(self, grace_s: float, *, asked: bool = True) -> None:
        """End all children within `grace_s`; safe to call again and from any thread.

        With `asked` the caller has told them to end, and they get part of the time for that. Must
        not be called in `on_message`, which the monitor itself runs.
        """
        monitor = self._monitor
        if monitor is None:
            return
        if monitor.is_own_thread:
            raise RuntimeError("shutdown called in on_message")
        with self._shutdown_lock:
            if self._is_closed:
                return
            self._is_closed = True
            with monitor.changed:
                monitor.is_ending = True
                monitor.changed.notify_all()
            self._end_children(monitor, grace_s, asked=asked)
            monitor.stop()
            for watched in self._children:
                watched.child.close()

    def _end_children(self, monitor: ChildMonitor, grace_s: float, *, asked: bool) -> None:
        """Go down the ladder until all have ended.

        SIGTERM is no step of it: a child leaves that to its parent, which is this process.
        """
        begin_s = time.monotonic()
        if asked and _wait_ended(monitor, begin_s + grace_s * _ASKED_UNTIL, "being asked"):
            return
        for watched in self._children:
            watched.child.close_lifeline()
        if _wait_ended(monitor, begin_s + grace_s, "their lifeline closed"):
            return
        _kill_running(monitor, logging.WARNING if grace_s > 0 else logging.INFO)
        if not _wait_ended(monitor, time.monotonic() + _KILL_WAIT_S, "SIGKILL"):
            names = ", ".join(watched.name for watched in monitor.running())
            logger.warning("SIGKILL did not end, the kernel holds them: %s", names)

    def _started_monitor(self) -> ChildMonitor:
        if self._monitor is None:
            raise RuntimeError("the ChildGroup was not started")
        return self._monitor

    def _missing_report(
        self, holds: list[tuple[WatchedChild, str]], deadline_s: float
    ) -> FailureReport:
        states = "; ".join(watched.describe_state(hold) for watched, hold in holds)
        # Who can't run keeps the others waiting, in a collective or for its answer.
        blamed, held = next((pair for pair in holds if pair[1]), holds[0])
        return msgspec.structs.replace(
            blamed.failed_with(
                "StartTimeout",
                f"{len(holds)} of {len(self._children)} processes not ready after "
                f"{deadline_s:g} s: {states}",
                is_serving=False,
            ),
            hint=HELD_HINT if held else SLOW_HINT,
        )

    def _ended_report(self) -> FailureReport:
        return self._children[0].failed_with(
            "Shutdown", "the start was ended before all were ready", is_serving=False
        )


def _kill_running(monitor: ChildMonitor, level: int) -> None:
    with monitor.changed:
        for watched in monitor.running():
            logger.log(level, "SIGKILL sent to %s", watched.name)
            watched.child.send_signal(signal.SIGKILL)


def _wait_ended(monitor: ChildMonitor, end_s: float, step: str) -> bool:
    with monitor.changed:
        while running := monitor.running():
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                names = ", ".join(watched.name for watched in running)
                logger.info("still running after %s: %s", step, names)
                return False
            monitor.changed.wait(left_s)
        return True
