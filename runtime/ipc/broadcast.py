"""One writer, many readers, between the processes of one machine: the ring, the bells, the errors.

`errors` has what they raise, `handles` who closes which descriptor.
"""

import os
import threading
import time
from collections.abc import Sequence
from functools import partial

import msgspec

from vcli.runtime.ipc.errors import (
    PeerClosedError,
    PeerDiedError,
    QueueCancelled,
    QueueFullTimeout,
    QueueTimeout,
)
from vcli.runtime.ipc.handles import ReaderHandle, WriterHandle, create_queue, take_over
from vcli.runtime.ipc.layout import Buffer, ReaderState
from vcli.runtime.ipc.ring_reader import RingReader
from vcli.runtime.ipc.ring_writer import Piece, RingWriter
from vcli.runtime.ipc.segment import SharedSegment
from vcli.runtime.ipc.wakeup import Spinner, Wake, WakeupReceiver
from vcli.runtime.log import get_logger

logger = get_logger(__name__)

_RECHECK_S = 1.0
"""Longest sleep at a time. No ring is lost by the protocol; this bounds the harm if one were."""
_SLOW_S = 10.0
"""A writer that waited this long for space says so in the log, once."""
_CHECK_S = 0.01
"""Between two looks for dead readers while nothing blocks."""
_WRITER = 0
"""The writer's number among the peers of a reader's bell."""


