"""A reader's end of the byte ring. Memory only: nothing here waits or knows a descriptor.

`layout` has the picture, and why the order of the stores below is as it is.
"""

import struct
import time
from collections.abc import Callable

from vcli.runtime.ipc import layout as at
from vcli.runtime.ipc.fence import Fences, make_fences
from vcli.runtime.ipc.layout import RingCorruptError, RingLayout

_HEADER_OF_ONE = struct.Struct("@4Q")
_PLAIN_OF_ONE = at.PLAIN | 1 << 8


class RingReader:
    """One reader's end, for one thread at a time.

    `space_bell(1)` is called when the writer sleeps and this reader made the room it waits for.
    """

    def __init__(
        self,
        buffer: memoryview,
        reader_index: int,
        space_bell: Callable[[int], object],
        fences: Fences | None = None,
    ) -> None:
        self.layout = RingLayout.load(buffer)
        if not 0 <= reader_index < self.layout.num_readers:
            raise ValueError(f"reader {reader_index} of {self.layout.num_readers}")
        fences = make_fences() if fences is None else fences
        self._order, self._full = fences.order, fences.full
        self._bytes, self._words = buffer, buffer.cast("Q")
        self._records = buffer.toreadonly()
        self._space_bell = space_bell
        self._header_bytes = self.layout.header_bytes
        self._capacity_bytes = self.layout.capacity_bytes
        self._base = self.layout.reader_word(reader_index)
        self._armed_word = self._base + at.ARMED_GENERATION
        self._released = self._words[self._base + at.READ_POSITION]
        self._position = self._released
        self._sequence = self._words[self._base + at.READ_SEQUENCE]
        self._generation = self._words[self._base + at.ARMED_GENERATION]
        self._whole: list[memoryview] = []
        self._parts: list[memoryview] = []

    def set_attached(self, pid: int) -> None:
        """Tell the writer which process reads."""
        self._words[self._base + at.READER_PID] = pid
        self._words[self._base + at.READER_STATE] = at.ATTACHED

    def set_closed(self) -> None:
        """Tell the writer that nothing is read any more."""
        self._words[self._base + at.READER_STATE] = at.CLOSED

    def set_activity(self, activity: str) -> None:
        """What this reader does now, for the writer's complaint when it is late."""
        text = activity.encode()[: at.ACTIVITY_BYTES].ljust(at.ACTIVITY_BYTES, b"\0")
        text_at = (self._base + at.ACTIVITY_TEXT) * 8
        self._words[self._base + at.ACTIVITY_SINCE_NS] = time.monotonic_ns()
        self._bytes[text_at : text_at + at.ACTIVITY_BYTES] = text

    def has_next(self) -> bool:
        """Whether `try_read` would find something (possibly a part of a record only)."""
        return self._words[at.WRITE_POSITION] != self._position

    @property
    def writer_pid(self) -> int | None:
        """The pid that the writer attached with."""
        return self._words[at.WRITER_PID] or None

    @property
    def writer_is_closed(self) -> bool:
        """Whether the writer said that no record follows those in the ring."""
        return self._words[at.WRITER_STATE] == at.CLOSED

    @property
    def writer_is_ready(self) -> bool:
        """Whether the writer said that every reader is there."""
        return self._words[at.WRITER_STATE] == at.READY

    def missing_readers(self) -> list[int]:
        """Readers that have not attached so far."""
        words = [self.layout.reader_word(index) for index in range(self.layout.num_readers)]
        return [i for i, word in enumerate(words) if self._words[word + at.READER_STATE] == 0]

    def try_read(self) -> list[memoryview] | None:
        """The next record's buffers, or None when there is none yet.

        The buffers of a record that came in one piece are read-only views of the ring, valid until
        `release()`; the others are memory of their own.
        """
        words = self._words
        while words[at.WRITE_POSITION] != self._position:
            if self._order is not None:
                self._order()
            place = self._position % self._capacity_bytes
            start = self._header_bytes + place
            size, sequence, kind, length = _HEADER_OF_ONE.unpack_from(self._bytes, start)
            if sequence != self._sequence or not 0 < size <= self._capacity_bytes - place:
                raise RingCorruptError(
                    f"record {sequence} of {size} bytes stands where record "
                    f"{self._sequence} was due, at position {self._position}"
                )
            self._position += size
            if kind == at.WRAP:
                continue
            self._sequence += 1
            if kind == _PLAIN_OF_ONE:
                start += at.LINE_BYTES
                return [self._records[start : start + length]]
            kind, count = kind & 0xFF, kind >> 8
            word = (start >> 3) + 3
            lengths = words[word : word + count].tolist()
            if kind == at.PLAIN:
                return self._views(start, lengths)
            record = self._assemble(kind, start, lengths)
            self.release()
            if record is not None:
                return record
        return None

    def release(self) -> None:
        """Give the space of everything read so far back to the writer."""
        if self._position != self._released:
            self._store_position()
            self._full()
            self._wake_writer_if_enough()

    def arm(self) -> None:
        """Release, and ask to be rung for the next record.

        The caller looks once more (`has_next`) before it sleeps.
        """
        self._generation += 1
        self._store_position()
        self._words[self._armed_word] = self._generation
        self._full()
        self._wake_writer_if_enough()

    def disarm(self) -> None:
        """Ask for no ring any more."""
        self._words[self._armed_word] = 0

    def detach(self) -> None:
        """Drop the views of the memory."""
        self._words.release()
        self._records.release()

    def _store_position(self) -> None:
        if self._order is not None:
            self._order()
        self._words[self._base + at.READ_SEQUENCE] = self._sequence
        self._words[self._base] = self._position

    def _wake_writer_if_enough(self) -> None:
        before, self._released = self._released, self._position
        if before < self._words[at.SPACE_TARGET] <= self._released:
            self._space_bell(1)

    def _views(self, start: int, lengths: list[int]) -> list[memoryview]:
        begin = start + ((len(lengths) * 8 + 24 + 63) & ~63)
        views = []
        for length in lengths:
            views.append(self._records[begin : begin + length])
            begin += (length + 63) & ~63
        return views

    def _assemble(self, kind: int, start: int, lengths: list[int]) -> list[memoryview] | None:
        """Take one piece; the whole record with the last one."""
        if kind == at.START:
            self._whole = [memoryview(bytearray(length)) for length in lengths]
            self._parts = [view for view in self._whole if view]
        elif self._parts:
            (part,) = self._views(start, lengths)
            self._parts[0][: len(part)] = part
            self._parts[0] = self._parts[0][len(part) :]
            if not self._parts[0]:
                self._parts.pop(0)
                if not self._parts:
                    whole, self._whole = self._whole, []
                    return whole
        return None
