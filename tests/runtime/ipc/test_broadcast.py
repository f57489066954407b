"""The queue within one process: waiting, giving up, cancelling, closing."""

import logging
import os
import queue
import random
import re
import time

import msgspec
import pytest

from tests.support.ipc_queues import CAPACITY, Queue, in_thread, sleeping
from vcli.runtime.ipc import broadcast_writer
from vcli.runtime.ipc.broadcast import BroadcastReader, BroadcastWriter
from vcli.runtime.ipc.errors import (
    PeerClosedError,
    QueueCancelled,
    QueueFullTimeout,
    QueueTimeout,
)
from vcli.runtime.ipc.handles import ReaderHandle, WriterHandle
from vcli.runtime.ipc.reader_set import ReaderSet


def fill(writer, *readers):
    """Send until the ring is full, while `readers` read."""
    while True:
        writer.send([b"b" * 1000], 0.02)
        for reader in readers:
            reader.recv(1.0)


@pytest.mark.parametrize("num_processes", [1, 99], ids=["spinning", "sleeping"])
def test_every_reader_gets_every_message(num_processes):
    with Queue(3, num_processes=num_processes) as (writer, *readers):
        joins = [
            in_thread(lambda r=r: [bytes(r.recv(10.0)[0]) for _ in range(2000)]) for r in readers
        ]
        sent = [random.Random(i).randbytes(i % 700) for i in range(2000)]
        for message in sent:
            writer.send([message], 10.0)
        for join in joins:
            assert join() == sent


@pytest.mark.usefixtures("no_recheck")
def test_no_ring_is_lost_between_a_reader_that_falls_asleep_and_the_writer():
    with Queue(2) as (calls, first, second), Queue() as (replies, answers):
        rounds = 2000

        def echo(reader):
            for _ in range(rounds):
                (part,) = reader.recv()
                if reader is first:
                    replies.send([bytes(part)])

        joins = [in_thread(echo, reader) for reader in (first, second)]
        for number in range(rounds):
            calls.send([number.to_bytes(8, "little")])
            assert int.from_bytes(answers.recv(20.0)[0], "little") == number
        for join in joins:
            join()


@pytest.mark.usefixtures("no_recheck")
def test_no_ring_is_lost_between_a_full_writer_and_its_readers():
    with Queue(2, capacity=4096) as (writer, *readers):
        joins = [
            in_thread(lambda r=r: [bytes(r.recv(20.0)[0]) for _ in range(2000)]) for r in readers
        ]
        sent = [number.to_bytes(8, "little") * (number % 170) for number in range(2000)]
        for message in sent:
            writer.send([message], 20.0)
        for join in joins:
            assert join(20.0) == sent


@pytest.mark.usefixtures("no_recheck")
def test_a_record_that_comes_just_before_the_reader_arms_is_seen_before_it_sleeps(monkeypatch):
    with Queue() as (writer, reader):
        with pytest.raises(QueueTimeout):
            reader.recv(0.05)  # takes the rings of the start
        arm = reader.ring.arm
        monkeypatch.setattr(reader.ring, "arm", lambda: (writer.send([b"x"]), arm()))
        began = time.monotonic()
        assert bytes(reader.recv(10.0)[0]) == b"x"
        assert time.monotonic() - began < 5.0


@pytest.mark.usefixtures("no_recheck")
def test_space_that_comes_just_before_the_writer_arms_is_seen_before_it_sleeps(monkeypatch):
    with Queue() as (writer, reader):
        with pytest.raises(QueueFullTimeout):
            fill(writer)
        arm = writer._ring.arm
        monkeypatch.setattr(writer._ring, "arm", lambda: (reader.recv(), reader.recv(), arm()))
        began = time.monotonic()
        writer.send([b"y" * 500], 10.0)
        assert time.monotonic() - began < 5.0


