"""Waiting for the first of several readers in one poll, as a driver waits for its workers."""

import select
import time
from collections.abc import Sequence

from vcli.runtime.ipc.broadcast_reader import BroadcastReader
from vcli.runtime.ipc.wakeup import Spinner, sleep_slice_s


class ReaderSet:
    """Some readers and other descriptors that end the wait. Owns neither; one thread waits."""

    def __init__(
        self,
        readers: Sequence[BroadcastReader],
        extra_fds: Sequence[int] = (),
        *,
        idle_spin_us: int = 0,
    ) -> None:
        """`idle_spin_us` is the longest spin of a wait in which no record is expected."""
        self._readers = list(readers)
        self._extra_fds = set(extra_fds)
        layouts = [reader.ring.layout for reader in readers]
        self._reply_spinner = Spinner(
            max((layout.num_processes for layout in layouts), default=0),
            max((layout.spin_us for layout in layouts), default=0),
        )
        self._idle_spinner = Spinner(0, idle_spin_us)
        self._versions = -1
        self._owners: dict[int, BroadcastReader] = {}
        self._epoll = select.epoll()
        self._extra_poll = select.poll()
        for fd in extra_fds:
            self._extra_poll.register(fd, select.POLLIN)

    def close(self) -> None:
        """Close the set's own descriptor; the readers stay open."""
        self._epoll.close()

    def look(self) -> tuple[list[BroadcastReader], list[int]]:
        """As `wait`, without waiting."""
        return self._ready(), self._poll_extra()

    def wait(
        self, timeout_s: float | None = None, *, expects_record: bool = True
    ) -> tuple[list[BroadcastReader], list[int]]:
        """Readers whose `recv` would not sleep, and extra descriptors that are readable.

        Both empty: nothing in time. A reader is also ready when its writer is gone or it was
        cancelled, since `recv` then raises. A record that came in part counts as ready: call `recv`
        with a timeout.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        fds: list[int] = []
        ready = self._ready()
        spinner = self._reply_spinner if expects_record else self._idle_spinner
        if not ready and spinner.is_worthwhile and spinner.spin(self._any_sign):
            ready, fds = self.look()
        if ready or fds:
            # A stream of records must not hide the others.
            return ready, fds or self._poll_extra()
        spinner.sleep_begins()
        while not ready and not fds:
            for reader in self._readers:
                reader.ring.arm()
            ready = self._ready()
            is_late = deadline is not None and time.monotonic() >= deadline
            fds = self._sleep(0.0 if ready else sleep_slice_s(deadline))
            for reader in self._readers:
                reader.ring.disarm()
            ready = ready or self._ready()
            if is_late:
                break
        if ready or fds:
            spinner.sleep_ends()
        return ready, fds

    def _ready(self) -> list[BroadcastReader]:
        return [reader for reader in self._readers if reader.is_ready]

    def _any_sign(self) -> bool:
        # The poll also lets go of the interpreter, for whoever answers in this process.
        for reader in self._readers:
            if reader.ring.has_next():
                return True
        return bool(self._poll_extra())

    def _sleep(self, timeout_s: float) -> list[int]:
        """Poll once; notes the dead. Gives the extra descriptors."""
        for reader in self._readers:
            if reader.wakeup.version == 0:
                reader.watch_attached()
        versions = sum(reader.wakeup.version for reader in self._readers)
        if versions != self._versions:
            self._versions = versions
            self._register()
        extra = []
        for fd, _ in self._epoll.poll(timeout_s):
            if fd in self._extra_fds:
                extra.append(fd)
            else:
                self._owners[fd].wakeup.note(fd)
        return extra

    def _poll_extra(self) -> list[int]:
        return [fd for fd, _ in self._extra_poll.poll(0)] if self._extra_fds else []

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
