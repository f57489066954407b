"""The writing end of a queue: the ring, the bell of its readers, and who of them is late or dead.

`errors` has what it raises, `handles` who closes which descriptor.
"""

import os
import threading
import time
from collections.abc import Sequence
from functools import partial

import msgspec

from vcli.runtime.ipc.errors import (
    HandshakeTimeout,
    PeerClosedError,
    PeerDiedError,
    QueueCancelled,
    QueueFullTimeout,
    death_in_words,
)
from vcli.runtime.ipc.handles import ReaderHandle, WriterHandle, create_queue, take_over
from vcli.runtime.ipc.layout import Buffer, ReaderState
from vcli.runtime.ipc.ring_writer import Piece, RingWriter
from vcli.runtime.ipc.segment import SharedSegment
from vcli.runtime.ipc.wakeup import Wake, WakeupReceiver, sleep_slice_s
from vcli.runtime.log import get_logger
from vcli.topology.spin import SHORT_SPIN_US

logger = get_logger(__name__)

_SLOW_S = 10.0
"""A writer that waited this long for space says so in the log, once."""
_CHECK_S = 0.01
"""Between two looks for dead readers while nothing blocks."""


class BroadcastWriter:
    """The writing end. Several threads may send; they take turns."""

    def __init__(self, handle: WriterHandle, segment: SharedSegment) -> None:
        self.name = handle.name
        self._segment = segment
        self._handle = handle
        bell = partial(os.eventfd_write, handle.doorbell_fd)
        self._ring = RingWriter(segment.buffer, bell)
        self._wakeup = WakeupReceiver(handle.space_fd)
        self._check_at = 0.0
        self._unwatched = set(range(self._ring.layout.num_readers))
        self._lock = threading.Lock()
        self._is_closed = False
        self._ring.set_attached(os.getpid())

    @classmethod
    def create(
        cls,
        num_readers: int,
        capacity_bytes: int,
        name: str,
        *,
        num_processes: int = 2,
        spin_us: int = SHORT_SPIN_US,
    ) -> "BroadcastWriter":
        """A new queue with this process as its writer.

        `num_processes` is how many processes want a CPU while messages go around, the writer and
        one reader among them: reader i spins only if there are i more CPUs than that,
        for `spin_us` at most (see `topology.spin`).

        Raises:
            UnfitError: not enough memory for it.
        """
        return cls(*create_queue(num_readers, capacity_bytes, name, num_processes, spin_us))

    @classmethod
    def attach(cls, handle: WriterHandle) -> "BroadcastWriter":
        """The writing end of a queue that its reader's process made (`BroadcastReader.create`)."""
        segment_fd, doorbell_fd, space_fd = take_over(handle.fds(), handle.creator_pid)
        taken = msgspec.structs.replace(
            handle,
            segment_fd=segment_fd,
            doorbell_fd=doorbell_fd,
            space_fd=space_fd,
            creator_pid=os.getpid(),
        )
        return cls(taken, SharedSegment.attach(segment_fd))

    @property
    def num_readers(self) -> int:
        """Readers that get every record."""
        return self._ring.layout.num_readers

    def reader_handle(self, reader_index: int) -> ReaderHandle:
        """What reader `reader_index` attaches with, here or in a child that inherits it."""
        return self._handle.reader(reader_index)

    def set_reader_pid(self, reader_index: int, pid: int) -> None:
        """Watch this process from now on; without it a reader is watched once it attached."""
        with self._lock:
            self._wakeup.watch(reader_index, pid)
            self._unwatched.discard(reader_index)

    def handshake(self, timeout_s: float) -> None:
        """Wait until every reader has attached, and tell them (their `handshake` returns).

        Not needed for safety: what is sent before a reader attaches waits for it.

        Raises:
            HandshakeTimeout: names the readers that are missing.
            PeerDiedError: a reader is dead.
            QueueCancelled: `cancel()` was called.
        """
        deadline = time.monotonic() + timeout_s
        with self._lock:
            while missing := self._ring.missing_readers():
                wake = self._wakeup.wait(sleep_slice_s(deadline))
                if wake is Wake.CANCELLED:
                    raise QueueCancelled(self.name)
                self._raise_for_lost_reader()
                if time.monotonic() >= deadline and self._ring.missing_readers():
                    pids = [self._wakeup.pid_of(index) for index in missing]
                    raise HandshakeTimeout(self.name, timeout_s, missing, pids)
            self._ring.set_ready()

    def reader_states(self) -> list[ReaderState]:
        """How far behind each reader is, and what it does."""
        return [self._ring.reader_state(index) for index in range(self.num_readers)]

    def send(self, buffers: Sequence[Buffer], deadline_s: float | None = None) -> None:
        """Give every reader one record. Blocks while the slowest reader leaves no space.

        `deadline_s` counts from now; None waits as long as all readers live.

        Raises:
            QueueFullTimeout: no space in time; names the readers that are behind.
            PeerDiedError: a reader is dead, whether or not there is space (looked at when the
                last look is `_CHECK_S` old).
            QueueCancelled: `cancel()` was called.
        """
        with self._lock:
            if time.monotonic() >= self._check_at:
                self._check()
            if self._ring.try_write_small(buffers):
                return
            deadline = None if deadline_s is None else time.monotonic() + deadline_s
            for piece in self._ring.pieces(buffers):
                if not self._ring.try_write(piece):
                    self._write_when_space(piece, deadline)

    def cancel(self) -> None:
        """Make a blocked and every later `send` raise `QueueCancelled`; from any thread."""
        self._wakeup.cancel()
        self._check_at = 0.0

    def close(self) -> None:
        """Tell the readers that no record follows, and close. A blocked `send` is cancelled."""
        self.cancel()
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._ring.set_closed()
            self._ring.detach()
            self._wakeup.close()
            self._segment.close()
            for fd in self._handle.fds()[1:]:
                os.close(fd)

    def _check(self) -> None:
        # The next look first: a `cancel` after it sets the time back to now.
        self._check_at = time.monotonic() + _CHECK_S
        if self._wakeup.is_cancelled:
            raise QueueCancelled(self.name)
        self._watch_attached()
        for index in self._wakeup.find_gone():
            raise self._dead(index)

    def _write_when_space(self, piece: Piece, deadline: float | None) -> None:
        began = time.monotonic()
        slow_at = began + _SLOW_S
        try:
            while True:
                self._ring.arm()
                if self._ring.try_write(piece):
                    return
                until = slow_at if deadline is None else min(slow_at, deadline)
                wake = self._wakeup.wait(sleep_slice_s(until))
                if self._ring.try_write(piece):
                    return
                if wake is Wake.CANCELLED:
                    raise QueueCancelled(self.name)
                self._raise_for_lost_reader()
                now = time.monotonic()
                if deadline is not None and now >= deadline:
                    raise QueueFullTimeout(self.name, now - began, self._blocking())
                if now >= slow_at:
                    slow_at = float("inf")
                    logger.warning("%s", QueueFullTimeout(self.name, now - began, self._blocking()))
        finally:
            self._ring.disarm()

    def _raise_for_lost_reader(self) -> None:
        self._watch_attached()
        for index in self._wakeup.find_gone():
            raise self._dead(index)
        for state in self._blocking():
            if state.is_closed:
                index = state.reader_index
                message = self._lost_text(index, "closed its end")
                pid = self._wakeup.pid_of(index)
                raise PeerClosedError(message, reader_index=index, pid=pid)

    def _dead(self, index: int) -> PeerDiedError:
        code = self._wakeup.exit_code(index)
        message = self._lost_text(index, death_in_words(code))
        pid = self._wakeup.pid_of(index)
        return PeerDiedError(message, reader_index=index, pid=pid, exit_code=code)

    def _lost_text(self, index: int, how: str) -> str:
        state = self._ring.reader_state(index).describe()
        return f"queue {self.name!r}: process {self._wakeup.pid_of(index)} {how}; {state}"

    def _blocking(self) -> list[ReaderState]:
        return [self._ring.reader_state(index) for index in self._ring.blocking_readers()]

    def _watch_attached(self) -> None:
        for reader_index in list(self._unwatched):
            pid = self._ring.reader_pid(reader_index)
            if pid is not None:
                self._wakeup.watch(reader_index, pid)
                self._unwatched.discard(reader_index)
