"""A reading end of a queue: the ring, its own bell, and the writer's life.

`errors` has what it raises, `handles` who closes which descriptor.
"""

import os
import time
from functools import partial

import msgspec

from vcli.runtime.ipc.errors import (
    HandshakeTimeout,
    PeerClosedError,
    PeerDiedError,
    QueueCancelled,
    QueueTimeout,
    death_in_words,
)
from vcli.runtime.ipc.handles import ReaderHandle, WriterHandle, create_queue, take_over
from vcli.runtime.ipc.ring_reader import RingReader
from vcli.runtime.ipc.segment import SharedSegment
from vcli.runtime.ipc.wakeup import Spinner, Wake, WakeupReceiver, sleep_slice_s
from vcli.topology.spin import SHORT_SPIN_US

_WRITER = 0
"""The writer's number among the peers of a reader's bell."""


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
        layout = self.ring.layout
        self._spinner = Spinner(layout.num_processes + handle.reader_index, layout.spin_us)
        self._is_closed = False
        self.ring.set_attached(os.getpid())
        # The writer may wait for it in its handshake.
        space_bell(1)
        self.watch_attached()

    @classmethod
    def create(
        cls,
        capacity_bytes: int,
        name: str,
        *,
        num_processes: int = 2,
        spin_us: int = SHORT_SPIN_US,
    ) -> "tuple[BroadcastReader, WriterHandle]":
        """A new queue with this process as its only reader, and the handle for its writer.

        For replies: a parent makes it before the child exists. `num_processes` and
        `spin_us` as in `BroadcastWriter.create`.

        Raises:
            UnfitError: not enough memory for it.
        """
        writer, segment = create_queue(1, capacity_bytes, name, num_processes, spin_us)
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

    def handshake(self, timeout_s: float) -> None:
        """Wait until the writer's `handshake` saw every reader.

        Raises:
            HandshakeTimeout: names the writer or the readers that are missing.
            PeerClosedError, PeerDiedError: the writer is gone.
            QueueCancelled: `cancel()` was called.
        """
        deadline = time.monotonic() + timeout_s
        while not self.ring.writer_is_ready:
            wake = self.wakeup.wait(sleep_slice_s(deadline))
            if wake is Wake.CANCELLED:
                raise QueueCancelled(self.name)
            self.watch_attached()
            if self.ring.writer_is_ready:
                return
            if self.ring.writer_is_closed or self.wakeup.gone:
                raise self._writer_lost()
            if time.monotonic() >= deadline:
                missing = self.ring.missing_readers()
                raise HandshakeTimeout(self.name, timeout_s, missing, writer_pid=self._writer_pid())

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
                wake = self.wakeup.wait(sleep_slice_s(deadline))
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
        if not self.ring.writer_is_closed and not self.wakeup.gone:
            return None
        # Looked at after the end was seen: no record can come later.
        record = self.ring.try_read()
        if record is not None:
            return record
        raise self._writer_lost()

    def _writer_lost(self) -> PeerDiedError:
        pid = self._writer_pid()
        about = f"queue {self.name!r}: its writer (pid {pid})"
        if self.ring.writer_is_closed:
            return PeerClosedError(f"{about} closed", reader_index=None, pid=pid)
        code = self.wakeup.exit_code(_WRITER)
        message = f"{about} {death_in_words(code)}"
        return PeerDiedError(message, reader_index=None, pid=pid, exit_code=code)

    def _writer_pid(self) -> int | None:
        return self.ring.writer_pid or self.wakeup.pid_of(_WRITER)

    def watch_attached(self) -> None:
        """Watch the writer, if it has attached by now."""
        pid = self.ring.writer_pid
        if pid is not None:
            self.wakeup.watch(_WRITER, pid)
