"""The writer's end of the byte ring. Memory only: nothing here waits or knows a descriptor.

`layout` has the picture, and why the order of the stores below is as it is.
"""

import struct
import time
from collections.abc import Callable, Sequence

from vcli.runtime.ipc import layout as at
from vcli.runtime.ipc.fence import Fences, make_fences
from vcli.runtime.ipc.layout import Buffer, ReaderState, RingCorruptError, RingLayout

_HEADERS = [struct.Struct(f"@{3 + count}Q") for count in range(6)]
"""Record headers of one line, by the number of buffers."""
_STRETCH_BYTES = 256 << 10
"""How far the writer goes before it looks whether it may start from the front again."""


Piece = tuple[int, list[int], list[Buffer], int, int]
"""A record before it is written: kind, lengths, buffers, bytes of its header, bytes in all."""


class RingWriter:
    """The writer's end, for one thread at a time.

    `bell(1)` is called when a reader sleeps and has something to see. A ring has one writer
    in its life.
    """

    def __init__(
        self,
        buffer: memoryview,
        bell: Callable[[int], object],
        fences: Fences | None = None,
    ) -> None:
        self.layout = RingLayout.load(buffer)
        fences = make_fences() if fences is None else fences
        self._order, self._full = fences.order, fences.full
        self._bytes, self._words = buffer, buffer.cast("Q")
        self._bell = bell
        self._header_bytes = self.layout.header_bytes
        self._capacity_bytes = self.layout.capacity_bytes
        # With its wrap marker a record of half the ring fits an empty ring wherever it starts.
        self._largest_bytes = self._capacity_bytes // 2
        self._stretch_bytes = min(_STRETCH_BYTES, self._capacity_bytes)
        self._stretch_end = self._stretch_bytes
        self._readers = [self.layout.reader_word(i) for i in range(self.layout.num_readers)]
        self._armed_words = [(i, r + at.ARMED_GENERATION) for i, r in enumerate(self._readers)]
        self._position = 0
        self._sequence = 0
        self._slowest = 0
        self._needed_position = 0
        self._woken_generations = [0] * self.layout.num_readers

    def set_attached(self, pid: int) -> None:
        """Tell the readers which process writes.

        Raises:
            RingCorruptError: another writer was here before.
        """
        if self._words[at.WRITER_STATE] != 0:
            raise RingCorruptError(f"the ring has a writer, pid {self._words[at.WRITER_PID]}")
        self._words[at.WRITER_PID] = pid
        self._set_state(at.ATTACHED)

    def missing_readers(self) -> list[int]:
        """Readers that have not attached so far."""
        return [
            index
            for index, reader in enumerate(self._readers)
            if self._words[reader + at.READER_STATE] == 0
        ]

    def set_ready(self) -> None:
        """Tell the readers that all of them are there."""
        self._set_state(at.READY)

    def set_closed(self) -> None:
        """Tell the readers that no record follows."""
        self._set_state(at.CLOSED)

    def try_write_small(self, buffers: Sequence[Buffer]) -> bool:
        """`pieces` and `try_write` in one for the messages of every step: few buffers of bytes.

        False when it is anything else, or at the end of a stretch: take those two then. Flat,
        because between two processes that wake each other every call is a cold one.
        """
        count = len(buffers)
        if count >= len(_HEADERS):
            return False
        size = at.LINE_BYTES
        for buffer in buffers:
            if type(buffer) is not bytes:
                return False
            size += (len(buffer) + 63) & ~63
        place = self._position % self._capacity_bytes
        end = self._position + size
        if (
            size > self._largest_bytes
            or place + size > self._stretch_end
            or end - self._slowest > self._capacity_bytes
        ):
            return False
        target = self._header_bytes + place
        _HEADERS[count].pack_into(
            self._bytes, target, size, self._sequence, at.PLAIN | count << 8, *map(len, buffers)
        )
        target += at.LINE_BYTES
        for buffer in buffers:
            length = len(buffer)
            self._bytes[target : target + length] = buffer
            target += (length + 63) & ~63
        self._publish(end)
        return True

    def pieces(self, buffers: Sequence[Buffer]) -> list[Piece]:
        """The records that `buffers` become: one, or a start and its fragments.

        Raises:
            ValueError: so many buffers that their lengths alone do not fit.
        """
        data = [buffer if type(buffer) is bytes else _as_bytes(buffer) for buffer in buffers]
        lengths = [len(buffer) for buffer in data]
        whole = _piece(at.PLAIN, lengths, data)
        if whole[-1] <= self._largest_bytes:
            return [whole]
        start = _piece(at.START, lengths, [])
        if start[-1] > self._largest_bytes:
            raise ValueError(
                f"the lengths of {len(data)} buffers do not fit half of a ring "
                f"of {self._capacity_bytes} bytes"
            )
        # A quarter of the ring each: the readers copy one while the next is written.
        part_bytes = self._capacity_bytes // 4 - at.LINE_BYTES
        pieces = [start]
        for buffer in data:
            view = memoryview(buffer)
            for begin in range(0, len(buffer), part_bytes):
                part = view[begin : begin + part_bytes]
                pieces.append(_piece(at.FRAGMENT, [len(part)], [part]))
        return pieces

    def try_write(self, piece: Piece) -> bool:
        """Publish one record and wake who waits for it; False when there is no room (`arm`)."""
        kind, lengths, buffers, header_bytes, size = piece
        capacity = self._capacity_bytes
        place = self._position % capacity
        skipped = self._skip(place, size) if place + size > self._stretch_end else 0
        end = self._position + skipped + size
        if end - self._slowest > capacity and not self._has_room(end):
            return False
        if skipped:
            self._put_header(place, skipped, at.WRAP, [])
            place = 0
        self._put_header(place, size, kind, lengths)
        target = self._header_bytes + place + header_bytes
        for buffer, length in zip(buffers, lengths, strict=False):
            self._bytes[target : target + length] = buffer
            target += (length + 63) & ~63
        # Nothing was visible so far; an exception above leaves the ring as it was.
        self._publish(end)
        return True

    def arm(self) -> None:
        """Ask to be rung when there is room for the record that `try_write` refused.

        The caller tries once more before it sleeps.
        """
        self._words[at.SPACE_TARGET] = self._needed_position
        self._full()

    def disarm(self) -> None:
        """Ask for no ring any more."""
        self._words[at.SPACE_TARGET] = 0

    def reader_pid(self, reader_index: int) -> int | None:
        """The pid that a reader attached with."""
        return self._words[self._readers[reader_index] + at.READER_PID] or None

    def reader_state(self, reader_index: int) -> ReaderState:
        """How far behind a reader is, and what it does."""
        words, base = self._words, self._readers[reader_index]
        since_ns = words[base + at.ACTIVITY_SINCE_NS]
        text_at = (base + at.ACTIVITY_TEXT) * 8
        text = bytes(self._bytes[text_at : text_at + at.ACTIVITY_BYTES]).rstrip(b"\0")
        return ReaderState(
            reader_index=reader_index,
            pid=words[base + at.READER_PID] or None,
            records_behind=self._sequence - words[base + at.READ_SEQUENCE],
            bytes_behind=self._position - words[base + at.READ_POSITION],
            is_closed=words[base + at.READER_STATE] == at.CLOSED,
            activity=text.decode(errors="replace"),
            activity_s=max(0, time.monotonic_ns() - since_ns) / 1e9,
        )

    def blocking_readers(self) -> list[int]:
        """Readers whose position is what the refused record waits for."""
        return [
            index
            for index, reader in enumerate(self._readers)
            if self._words[reader + at.READ_POSITION] < self._needed_position
        ]

    def detach(self) -> None:
        """Drop the views of the memory."""
        self._words.release()

    def _skip(self, place: int, size: int) -> int:
        """Bytes to leave out before the next record, and the end of the stretch it begins.

        All the rest of the lap when the record does not fit there, or when every reader has
        caught up: the start of the ring is in the caches, the rest of it is not.
        """
        rest = self._capacity_bytes - place
        if size > rest or (size <= place and self._find_slowest() == self._position):
            self._stretch_end = self._stretch_bytes
            return rest
        self._stretch_end = min(place + size + self._stretch_bytes, self._capacity_bytes)
        return 0

    def _find_slowest(self) -> int:
        words = self._words
        self._slowest = min([words[reader] for reader in self._readers])
        return self._slowest

    def _has_room(self, end: int) -> bool:
        self._find_slowest()
        if end - self._slowest > self._capacity_bytes:
            self._needed_position = end - self._capacity_bytes
            return False
        if self._order is not None:
            self._order()
        return True

    def _put_header(self, place: int, size: int, kind: int, lengths: list[int]) -> None:
        count = len(lengths)
        header = _HEADERS[count] if count < len(_HEADERS) else struct.Struct(f"@{3 + count}Q")
        header.pack_into(
            self._bytes,
            self._header_bytes + place,
            size,
            self._sequence,
            kind | count << 8,
            *lengths,
        )

    def _publish(self, end: int) -> None:
        words, woken = self._words, self._woken_generations
        self._sequence += 1
        self._position = end
        if self._order is not None:
            self._order()
        words[at.WRITE_POSITION] = end
        self._full()
        is_asleep = False
        for index, armed_word in self._armed_words:
            generation = words[armed_word]
            if generation and generation != woken[index]:
                woken[index] = generation
                is_asleep = True
        if is_asleep:
            self._bell(1)

    def _set_state(self, state: int) -> None:
        if self._order is not None:
            self._order()
        self._words[at.WRITER_STATE] = state
        self._full()
        # Whoever is armed: an armed reader looks for records once more before it sleeps, not for
        # this.
        self._bell(1)


def _piece(kind: int, lengths: list[int], buffers: list[Buffer]) -> Piece:
    header_bytes = (len(lengths) * 8 + 24 + 63) & ~63
    size_bytes = header_bytes
    for buffer in buffers:
        size_bytes += (len(buffer) + 63) & ~63
    return kind, lengths, buffers, header_bytes, size_bytes


def _as_bytes(buffer: Buffer) -> Buffer:
    view = memoryview(buffer)
    return view.cast("B") if view.nbytes else b""
