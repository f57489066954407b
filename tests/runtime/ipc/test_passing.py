"""Handles for processes that did not inherit them."""

import os
import socket
import subprocess
import sys

import pytest

from tests.support.ipc_queues import in_thread
from vcli.runtime.ipc.broadcast import BroadcastReader, BroadcastWriter
from vcli.runtime.ipc.errors import HandshakeTimeout, QueueError
from vcli.runtime.ipc.passing import HandleOffer, fetch_reader_handle, fetch_writer_handle

ECHO = """
import sys
from vcli.runtime.ipc.broadcast import BroadcastReader, BroadcastWriter
from vcli.runtime.ipc.passing import fetch_reader_handle, fetch_writer_handle
reader = BroadcastReader.attach(fetch_reader_handle(sys.argv[1], 0, 10.0))
writer = BroadcastWriter.attach(fetch_writer_handle(sys.argv[1], 1, 10.0))
reader.handshake(10.0)
writer.send([bytes(part) for part in reader.recv(10.0)], 10.0)
"""


@pytest.fixture
def queues():
    writer = BroadcastWriter.create(1, 1 << 16, "steps")
    replies, reply_handle = BroadcastReader.create(1 << 16, "replies")
    offer = HandleOffer([writer.reader_handle(0), reply_handle])
    yield writer, replies, offer
    offer.close()
    replies.close()
    writer.close()


@pytest.mark.process
def test_an_unrelated_process_attaches_both_ends_by_an_address_alone(queues):
    writer, replies, offer = queues
    child = subprocess.Popen(
        [sys.executable, "-c", ECHO, offer.address], close_fds=True, start_new_session=True
    )
    offer.serve(20.0)
    writer.handshake(20.0)
    writer.send([b"over", b"there"], 10.0)
    assert [bytes(part) for part in replies.recv(20.0)] == [b"over", b"there"]
    assert child.wait(20) == 0


def test_an_offer_leaves_no_file_and_its_address_is_gone_after_close(queues):
    _, _, offer = queues
    offer.close()
    with pytest.raises(QueueError, match="nobody gave the handle 0"):
        fetch_reader_handle(offer.address, 0, 1.0)


def test_a_handle_that_nobody_fetches_is_named(queues):
    _, _, offer = queues
    join = in_thread(fetch_reader_handle, offer.address, 0, 5.0)
    with pytest.raises(HandshakeTimeout, match=r"missing: reader 1$"):
        offer.serve(0.2)
    BroadcastReader.attach(join()).close()


def test_a_client_that_asks_for_nonsense_gets_nothing_and_the_next_one_is_served(queues):
    _, replies, offer = queues
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.connect(f"\0{offer.address}")
        silent.close()
        asks = [
            in_thread(fetch_writer_handle, offer.address, 7, 5.0),
            in_thread(fetch_reader_handle, offer.address, 0, 5.0),
            in_thread(fetch_writer_handle, offer.address, 1, 5.0),
        ]
        offer.serve(10.0)
    with pytest.raises(QueueError):
        asks[0]()
    reader, other = BroadcastReader.attach(asks[1]()), BroadcastWriter.attach(asks[2]())
    other.send([b"x"])
    assert bytes(replies.recv(1.0)[0]) == b"x"
    other.close()
    reader.close()


@pytest.mark.process
@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become another user")
def test_a_process_of_another_user_gets_nothing(queues):
    _, _, offer = queues
    # No new program: the interpreter may be out of reach for that user.
    child = os.fork()
    if child == 0:
        os.setuid(65534)
        try:
            fetch_reader_handle(offer.address, 0, 10.0)
        except QueueError:
            os._exit(42)
        os._exit(0)
    with pytest.raises(HandshakeTimeout, match="reader 0, reader 1"):
        offer.serve(1.0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
