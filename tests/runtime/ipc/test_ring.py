"""The ring itself, both ends in one process: layout, order, wrapping, splitting, wake-ups."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vcli.runtime.ipc.fence import make_fences
from vcli.runtime.ipc.layout import RingCorruptError, RingLayout
from vcli.runtime.ipc.ring_reader import RingReader
from vcli.runtime.ipc.ring_writer import RingWriter

CAPACITY = 4096


class Ring:
    """A ring in ordinary memory that counts the bells."""

    def __init__(self, num_readers=1, capacity=CAPACITY, fences=None):
        layout = RingLayout.plan(num_readers, capacity, num_readers + 1)
        self.memory = memoryview(bytearray(layout.total_bytes))
        layout.store(self.memory)
        self.reader_rings = 0
        self.writer_rings = 0
        self.writer = RingWriter(self.memory, self._ring_readers, fences)
        self.readers = [
            RingReader(self.memory, i, self._ring_writer, fences) for i in range(num_readers)
        ]

    def _ring_readers(self, _):
        self.reader_rings += 1

    def _ring_writer(self, _):
        self.writer_rings += 1

    def send(self, *buffers):
        pieces = self.writer.pieces(buffers)
        assert len(pieces) == 1
        return self.writer.try_write(pieces[0])

    def read(self, index=0):
        self.readers[index].release()
        record = self.readers[index].try_read()
        return None if record is None else [bytes(part) for part in record]


def test_an_empty_ring_gives_nothing():
    assert Ring().read() is None


def test_buffers_come_as_they_were_sent_zero_sizes_included():
    ring = Ring()
    sent = [[b"a"], [b""], [b"", b"x" * 63, b"", b"y" * 64, b"z" * 65], [], [b"q"] * 20]
    for buffers in sent:
        assert ring.send(*buffers)
    assert [ring.read() for _ in sent] == sent


def test_the_flat_path_writes_the_same_record_as_the_general_one():
    for buffers in ([], [b""], [b"a" * 100], [b"a", b"b" * 64, b"", b"c", b"d"]):
        flat, general = Ring(), Ring()
        assert flat.writer.try_write_small(buffers)
        assert general.send(*buffers)
        assert bytes(flat.memory) == bytes(general.memory)


def test_the_flat_path_leaves_what_it_cannot_do_to_the_general_one():
    ring = Ring()
    assert not ring.writer.try_write_small([bytearray(3)])
    assert not ring.writer.try_write_small([b"x"] * 6)
    assert not ring.writer.try_write_small([b"x" * CAPACITY])
    assert ring.read() is None


def test_payloads_start_at_cache_lines():
    ring = Ring()
    ring.send(b"first" * 7)
    ring.send(b"aaa", b"b" * 70, b"ccc")
    memory = bytes(ring.memory)
    assert [memory.index(text) % 64 for text in (b"first", b"aaa", b"bbb", b"ccc")] == [0] * 4


def test_records_are_read_only_views_of_the_ring():
    ring = Ring()
    ring.send(b"abc")
    (part,) = ring.readers[0].try_read()
    with pytest.raises(TypeError):
        part[0] = 1
    assert part.obj is ring.memory.obj


def test_a_record_of_half_the_ring_fits_wherever_it_starts():
    largest = b"x" * (CAPACITY // 2 - 64)
    for start in range(0, CAPACITY, 64):
        ring = Ring()
        ring.writer._position = ring.readers[0]._position = ring.readers[0]._released = start
        ring.writer._slowest = start
        ring.memory.cast("Q")[8] = start
        ring.memory.cast("Q")[32] = start
        assert ring.send(largest), start
        assert ring.read() == [largest], start


def test_an_exactly_full_ring_refuses_one_more_and_takes_it_after_a_release():
    ring = Ring()
    for number in range(CAPACITY // 128):
        assert ring.send(bytes([number]) * 64)
    assert not ring.send(b"")
    assert ring.read() == [b"\0" * 64]
    assert not ring.send(b"")  # the first record is still held
    assert ring.read() == [b"\1" * 64]
    assert ring.send(b"")
    assert [ring.read()[0][:1] for _ in range(CAPACITY // 128 - 2)][-1] == b"\x1f"
    assert ring.read() == [b""]
    assert ring.read() is None


def test_messages_stay_at_the_front_of_a_large_ring_while_the_readers_keep_up():
    ring = Ring(num_readers=2, capacity=1 << 20)
    places = set()
    for number in range(3000):
        message = [bytes([number % 256]) * (number % 900)]
        if not ring.writer.try_write_small(message):
            assert ring.send(*message)
        for index, reader in enumerate(ring.readers):
            assert ring.read(index) == message
            reader.release()
        places.add(ring.writer._position % (1 << 20))
    assert max(places) <= 256 << 10
    assert len(places) > 100


def test_a_reader_that_is_behind_keeps_its_records_when_the_others_caught_up():
    ring = Ring(num_readers=2, capacity=1 << 20)
    message = bytes(1000)
    sent = 0
    while ring.send(message):
        sent += 1
        ring.read(0)
        ring.readers[0].release()
    assert sent == (1 << 20) // 1088
    assert all(ring.read(1) == [message] for _ in range(sent))


def test_the_slowest_reader_holds_the_space():
    ring = Ring(num_readers=2)
    while ring.send(b"x" * 900):
        pass
    while ring.read(0) is not None:
        pass
    assert not ring.send(b"x" * 900)
    assert ring.writer.blocking_readers() == [1]
    ring.read(1)
    ring.read(1)
    assert ring.send(b"x" * 900)


def test_a_large_message_comes_whole_through_a_small_ring():
    ring = Ring(num_readers=2)
    sent = [random.Random(1).randbytes(5 * CAPACITY + 13), b"", b"tail", bytearray(CAPACITY)]
    got = [None, None]
    for piece in ring.writer.pieces(sent):
        for _ in range(3):
            if ring.writer.try_write(piece):
                break
            got = [got[i] or ring.read(i) for i in range(2)]
    got = [got[i] or ring.read(i) for i in range(2)]
    assert got == [[bytes(part) for part in sent]] * 2


def test_a_message_that_was_given_up_half_way_is_dropped():
    ring = Ring()
    start, first, *_ = ring.writer.pieces([b"x" * 2 * CAPACITY])
    assert ring.writer.try_write(start)
    assert ring.writer.try_write(first)
    assert ring.read() is None
    assert ring.send(b"next")
    assert ring.read() == [b"next"]


def test_more_buffers_than_half_a_ring_can_list_are_refused():
    with pytest.raises(ValueError, match="600 buffers"):
        Ring().writer.pieces([b""] * 600)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.lists(st.integers(0, 6000), min_size=0, max_size=7), min_size=1, max_size=25),
    num_readers=st.integers(1, 3),
    seed=st.integers(0, 1000),
    stretch_bytes=st.sampled_from([64, 1024, CAPACITY]),
)
def test_every_reader_gets_every_message_in_order(sizes, num_readers, seed, stretch_bytes):
    ring = Ring(num_readers)
    ring.writer._stretch_bytes = ring.writer._stretch_end = stretch_bytes
    rng = random.Random(seed)
    messages = [[rng.randbytes(size) for size in message] for message in sizes]
    got = [[] for _ in range(num_readers)]

    def read_some():
        for index in range(num_readers):
            for _ in range(rng.randrange(3)):
                record = ring.read(index)
                if record is not None:
                    got[index].append(record)

    for message in messages:
        for piece in ring.writer.pieces(message):
            while not ring.writer.try_write(piece):
                read_some()
        read_some()
    for index in range(num_readers):
        while (record := ring.read(index)) is not None:
            got[index].append(record)
    assert got == [messages] * num_readers


def test_armed_readers_are_rung_once_in_all_and_those_that_are_awake_are_not():
    ring = Ring(num_readers=3)
    ring.send(b"0")
    assert ring.reader_rings == 0
    ring.readers[1].arm()
    ring.readers[2].arm()
    ring.send(b"1")
    ring.send(b"2")
    assert ring.reader_rings == 1
    ring.readers[1].disarm()
    ring.readers[2].disarm()
    ring.send(b"3")
    ring.readers[1].arm()
    assert ring.reader_rings == 1
    ring.send(b"4")
    assert ring.reader_rings == 2


def test_a_reader_that_arms_again_before_the_others_is_rung_again():
    ring = Ring(num_readers=2)
    for reader in ring.readers:
        reader.arm()
    ring.send(b"1")
    ring.readers[0].disarm()
    ring.readers[0].arm()
    ring.send(b"2")
    assert ring.reader_rings == 2


def test_every_reader_is_rung_when_the_writer_comes_or_goes():
    ring = Ring(num_readers=2)
    ring.readers[0].arm()
    ring.writer.set_attached(1)
    ring.writer.set_closed()
    assert ring.reader_rings == 2
    assert ring.readers[1].writer_is_closed


def test_the_writer_is_rung_by_the_read_that_makes_the_room_it_asked_for():
    ring = Ring()
    while ring.send(b"x" * 64):
        pass
    (piece,) = ring.writer.pieces([b"y" * 1000])
    assert not ring.writer.try_write(piece)
    ring.writer.arm()
    reads = 0
    while ring.writer_rings == 0:
        ring.read()
        reads += 1
    assert reads == 10  # nine records of 128 bytes for 1,088, released by the tenth read
    assert ring.writer.try_write(piece)
    ring.writer.disarm()
    ring.read()
    assert ring.writer_rings == 1


def test_the_writer_sees_who_is_behind_and_what_it_does():
    ring = Ring(num_readers=2)
    ring.readers[0].set_attached(4711)
    ring.readers[0].set_activity("execute_model")
    ring.send(b"a")
    ring.send(b"b")
    ring.read(0)
    ring.read(0)
    first, second = (ring.writer.reader_state(index) for index in range(2))
    assert (first.pid, first.records_behind, first.activity) == (4711, 1, "execute_model")
    assert 0 <= first.activity_s < 10
    assert "reader 0 (pid 4711) is 1 records behind, in execute_model for" in first.describe()
    assert second.describe() == "reader 1 (never attached) is 2 records behind"


def test_a_second_writer_is_refused():
    ring = Ring()
    ring.writer.set_attached(1)
    with pytest.raises(RingCorruptError, match="has a writer, pid 1"):
        RingWriter(ring.memory, []).set_attached(2)


def test_memory_that_is_no_ring_is_refused():
    ring = Ring()
    ring.memory[0] ^= 1
    with pytest.raises(RingCorruptError, match="no ring"):
        RingLayout.load(ring.memory)


def test_a_record_that_was_overwritten_is_noticed():
    ring = Ring()
    ring.send(b"abc")
    ring.memory[RingLayout.load(ring.memory).header_bytes + 8] ^= 1
    with pytest.raises(RingCorruptError, match="record 1 of 128 bytes stands where record 0"):
        ring.read()


def test_the_fences_of_a_weakly_ordered_cpu_carry_the_same_ring():
    fences = make_fences("aarch64")
    assert fences.order is not None
    ring = Ring(fences=fences)
    for number in range(100):
        assert ring.send(bytes([number]) * 100)
        assert ring.read() == [bytes([number]) * 100]
