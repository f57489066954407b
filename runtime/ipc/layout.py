"""What stands where in a ring's memory, who writes it, and in which order.

    line 0    magic, version, capacity, number of readers, processes that want a CPU, longest spin
    line 1    write position, writer state, writer pid                              by the writer
    line 2    space target                                                          by the writer
    line 4+2i read position, records read, armed generation, pid, reader state      by reader i
    line 5+2i what reader i does, and since when (for the writer's complaint)       by reader i
    data      records, from the next page on

A line is 64 bytes; a word is 8. **Each word has one writer.** Positions are bytes since the start
and only grow; a place in the data is `position % capacity`, so full and empty are different. A
record never wraps: where it does not fit, a wrap marker fills the rest of the lap. The writer also
ends a lap early when every reader has caught up, so that small messages stay in the same memory.

    record    size, sequence, kind and number of buffers, length of each buffer     (whole lines)
              each buffer, from the next line on                                    (64-aligned)

A record that is larger than half the ring becomes a `START` record (the lengths alone) and
`FRAGMENT` records (a part of one buffer each, in order), which the reader puts together. When the
sender gives up half way, no fragment follows, and the next `START` drops what there is.

Memory order (`fence` says what makes it so):

1. Data before position. The writer copies the record, `order`, stores the write position. The
   reader loads the write position, `order`, loads the record. Likewise a reader is done with the
   record, `order`, stores its read position; the writer loads it, `order`, overwrites.
2. No lost wake-up. A reader that finds nothing stores its armed generation, `full`, looks at the
   write position again, and only then sleeps. The writer stores the write position, `full`, loads
   the generation. Of two stores each followed by `full` and a load of the other, at least one load
   sees the other's store: the reader finds the record, or the writer finds the reader armed.
   The writer rings the readers' one bell, once per generation. A ring stays in the epoll of each
   reader until that reader takes it, and the reader takes a new generation before it sleeps again,
   so no sleep misses its ring; a ring that was meant for another reader is one more look.
3. The same for space, mirrored: the writer stores the target (the read position that it needs),
   `full`, looks at the read positions again. A reader stores its position, `full`, loads the
   target, and rings when this step carried it to the target or past it.
"""

from dataclasses import dataclass

from vcli.topology.errors import VcliError
from vcli.topology.spin import SHORT_SPIN_US

LINE_BYTES = 64

# Word numbers from the start of the segment.
WRITE_POSITION, WRITER_STATE, WRITER_PID = 8, 9, 10
SPACE_TARGET = 16

# Word numbers from the first word of a reader.
READ_POSITION, READ_SEQUENCE, ARMED_GENERATION, READER_PID, READER_STATE = range(5)
ACTIVITY_SINCE_NS, ACTIVITY_TEXT = 8, 9
ACTIVITY_BYTES = 56

# States of either end; 0 is "not attached yet". A ready writer saw every reader attached.
ATTACHED, CLOSED, READY = 1, 2, 3

# Kinds of records.
PLAIN, START, FRAGMENT, WRAP = range(4)

_MAGIC = int.from_bytes(b"VCLIRING", "little")
_VERSION = 2
_PAGE_BYTES = 4096
_FIRST_READER_WORD, _READER_WORDS = 32, 16

Buffer = bytes | bytearray | memoryview
"""What a record is made of: contiguous bytes, so that `len` is the number of bytes."""


class RingCorruptError(VcliError):
    """The ring holds what its writer cannot have written: a bug, or another process wrote."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RingLayout:
    """Sizes of a ring; they stand in its first line, so an attached process reads them there."""

    capacity_bytes: int
    num_readers: int
    num_processes: int
    spin_us: int = SHORT_SPIN_US

    @classmethod
    def plan(
        cls,
        num_readers: int,
        capacity_bytes: int,
        num_processes: int,
        spin_us: int = SHORT_SPIN_US,
    ) -> "RingLayout":
        """The layout with room for at least `capacity_bytes` of records."""
        if num_readers < 1 or capacity_bytes < 1:
            raise ValueError(f"a ring needs a reader and a byte: {num_readers=}, {capacity_bytes=}")
        return cls(
            capacity_bytes=_up_to_page(capacity_bytes),
            num_readers=num_readers,
            num_processes=num_processes,
            spin_us=spin_us,
        )

    @classmethod
    def load(cls, buffer: memoryview) -> "RingLayout":
        """The layout of the ring in `buffer`.

        Raises:
            RingCorruptError: no ring of this version, or of another size.
        """
        with buffer[:48] as head, head.cast("Q") as words:
            magic, version, capacity_bytes, num_readers, num_processes, spin_us = words
        layout = cls(
            capacity_bytes=capacity_bytes,
            num_readers=num_readers,
            num_processes=num_processes,
            spin_us=spin_us,
        )
        if (magic, version) != (_MAGIC, _VERSION) or layout.total_bytes != len(buffer):
            raise RingCorruptError(f"no ring of version {_VERSION} in these {len(buffer)} bytes")
        return layout

    def store(self, buffer: memoryview) -> None:
        """Make `buffer`, which is all zero, an empty ring."""
        with buffer[:48] as head, head.cast("Q") as words:
            words[1], words[2], words[3] = _VERSION, self.capacity_bytes, self.num_readers
            words[4], words[5] = self.num_processes, self.spin_us
            words[0] = _MAGIC

    def reader_word(self, reader_index: int) -> int:
        """The first word of a reader."""
        return _FIRST_READER_WORD + _READER_WORDS * reader_index

    @property
    def header_bytes(self) -> int:
        """Bytes before the data."""
        return _up_to_page(self.reader_word(self.num_readers) * 8)

    @property
    def total_bytes(self) -> int:
        """Bytes of the segment."""
        return self.header_bytes + self.capacity_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderState:
    """One reader as the writer sees it. `pid` is None and `activity` empty until it says them."""

    reader_index: int
    pid: int | None
    records_behind: int
    bytes_behind: int
    is_closed: bool
    activity: str
    activity_s: float

    def describe(self) -> str:
        """Who, how far behind, doing what for how long."""
        who = f"reader {self.reader_index}"
        who += f" (pid {self.pid})" if self.pid is not None else " (never attached)"
        doing = f", in {self.activity} for {self.activity_s:.1f} s" if self.activity else ""
        return f"{who} is {self.records_behind} records behind{doing}"


def _up_to_page(size_bytes: int) -> int:
    return -(-size_bytes // _PAGE_BYTES) * _PAGE_BYTES
