"""A queue's descriptors: made in one process, inherited by number, taken over in another.

Who closes which descriptor: a queue's memory, the bell of its readers and the bell of its writer
are made by `BroadcastWriter.create` or `BroadcastReader.create`, and that object closes them. A
handle holds the numbers; the child that inherited them (`pass_fds` keeps the numbers) attaches
once, and the attached object closes the child's copies. Attaching in the process that made the
queue duplicates them. No end holds a descriptor that its peer needs, so each may close first.
"""

import os
from collections.abc import Sequence

import msgspec

from vcli.runtime.ipc.layout import RingLayout
from vcli.runtime.ipc.segment import SharedSegment


class ReaderHandle(msgspec.Struct, frozen=True, kw_only=True):
    """What a child needs to read: descriptor numbers, kept by `pass_fds`."""

    name: str
    reader_index: int
    segment_fd: int
    doorbell_fd: int
    space_fd: int
    creator_pid: int

    def fds(self) -> tuple[int, ...]:
        """The descriptors to inherit."""
        return (self.segment_fd, self.doorbell_fd, self.space_fd)


class WriterHandle(msgspec.Struct, frozen=True, kw_only=True):
    """What a child needs to write: descriptor numbers, kept by `pass_fds`."""

    name: str
    segment_fd: int
    doorbell_fd: int
    space_fd: int
    creator_pid: int

    def fds(self) -> tuple[int, ...]:
        """The descriptors to inherit."""
        return (self.segment_fd, self.doorbell_fd, self.space_fd)

    def reader(self, reader_index: int) -> ReaderHandle:
        """The handle of a reader of the same queue."""
        return ReaderHandle(
            name=self.name,
            reader_index=reader_index,
            segment_fd=self.segment_fd,
            doorbell_fd=self.doorbell_fd,
            space_fd=self.space_fd,
            creator_pid=self.creator_pid,
        )


def create_queue(
    num_readers: int, capacity_bytes: int, name: str, num_processes: int, spin_us: int
) -> tuple[WriterHandle, SharedSegment]:
    """The memory and the bells of a new queue; the caller closes them.

    All readers hear one bell: a single system call wakes those that sleep, at less than a bell for
    each would cost; one that is awake hears it when it wants to sleep, and looks once more.

    Raises:
        UnfitError: not enough memory for it.
    """
    layout = RingLayout.plan(num_readers, capacity_bytes, num_processes, spin_us)
    segment = SharedSegment.create(layout.total_bytes, f"vcli-{name}")
    layout.store(segment.buffer)
    flags = os.EFD_CLOEXEC | os.EFD_NONBLOCK
    handle = WriterHandle(
        name=name,
        segment_fd=segment.fd,
        doorbell_fd=os.eventfd(0, flags),
        space_fd=os.eventfd(0, flags),
        creator_pid=os.getpid(),
    )
    return handle, segment


def take_over(fds: Sequence[int], creator_pid: int) -> list[int]:
    """The descriptors of a handle, to be closed by the caller.

    Those that were inherited are taken as they are, and go no further to children of this process.
    """
    if creator_pid == os.getpid():
        return [os.dup(fd) for fd in fds]
    for fd in fds:
        os.set_inheritable(fd, False)
    return list(fds)