def test_a_message_larger_than_the_ring_comes_whole():
    with Queue(2) as (writer, *readers):
        joins = [in_thread(lambda r=r: [bytes(b) for b in r.recv(10.0)]) for r in readers]
        sent = [random.Random(0).randbytes(10 * CAPACITY), b"", b"end"]
        writer.send(sent, 10.0)
        assert [join() for join in joins] == [sent, sent]


def test_other_contiguous_buffers_are_bytes_to_the_queue():
    with Queue() as (writer, reader):
        words = memoryview(bytearray(range(16))).cast("Q")
        writer.send([words, bytearray(b"abc"), words[:0]])
        assert [bytes(b) for b in reader.recv(1.0)] == [bytes(range(16)), b"abc", b""]


def test_recv_times_out_with_the_queue_s_name_and_goes_on_afterwards():
    with Queue() as (writer, reader):
        with pytest.raises(QueueTimeout, match=r"'steps': no record within 0\.01 s"):
            reader.recv(0.01)
        with pytest.raises(TimeoutError):
            reader.recv(0.0)
        writer.send([b"x"])
        assert bytes(reader.recv(0.0)[0]) == b"x"


def test_a_full_queue_names_who_is_behind_and_only_those():
    with Queue(3) as (writer, *readers):
        readers[1].set_activity("execute_model")
        with pytest.raises(QueueFullTimeout) as caught:
            fill(writer, readers[0], readers[2])
        assert [state.reader_index for state in caught.value.behind] == [1]
        assert "reader 1 (pid" in str(caught.value)
        assert "records behind, in execute_model for" in str(caught.value)


@pytest.mark.parametrize("deadline_s", [None, 20.0])
def test_writer_that_waits_for_long_says_once_who_is_behind_since_when_and_in_what(
    monkeypatch, caplog, deadline_s
):
    monkeypatch.setattr(broadcast_writer, "_SLOW_S", 0.05)
    said = queue.SimpleQueue()
    monkeypatch.setattr(caplog.handler, "emit", lambda record: said.put(record.getMessage()))
    with Queue(2) as (writer, first, second), caplog.at_level(logging.WARNING, "vcli"):
        with pytest.raises(QueueFullTimeout):
            fill(writer, first)
        second.set_activity("load_model")
        join = in_thread(writer.send, [b"x" * 1000], deadline_s)
        # It comes though nobody rings the writer.
        message = said.get(timeout=10)
        with pytest.raises(queue.Empty):
            said.get(timeout=0.2)
        second.recv(1.0)
        second.recv(1.0)
        join()
    who = rf"reader 1 \(pid {os.getpid()}\) is \d+ records behind, in load_model for \d+\.\d s"
    assert re.fullmatch(rf"queue 'steps' had no space for \d+\.\d s: {who}", message)


def test_after_a_timeout_in_the_middle_of_a_large_message_the_next_one_arrives():
    with Queue() as (writer, reader):
        with pytest.raises(QueueFullTimeout):
            writer.send([b"x" * 10 * CAPACITY], 0.02)
        with pytest.raises(QueueTimeout):
            reader.recv(0.02)  # takes the parts, which nothing follows
        writer.send([b"next"], 1.0)
        assert bytes(reader.recv(1.0)[0]) == b"next"


def test_a_part_of_a_large_message_is_kept_over_a_recv_timeout():
    with Queue(2) as (writer, first, second):
        sent = random.Random(0).randbytes(10 * CAPACITY)
        join = in_thread(writer.send, [sent], 10.0)
        with pytest.raises(QueueTimeout):
            first.recv(0.2)  # takes what there is room for while the second reader takes nothing
        join_second = in_thread(lambda: bytes(second.recv(10.0)[0]))
        assert bytes(first.recv(10.0)[0]) == sent
        assert join_second() == sent
        join()


def test_a_blocked_writer_goes_on_when_the_last_reader_makes_room():
    with Queue(2) as (writer, first, second):
        while writer.reader_states()[0].bytes_behind + 8192 < CAPACITY:
            writer.send([b"x" * 8000], 0.0)
        join = in_thread(writer.send, [b"y" * 8000], 10.0)
        sleeping(join.thread)
        first.recv(1.0)
        first.release()
        second.recv(1.0)
        assert join.thread.is_alive()
        second.release()
        join()


