"""Both ends of a queue wait for each other, and say who does not come."""

import os
import signal
import time

import pytest

from tests.support.ipc_queues import in_thread, sleeping
from vcli.runtime.ipc.broadcast import BroadcastReader, BroadcastWriter
from vcli.runtime.ipc.errors import (
    HandshakeTimeout,
    PeerClosedError,
    PeerDiedError,
    QueueCancelled,
)


@pytest.fixture
def writer():
    made = BroadcastWriter.create(2, 1 << 16, "steps", num_processes=99)
    yield made
    made.close()


@pytest.fixture
def attach(writer):
    readers = []

    def attach(index):
        reader = BroadcastReader.attach(writer.reader_handle(index))
        readers.append(reader)
        return reader

    yield attach
    for reader in readers:
        reader.close()


@pytest.mark.usefixtures("no_recheck")
def test_both_sides_return_once_the_last_reader_is_there(writer, attach):
    first = attach(0)
    joins = [in_thread(writer.handshake, 10.0), in_thread(first.handshake, 10.0)]
    for join in joins:
        sleeping(join.thread)
    second = attach(1)
    for join in joins:
        join()
    second.handshake(0.0)


def test_the_writer_names_the_reader_that_is_missing_and_its_pid(writer, attach):
    attach(0)
    writer.set_reader_pid(1, os.getpid())
    began = time.monotonic()
    with pytest.raises(HandshakeTimeout, match=rf"missing: reader 1 \(pid {os.getpid()}\)$") as e:
        writer.handshake(0.05)
    assert e.value.missing == [1]
    assert 0.05 <= time.monotonic() - began < 5.0


def test_a_reader_names_the_other_reader_that_is_missing(attach):
    reader = attach(1)
    with pytest.raises(HandshakeTimeout, match=r"missing: reader 0$"):
        reader.handshake(0.05)


def test_a_reader_names_the_writer_when_all_readers_are_there(attach):
    reader, _ = attach(0), attach(1)
    with pytest.raises(HandshakeTimeout, match=rf"handshake of the writer \(pid {os.getpid()}\)$"):
        reader.handshake(0.05)


def test_a_reply_queue_without_a_writer_says_so():
    reader, _ = BroadcastReader.create(1 << 16, "replies")
    with pytest.raises(HandshakeTimeout, match=r"handshake of the writer \(pid unknown\)$"):
        reader.handshake(0.05)
    reader.close()


def test_after_a_timeout_the_handshake_may_be_repeated(writer, attach):
    attach(0)
    with pytest.raises(HandshakeTimeout):
        writer.handshake(0.0)
    attach(1)
    writer.handshake(0.0)


@pytest.mark.parametrize("side", ["writer", "reader"])
def test_cancel_ends_a_handshake(writer, attach, side):
    end = writer if side == "writer" else attach(0)
    join = in_thread(end.handshake, 10.0)
    sleeping(join.thread)
    end.cancel()
    with pytest.raises(QueueCancelled):
        join()


def test_a_writer_that_closes_ends_the_handshake_of_its_readers(writer, attach):
    join = in_thread(attach(0).handshake, 10.0)
    sleeping(join.thread)
    writer.close()
    with pytest.raises(PeerClosedError):
        join()


def test_what_was_sent_before_the_handshake_is_read_after_it(writer, attach):
    writer.send([b"early"])
    readers = [attach(0), attach(1)]
    writer.handshake(1.0)
    for reader in readers:
        reader.handshake(1.0)
        assert bytes(reader.recv(1.0)[0]) == b"early"


@pytest.mark.process
def test_a_reader_that_dies_before_it_attaches_ends_the_handshake(writer, attach, start_child):
    attach(0)
    # It has the handle of another queue: in this one it never attaches.
    other = BroadcastWriter.create(1, 1 << 16, "other")
    child = start_child("hold", read=other.reader_handle(0))
    writer.set_reader_pid(1, child.pid)
    join = in_thread(writer.handshake, 20.0)
    sleeping(join.thread)
    child.send_signal(signal.SIGKILL)
    with pytest.raises(PeerDiedError, match=r"reader 1 \(never attached\)") as caught:
        join()
    assert (caught.value.reader_index, caught.value.pid) == (1, child.pid)
    other.close()
