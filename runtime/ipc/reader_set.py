"""Waiting for the first of several readers in one poll, as a driver waits for its workers."""

import select
import time
from collections.abc import Sequence

from vcli.runtime.ipc.broadcast import BroadcastReader
from vcli.runtime.ipc.wakeup import Spinner

_RECHECK_S = 1.0


class ReaderSet:
    """Some readers and other descriptors that end the wait. Owns neither; one thread waits."""

    def __init__(self, readers: Sequence[BroadcastReader], extra_fds: Sequence[int] = ()) -> None:
        self._readers = list(readers)
        self._extra_fds = set(extra_fds)
        self._spinner = Spinner(max(r.ring.layout.num_processes for r in readers))
        self._versions = -1
        self._owners: dict[int, BroadcastReader] = {}
        self._epoll = select.epoll()

    def close(self) -> None:
        """Close the set's own descriptor; the readers stay open."""
        self._epoll.close()

    def wait(self, timeout_s: float | None = None) -> tuple[list[BroadcastReader], list[int]]:
        """Readers whose `recv` would not sleep, and extra descriptors that are readable.

        Both empty: nothing in time. A reader is also ready when its writer is gone or it was
        cancelled, since `recv` then raises. A record that came in part counts as ready: call `recv`
        with a timeout.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        ready = self._ready()
        if not ready and self._spinner.is_worthwhile and self._spinner.spin(self._any_has_next):
            ready = self._ready()
        self._spinner.sleep_begins()
        fds: list[int] = []
        while not ready and not fds:
            for reader in self._readers:
                reader.ring.arm()
            ready = self._ready()
            left_s = None if deadline is None else deadline - time.monotonic()
            fds = self._sleep(0.0 if ready else left_s)
            for reader in self._readers:
                reader.ring.disarm()
            ready = ready or self._ready()
            if left_s is not None and left_s <= 0:
                break
        if ready:
            self._spinner.sleep_ends()
        return ready, fds

    def _ready(self) -> list[BroadcastReader]:
        return [reader for reader in self._readers if reader.is_ready]

    def _any_has_next(self) -> bool:
        return any(reader.ring.has_next() for reader in self._readers)

    def _sleep(self, timeout_s: float | None) -> list[int]:
        """Poll once; notes the dead. Gives the extra descriptors."""
        for reader in self._readers:
            if reader.wakeup.version == 0:
                reader.watch_attached()
        versions = sum(reader.wakeup.version for reader in self._readers)
        if versions != self._versions:
            self._versions = versions
            self._register()
        sleep_s = _RECHECK_S if timeout_s is None else max(0.0, min(_RECHECK_S, timeout_s))
        extra = []
        for fd, _ in self._epoll.poll(sleep_s):
            if fd in self._extra_fds:
                extra.append(fd)
            else:
                self._owners[fd].wakeup.note(fd)
        return extra

    def _register(self) -> None:
        self._epoll.close()
        self._epoll = select.epoll()
        self._owners = {}
        for reader in self._readers:
            for fd, events in reader.wakeup.events().items():
                self._owners[fd] = reader
                self._epoll.register(fd, events)
        for fd in self._extra_fds:
            self._epoll.register(fd, select.EPOLLIN)


def wait_any(
    readers: Sequence[BroadcastReader],
    timeout_s: float | None = None,
    extra_fds: Sequence[int] = (),
) -> tuple[list[BroadcastReader], list[int]]:
    """`ReaderSet.wait` once; keep a `ReaderSet` where the wait is hot."""
    readers_and_fds = ReaderSet(readers, extra_fds)
    try:
        return readers_and_fds.wait(timeout_s)
    finally:
        readers_and_fds.close()
