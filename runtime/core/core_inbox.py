"""What the core's loop waits for, in one place: the client's socket, replies, other threads.

    client socket ------frames---> |
    reply rings ----StepDone-----> | events --> the loop, which is the one thread that waits
    other threads ------put------> |

The loop takes frames and replies itself, so that neither wakes a second thread. Until
`listen` there are only other threads to hear from.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import Empty

from vcli.runtime.core.core_events import CoreEvent
from vcli.runtime.executor.base import Executor
from vcli.runtime.executor.waiting import Waiter


class CoreInbox:
    """Events in the order in which they came. `put` is for any thread, the rest for the loop's."""

    def __init__(self) -> None:
        self._events: deque[CoreEvent] = deque()
        self._bell_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._bell_lock = threading.Lock()
        self._is_asleep = False
        self._owner = 0
        self._client_fd = -1
        self._read_client: Callable[[], None] = lambda: None
        self._waiter: Waiter | None = None

    def put(self, event: CoreEvent) -> None:
        """Add an event, and wake the loop if it sleeps."""
        self._events.append(event)
        # The loop says that it sleeps before it looks for events once more.
        if self._is_asleep and threading.get_ident() != self._owner:
            with self._bell_lock:
                if self._bell_fd >= 0:
                    os.eventfd_write(self._bell_fd, 1)

    def listen(self, executor: Executor, client_fd: int, read_client: Callable[[], None]) -> None:
        """From now on the calling thread takes the replies, and frames by `read_client`."""
        self._owner = threading.get_ident()
        self._client_fd, self._read_client = client_fd, read_client
        self._waiter = executor.waiter([self._bell_fd, client_fd])

    def get(self, timeout_s: float | None = None) -> CoreEvent:
        """The next event; sleeps until there is one.

        Raises:
            Empty: none came in time.
        """
        assert self._waiter is not None
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._events:
            self._is_asleep = True
            # An event that came before the flag was set has rung no bell.
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            fds = [] if self._events else self._waiter.wait(left_s)
            self._is_asleep = False
            self._take(fds)
            if not self._events and deadline is not None and time.monotonic() >= deadline:
                raise Empty
        return self._events.popleft()

    def take_all(self) -> list[CoreEvent]:
        """What is there, without waiting; in its order."""
        assert self._waiter is not None
        self._take(self._waiter.look())
        found = []
        while self._events:
            found.append(self._events.popleft())
        return found

    def close(self) -> None:
        """Take no replies any more; `put` is allowed and does nothing."""
        if self._waiter is not None:
            self._waiter.close()
            self._waiter = None
        with self._bell_lock:
            if self._bell_fd >= 0:
                os.close(self._bell_fd)
                self._bell_fd = -1

    def _take(self, fds: list[int]) -> None:
        if self._bell_fd in fds:
            os.eventfd_read(self._bell_fd)
        if self._client_fd in fds:
            self._read_client()
