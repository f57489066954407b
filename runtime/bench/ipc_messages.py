"""What the writer of the queue benchmark tells its readers: a small header, then the payload."""

import struct
from enum import IntEnum

import msgspec

from vcli.runtime.ipc.handles import ReaderHandle, WriterHandle

HEADER = struct.Struct("<Qq")
"""Kind, and when the message was sent (nanoseconds of the monotonic clock)."""


class Kind(IntEnum):
    """What a reader does with a message."""

    CALL = 0
    """Reader 0 replies at once."""
    STAMP = 1
    """Note how long it was on its way."""
    PUSH = 2
    """Nothing."""
    REPORT = 3
    """Every reader replies with what it noted, as nanoseconds, and forgets it."""
    STOP = 4


class ReaderLinks(msgspec.Struct, frozen=True, kw_only=True):
    """What a reader process inherits."""

    calls: ReaderHandle
    replies: WriterHandle

    def fds(self) -> tuple[int, ...]:
        """The descriptors to inherit."""
        return (*self.calls.fds(), *self.replies.fds())