class BroadcastWriter:
    """The writing end. Several threads may send; they take turns."""

    def __init__(self, handle: WriterHandle, segment: SharedSegment) -> None:
        self.name = handle.name
        self._segment = segment
        self._handle = handle
        bells = [partial(os.eventfd_write, fd) for fd in handle.doorbell_fds]
        self._ring = RingWriter(segment.buffer, bells)
        self._wakeup = WakeupReceiver(handle.space_fd)
        self._check_at = 0.0
        self._unwatched = set(range(self._ring.layout.num_readers))
        self._lock = threading.Lock()
        self._is_closed = False
        self._ring.set_attached(os.getpid())

    @classmethod
    def create(
        cls, num_readers: int, capacity_bytes: int, name: str, *, num_processes: int | None = None
    ) -> "BroadcastWriter":
        """A new queue with this process as its writer.

        `num_processes` (readers and writer by default) is how many processes want a CPU while
        messages go around; when they are more than the CPUs, nobody spins.

        Raises:
            UnfitError: not enough memory for it.
        """
        num_processes = num_readers + 1 if num_processes is None else num_processes
        return cls(*create_queue(num_readers, capacity_bytes, name, num_processes))

    @classmethod
    def attach(cls, handle: WriterHandle) -> "BroadcastWriter":
        """The writing end of a queue that its reader's process made (`BroadcastReader.create`)."""
        segment_fd, *bells, space_fd = take_over(handle.fds(), handle.creator_pid)
        taken = msgspec.structs.replace(
            handle,
            segment_fd=segment_fd,
            doorbell_fds=tuple(bells),
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
            raise self._lost(PeerDiedError, "died", index)

    def _write_when_space(self, piece: Piece, deadline: float | None) -> None:
        began = time.monotonic()
        slow_at = began + _SLOW_S
        try:
            while True:
                self._ring.arm()
                if self._ring.try_write(piece):
                    return
                wake = self._wakeup.wait(_slice_s(deadline))
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
            raise self._lost(PeerDiedError, "died", index)
        for state in self._blocking():
            if state.is_closed:
                raise self._lost(PeerClosedError, "closed its end", state.reader_index)

    def _lost(self, error: type[PeerDiedError], how: str, reader_index: int) -> PeerDiedError:
        pid = self._wakeup.pid_of(reader_index)
        state = self._ring.reader_state(reader_index).describe()
        message = f"queue {self.name!r}: process {pid} {how}; {state}"
        return error(message, reader_index=reader_index, pid=pid)

    def _blocking(self) -> list[ReaderState]:
        return [self._ring.reader_state(index) for index in self._ring.blocking_readers()]

    def _watch_attached(self) -> None:
        for reader_index in list(self._unwatched):
            pid = self._ring.reader_pid(reader_index)
            if pid is not None:
                self._wakeup.watch(reader_index, pid)
                self._unwatched.discard(reader_index)


class BroadcastReader:
    """One reading end, for one thread at a time (`cancel` may come from any)."""

    def __init__(self, handle: ReaderHandle, segment: SharedSegment) -> None:
        self.name = handle.name
        self.reader_index = handle.reader_index
        self.wakeup = WakeupReceiver(handle.doorbell_fd)
        space_bell = partial(os.eventfd_write, handle.space_fd)
        self.ring = RingReader(segment.buffer, handle.reader_index, space_bell)
        self._segment = segment
        self._handle = handle
        self._spinner = Spinner(self.ring.layout.num_processes)
        self._is_closed = False
        self.ring.set_attached(os.getpid())
        self.watch_attached()

    @classmethod
    def create(
        cls, capacity_bytes: int, name: str, *, num_processes: int = 2
    ) -> "tuple[BroadcastReader, WriterHandle]":
        """A new queue with this process as its only reader, and the handle for its writer.

        For replies: a parent makes it before the child exists. `num_processes` as in
        `BroadcastWriter.create`; for the replies of N workers it is N + 1.

        Raises:
            UnfitError: not enough memory for it.
        """
        writer, segment = create_queue(1, capacity_bytes, name, num_processes)
        return cls(writer.reader(0), segment), writer

    @classmethod
    def attach(cls, handle: ReaderHandle) -> "BroadcastReader":
        """The reading end, in the process that inherited the handle's descriptors."""
        segment_fd, doorbell_fd, space_fd = take_over(handle.fds(), handle.creator_pid)
        taken = msgspec.structs.replace(
            handle, segment_fd=segment_fd, doorbell_fd=doorbell_fd, space_fd=space_fd
        )
        return cls(taken, SharedSegment.attach(segment_fd))

    def set_writer_pid(self, pid: int) -> None:
        """Watch this process from now on; without it the writer is watched once it attached."""
        self.wakeup.watch(_WRITER, pid)

    def set_activity(self, activity: str) -> None:
        """What this process does now (an RPC method); the writer names it when this end is late."""
        self.ring.set_activity(activity)

    @property
    def is_ready(self) -> bool:
        """Whether `recv` would give a record or raise at once (not: a record came in part)."""
        return (
            self.ring.has_next()
            or self.wakeup.is_cancelled
            or bool(self.wakeup.gone)
            or self.ring.writer_is_closed
        )

    def recv(self, timeout_s: float | None = None) -> list[memoryview]:
        """The next record's buffers, read-only, valid until the next `recv` or `release`.

        Sleeps in the kernel until one comes; None waits as long as the writer lives.

        Raises:
            QueueTimeout: none came in time.
            PeerClosedError, PeerDiedError: the writer is gone and all that it sent was read.
            QueueCancelled: `cancel()` was called.
        """
        if self.wakeup.is_cancelled:
            raise QueueCancelled(self.name)
        ring = self.ring
        if not ring.has_next():
            return self._wait_for_record(timeout_s)
        ring.release()
        record = ring.try_read()
        return self._wait_for_record(timeout_s) if record is None else record

    def release(self) -> None:
        """Give the last record's space back now; its buffers are invalid from here on."""
        self.ring.release()

    def cancel(self) -> None:
        """Make a waiting and every later `recv` raise `QueueCancelled`; from any thread."""
        self.wakeup.cancel()

    def close(self) -> None:
        """Close this end; may be called again. No `recv` may be under way (`cancel` ends it)."""
        if self._is_closed:
            return
        self._is_closed = True
        self.wakeup.cancel()
        self.ring.set_closed()
        os.eventfd_write(self._handle.space_fd, 1)
        self.ring.detach()
        self.wakeup.close()
        self._segment.close()
        for fd in self._handle.fds()[1:]:
            os.close(fd)

    def _wait_for_record(self, timeout_s: float | None) -> list[memoryview]:
        ring, spinner = self.ring, self._spinner
        if spinner.is_worthwhile and spinner.spin(ring.has_next):
            ring.release()
            if (record := ring.try_read()) is not None:
                return record
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        spinner.sleep_begins()
        while True:
            ring.arm()
            wake = None
            if not ring.has_next():
                wake = self.wakeup.wait(_RECHECK_S if deadline is None else _slice_s(deadline))
            ring.disarm()
            if (record := ring.try_read()) is not None:
                spinner.sleep_ends()
                return record
            if wake is Wake.CANCELLED:
                raise QueueCancelled(self.name)
            if (record := self._last_record()) is not None:
                return record
            self.watch_attached()
            if deadline is not None and time.monotonic() >= deadline:
                raise QueueTimeout(f"queue {self.name!r}: no record within {timeout_s} s")

    def _last_record(self) -> list[memoryview] | None:
        """What a writer that is gone still left; raises when that is nothing."""
        is_closed = self.ring.writer_is_closed
        if not is_closed and not self.wakeup.gone:
            return None
        # Looked at after the end was seen: no record can come later.
        record = self.ring.try_read()
        if record is not None:
            return record
        pid = self.ring.writer_pid or self.wakeup.pid_of(_WRITER)
        error, did = (PeerClosedError, "closed") if is_closed else (PeerDiedError, "died")
        message = f"queue {self.name!r}: its writer (pid {pid}) {did}"
        raise error(message, reader_index=None, pid=pid)

    def watch_attached(self) -> None:
        """Watch the writer, if it has attached by now."""
        pid = self.ring.writer_pid
        if pid is not None:
            self.wakeup.watch(_WRITER, pid)


def _slice_s(deadline: float | None) -> float:
    """How long to sleep now."""
    if deadline is None:
        return _RECHECK_S
    return max(0.0, min(_RECHECK_S, deadline - time.monotonic()))