def test_a_record_stays_until_release_however_much_follows():
    with Queue() as (writer, reader):
        writer.send([b"a" * 1000])
        (held,) = reader.recv(1.0)
        with pytest.raises(QueueFullTimeout):
            fill(writer)
        assert bytes(held) == b"a" * 1000


def test_cancel_wakes_a_sleeping_recv_and_stays():
    with Queue() as (_, reader):
        join = in_thread(reader.recv)
        sleeping(join.thread)
        reader.cancel()
        with pytest.raises(QueueCancelled, match="'steps' was cancelled"):
            join()
        with pytest.raises(QueueCancelled):
            reader.recv(0.0)


def test_cancel_wakes_a_blocked_send_and_stays():
    with Queue() as (writer, _):
        join = in_thread(writer.send, [b"x" * 10 * CAPACITY])
        sleeping(join.thread)
        writer.cancel()
        with pytest.raises(QueueCancelled):
            join()
        with pytest.raises(QueueCancelled):
            writer.send([b"y"])


@pytest.mark.usefixtures("no_recheck")
def test_a_closed_writer_is_told_after_what_it_sent_and_without_delay():
    with Queue() as (writer, reader):
        writer.send([b"last"])
        writer.close()
        assert bytes(reader.recv(5.0)[0]) == b"last"
        with pytest.raises(PeerClosedError, match=r"its writer .* closed") as caught:
            reader.recv(5.0)
        assert caught.value.reader_index is None


def test_closing_the_writer_wakes_a_sleeping_reader():
    with Queue() as (writer, reader):
        join = in_thread(reader.recv)
        sleeping(join.thread)
        writer.close()
        with pytest.raises(PeerClosedError):
            join()


def test_a_blocked_writer_is_told_that_a_reader_closed():
    with Queue(2) as (writer, first, second):
        second.close()
        join = in_thread(first.recv, 5.0)
        with pytest.raises(PeerClosedError, match="closed its end; reader 1"):
            writer.send([b"x" * 10 * CAPACITY], 5.0)
        first.cancel()
        with pytest.raises(QueueCancelled):
            join()


def test_threads_may_send_through_one_writer():
    with Queue() as (writer, reader):
        joins = [
            in_thread(lambda n=n: [writer.send([bytes([n]) * 500], 10.0) for _ in range(300)])
            for n in range(3)
        ]
        got = [bytes(reader.recv(10.0)[0]) for _ in range(900)]
        for join in joins:
            join()
        assert sorted(message[0] for message in got) == [0] * 300 + [1] * 300 + [2] * 300
        assert all(len(set(message)) == 1 and len(message) == 500 for message in got)


def test_a_reply_queue_is_made_by_its_reader():
    reader, handle = BroadcastReader.create(CAPACITY, "replies")
    writer = BroadcastWriter.attach(handle)
    join = in_thread(reader.recv, 5.0)
    writer.send([b"reply"])
    assert bytes(join()[0]) == b"reply"
    writer.close()
    reader.close()


def test_handles_survive_msgpack():
    with Queue() as (writer, _):
        handle = writer.reader_handle(0)
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(handle), type=ReaderHandle) == handle
    reader, write = BroadcastReader.create(CAPACITY, "replies")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(write), type=WriterHandle) == write
    reader.close()


def test_closing_both_ends_gives_every_descriptor_back(count_fds):
    before = count_fds()
    with Queue(3) as (writer, *readers):
        writer.send([b"x"])
        for reader in readers:
            reader.recv(1.0)
    reader, handle = BroadcastReader.create(CAPACITY, "replies")
    writer = BroadcastWriter.attach(handle)
    for end in (writer, reader, writer, reader):
        end.close()
    with Queue() as (_, reader):
        ready = ReaderSet([reader])
        ready.wait(0.0)
        ready.close()
    assert count_fds() == before
