"""Watches the children of a group from their start to their end, in one thread.

It polls all pidfds and control sockets at once; it alone reads, reaps and judges. What it learns
stands in the `WatchedChild`ren and here, under `changed`, which is notified of every change.
"""

import errno
import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from vcli.runtime.errors import FailureReport
from vcli.runtime.log import get_logger
from vcli.runtime.messages import ChildMessage
from vcli.runtime.process.control import ControlProtocolError
from vcli.runtime.process.failures import (
    ObservedFailure,
    Weight,
    describe_exit,
    first_cause,
    weigh,
)
from vcli.runtime.process.watched import WatchedChild
from vcli.topology.errors import ExitStatus, UnfitError

logger = get_logger(__name__)

#: After the first sign of a failure: time in which its cause may still show up on another child.
CAUSE_WINDOW_S = 0.2

#: A child whose control socket is closed is expected to be gone within this.
_CLOSED_CONTROL_S = 1.0


def _wake_descriptor() -> int:
    """Who writes to it wakes the monitor.

    Raises:
        UnfitError: this process may open no more files.
    """
    try:
        return os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        raise UnfitError(
            "cannot watch the child processes: this process may open no more files",
            hint="raise the limit of open files first: ulimit -n 4096",
        ) from error


class ChildMonitor:
    """The thread that watches `children`.

    Those who read its state hold `changed`. `is_serving` and `is_ending` are set by the group:
    whether a failure is one while serving, and whether the children are meant to end.
    """

    def __init__(
        self,
        children: Sequence[WatchedChild],
        on_message: Callable[[ChildMessage], None],
        on_failure: Callable[[FailureReport], None],
    ) -> None:
        self.changed = threading.Condition()
        self.observed: list[ObservedFailure] = []
        self.cause: FailureReport | None = None
        self.is_serving = False
        self.is_ending = False
        self._children = children
        self._on_message = on_message
        self._on_failure = on_failure
        self._window_end_s: float | None = None
        self._is_stopped = False
        self._wake_fd = _wake_descriptor()
        self._thread = threading.Thread(target=self._watch, name="child-monitor", daemon=True)

    @property
    def is_own_thread(self) -> bool:
        """Whether the caller is the monitor itself, in a callback."""
        return threading.current_thread() is self._thread

    def start(self) -> None:
        """Watch from now on; all children are started."""
        self._thread.start()

    def stop(self) -> None:
        """Watch no longer; returns when the thread has ended."""
        with self.changed:
            self._is_stopped = True
        os.eventfd_write(self._wake_fd, 1)
        self._thread.join()
        os.close(self._wake_fd)

    def running(self) -> list[WatchedChild]:
        """Children that were not seen to end."""
        return [watched for watched in self._children if watched.exit_code is None]

    def _watch(self) -> None:
        poller = select.poll()
        poller.register(self._wake_fd, select.POLLIN)
        by_fd: dict[int, WatchedChild] = {}
        for watched in self._children:
            for descriptor in (watched.child.pidfd, watched.child.control.fileno()):
                poller.register(descriptor, select.POLLIN)
                by_fd[descriptor] = watched
        while not self._is_stopped:
            messages: list[ChildMessage] = []
            ready = poller.poll(self._poll_timeout_ms())
            with self.changed:
                for descriptor, _ in ready:
                    if descriptor not in by_fd:
                        continue
                    watched = by_fd[descriptor]
                    if watched.control_closed_s is None:
                        messages += self._read(watched)
                    if descriptor == watched.child.pidfd:
                        self._reap(watched)
                        poller.unregister(descriptor)
                    if watched.control_closed_s is not None:
                        self._forget_control(poller, by_fd, watched)
                self._judge()
                self.changed.notify_all()
            for message in messages:
                self._pass_on(message)

    def _pass_on(self, message: ChildMessage) -> None:
        try:
            self._on_message(message)
        except Exception:  # border: a foreign callback, and who watches must live on
            logger.exception("callback failed message=%s", message)

    @staticmethod
    def _forget_control(
        poller: "select.poll", by_fd: dict[int, WatchedChild], watched: WatchedChild
    ) -> None:
        descriptor = watched.child.control.fileno()
        if by_fd.pop(descriptor, None) is not None:
            poller.unregister(descriptor)

    def _poll_timeout_ms(self) -> float | None:
        """Until the next moment at which something is to be judged without an event."""
        ends_s = [
            watched.control_closed_s + _CLOSED_CONTROL_S
            for watched in self.running()
            if watched.control_closed_s is not None and watched.report is None
        ]
        if self._window_end_s is not None and self.cause is None:
            ends_s.append(self._window_end_s)
        if not ends_s:
            return None
        return max(0.0, min(ends_s) - time.monotonic()) * 1000 + 1

    def _read(self, watched: WatchedChild) -> list[ChildMessage]:
        try:
            messages = watched.reader.read()
        except ControlProtocolError as error:
            watched.control_closed_s = time.monotonic()
            self._observe(
                watched.failed_with(type(error).__name__, str(error), is_serving=self.is_serving)
            )
            return []
        if watched.reader.is_closed:
            watched.control_closed_s = time.monotonic()
        for message in messages:
            report = watched.take(message)
            if report is not None:
                self._observe(report)
        return messages

    def _reap(self, watched: WatchedChild) -> None:
        exit_code = watched.child.poll()
        if exit_code is None:
            raise RuntimeError(f"{watched.name} has ended but can't be reaped")
        was_reported = watched.report is not None
        report = watched.ended(exit_code, is_serving=self.is_serving)
        status = describe_exit(exit_code)
        if self.is_ending or self.cause is not None:
            logger.info("ended process=%s status=%s", watched.name, status)
        else:
            logger.info(
                "ended unexpectedly process=%s phase=%s status=%s",
                watched.name,
                watched.phase,
                status,
            )
        if not was_reported:
            self._observe(report)
            return
        self.observed = [
            replace(seen, report=msgspec.structs.replace(seen.report, exit_code=exit_code))
            if seen.report.pid == watched.child.pid
            else seen
            for seen in self.observed
        ]

    def _observe(self, report: FailureReport) -> None:
        if self.is_ending or self.cause is not None:
            return
        now_s = time.monotonic()
        if not self.is_serving and report.exit_status == ExitStatus.DIED_SERVING:
            # One that was ready failed while others were not: for the user, the start failed.
            report = msgspec.structs.replace(report, exit_status=int(ExitStatus.START_FAILED))
        self.observed.append(ObservedFailure(report=report, seen_s=now_s))
        if self._window_end_s is None:
            self._window_end_s = now_s + CAUSE_WINDOW_S
        # Nothing outweighs a kill, and a lone child has no peers to blame.
        if weigh(report) is Weight.KILLED or len(self._children) == 1:
            self._window_end_s = now_s

    def _judge(self) -> None:
        now_s = time.monotonic()
        for watched in self.running():
            closed_s = watched.control_closed_s
            if (
                closed_s is not None
                and watched.report is None
                and (now_s >= closed_s + _CLOSED_CONTROL_S)
            ):
                self._observe(
                    watched.failed_with(
                        "ControlProtocolError",
                        "closed its control socket and runs on",
                        is_serving=self.is_serving,
                    )
                )
        if self.cause is not None or self._window_end_s is None or now_s < self._window_end_s:
            return
        self.cause = first_cause(self.observed)
        if self.is_serving:
            threading.Thread(
                target=self._on_failure, args=(self.cause,), name="child-failure", daemon=True
            ).start()
