"""One cause out of the failures that several observers report."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from vcli.runtime.errors import FailureReport
from vcli.runtime.process.failures import ObservedFailure, Weight, first_cause, weigh


class FirstCause:
    """Collects reports and tells one of them, once. Thread-safe.

    A report that explains itself is told at once. One that looks like the consequence of another
    failure is held for `wait_s`: its cause may still come, from another process or node.
    `on_cause` is called in the thread of the report, or in a thread of its own.
    """

    def __init__(self, on_cause: Callable[[FailureReport], None], *, wait_s: float) -> None:
        self.told: Future[FailureReport] = Future()
        self._on_cause = on_cause
        self._wait_s = wait_s
        self._lock = threading.Lock()
        self._observed: list[ObservedFailure] = []
        self._timer: threading.Timer | None = None
        self._is_closed = False

    def observe(self, report: FailureReport) -> None:
        """Take a report; after the first that was told, and after `close`, it is nothing."""
        with self._lock:
            if self._is_closed:
                return
            self._observed.append(ObservedFailure(report=report, seen_s=time.monotonic()))
            if weigh(report) > Weight.EXPLAINED:
                if self._timer is None:
                    self._timer = threading.Timer(self._wait_s, self._tell)
                    self._timer.name, self._timer.daemon = "first-cause", True
                    self._timer.start()
                return
        self._tell()

    def close(self) -> None:
        """Tell nothing from now on: what ends, ends in order."""
        with self._lock:
            self._is_closed = True
            if self._timer is not None:
                self._timer.cancel()

    def _tell(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            if self._timer is not None:
                self._timer.cancel()
            cause = first_cause(self._observed)
        self.told.set_result(cause)
        self._on_cause(cause)
