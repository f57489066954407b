"""The parent reads a control socket without blocking and without trust."""

import socket
from collections.abc import Iterator

import msgspec
import pytest

from vcli.runtime.messages import ChildState
from vcli.runtime.process.control import (
    MAX_MESSAGE_BYTES,
    MAX_MESSAGES_PER_S,
    ControlProtocolError,
    ControlReader,
    receive_frame,
    send_frame,
)

STATE = ChildState(process="Worker", state="device", seconds=1.0, pid=1)
FRAME = len(msgspec.msgpack.encode(STATE)).to_bytes(4, "little") + msgspec.msgpack.encode(STATE)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours, theirs:
        yield ours, theirs


def test_message_in_single_bytes_is_put_together(pair: tuple[socket.socket, socket.socket]) -> None:
    reader = ControlReader(pair[0])
    messages = []
    for index in range(len(FRAME)):
        pair[1].sendall(FRAME[index : index + 1])
        messages += reader.read()
    assert messages == [STATE]


def test_half_a_message_does_not_block(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[1].sendall(FRAME[:-3])
    assert ControlReader(pair[0]).read() == []


def test_several_messages_at_once_keep_their_order(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    other = msgspec.structs.replace(STATE, state="groups")
    send_frame(pair[1], msgspec.msgpack.encode(STATE))
    send_frame(pair[1], msgspec.msgpack.encode(other))
    assert ControlReader(pair[0]).read() == [STATE, other]


def test_end_of_stream_is_seen_after_the_last_message(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    reader = ControlReader(pair[0])
    pair[1].sendall(FRAME)
    pair[1].close()
    assert reader.read() == [STATE]
    assert reader.is_closed


@pytest.mark.parametrize(
    "data",
    [
        b"Traceback (most recent call last):\n",
        (MAX_MESSAGE_BYTES + 1).to_bytes(4, "little"),
        b"\x03\x00\x00\x00abc",
        b"\x00\x00\x00\x00",
    ],
)
def test_garbage_is_an_error(pair: tuple[socket.socket, socket.socket], data: bytes) -> None:
    pair[1].sendall(data)
    with pytest.raises(ControlProtocolError, match="garbage"):
        ControlReader(pair[0]).read()


def test_flood_is_an_error_though_every_message_is_right(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    reader = ControlReader(pair[0])
    for _ in range(MAX_MESSAGES_PER_S - 1):
        pair[1].sendall(FRAME)
        reader.read()
    pair[1].sendall(FRAME)
    with pytest.raises(ControlProtocolError, match="floods"):
        reader.read()


def test_frame_of_a_dead_sender_reads_as_none(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[0].sendall(b"\x10\x00\x00\x00half")
    pair[0].close()
    assert receive_frame(pair[1]) is None
