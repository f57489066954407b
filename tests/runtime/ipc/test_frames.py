"""Frames over a socket pair, blocking and in an event loop."""

import asyncio
import os
import select
import signal
import subprocess
import sys
import threading

import pytest

from vcli.runtime.ipc import frames
from vcli.runtime.ipc.frames import AsyncFrames, FrameError, FrameSocket, frame_pair


@pytest.fixture
def pair():
    ours, theirs = frame_pair()
    left, right = FrameSocket(ours), FrameSocket(theirs)
    yield left, right
    left.close()
    right.close()


@pytest.mark.parametrize("size", [0, 1, 4, 65_536, 3_000_000])
def test_a_frame_comes_whole(pair, size):
    payload = os.urandom(size)
    sender = threading.Thread(target=pair[0].send, args=(payload,))
    sender.start()
    assert pair[1].recv(10.0) == payload
    sender.join()


def test_frames_keep_their_borders_and_order(pair):
    for number in range(100):
        pair[0].send(b"x" * number)
    assert [len(pair[1].recv(1.0)) for _ in range(100)] == list(range(100))


def test_a_closed_peer_reads_as_none_after_its_last_frame(pair):
    pair[0].send(b"last")
    pair[0].close()
    assert pair[1].recv(1.0) == b"last"
    assert pair[1].recv(1.0) is None
    assert pair[1].recv(1.0) is None


def test_a_peer_that_left_unread_data_reads_as_none(pair):
    pair[1].send(b"never read")
    pair[0].close()
    assert pair[1].recv(1.0) is None


def test_sending_to_a_closed_peer_is_a_connection_error(pair):
    pair[1].close()
    with pytest.raises(ConnectionError):
        pair[0].send(b"x")


def test_a_timeout_keeps_the_part_that_came():
    ours, theirs = frame_pair()
    with ours, FrameSocketCloser(theirs) as receiver:
        ours.sendall(b"\x06\0\0\0abc")
        with pytest.raises(TimeoutError):
            receiver.recv(0.0)
        ours.sendall(b"def")
        assert receiver.recv(1.0) == b"abcdef"


def test_a_full_socket_times_out_and_a_half_sent_frame_spoils_it(pair):
    with pytest.raises(TimeoutError, match="does not read"):
        pair[0].send(b"x" * 10_000_000, timeout_s=0.05)
    with pytest.raises(FrameError, match="in part"):
        pair[0].send(b"y", timeout_s=0.05)


def test_an_absurd_length_is_refused(pair):
    with FrameSocketCloser(pair[1]._sock.dup()) as receiver, pair[0]._sock.dup() as raw:
        raw.sendall(b"\xff\xff\xff\xff")
        with pytest.raises(FrameError, match="4294967295 bytes"):
            receiver.recv(1.0)


def test_too_long_a_payload_is_refused_before_anything_is_sent(pair, monkeypatch):
    monkeypatch.setattr(frames, "MAX_FRAME_BYTES", 10)
    with pytest.raises(ValueError, match="11 bytes"):
        pair[0].send(b"x" * 11)
    pair[0].send(b"fine")
    assert pair[1].recv(1.0) == b"fine"


def test_a_second_frame_keeps_the_descriptor_readable(pair):
    pair[0].send(b"one")
    pair[0].send(b"two")
    assert pair[1].recv(1.0) == b"one"
    assert select.select([pair[1].fileno()], [], [], 0)[0]
    assert pair[1].recv(1.0) == b"two"
    assert not select.select([pair[1].fileno()], [], [], 0)[0]


def test_threads_do_not_mix_their_frames(pair):
    def send(letter: bytes) -> None:
        for _ in range(50):
            pair[0].send(letter * 20_000)

    senders = [threading.Thread(target=send, args=(letter,)) for letter in (b"a", b"b", b"c")]
    for sender in senders:
        sender.start()
    payloads = [pair[1].recv(10.0) for _ in range(150)]
    for sender in senders:
        sender.join()
    assert all(len(set(payload)) == 1 and len(payload) == 20_000 for payload in payloads)


def test_close_ends_a_recv_in_another_thread(pair):
    got = []
    reader = threading.Thread(target=lambda: got.append(pair[1].recv(10.0)))
    reader.start()
    pair[1].close()
    reader.join(5.0)
    assert got == [None]


@pytest.mark.process
def test_a_killed_peer_reads_as_none():
    ours, theirs = frame_pair()
    child = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.PIPE,
    )
    theirs.close()
    with FrameSocketCloser(ours) as receiver, child:
        child.send_signal(signal.SIGKILL)
        assert receiver.recv(5.0) is None


def test_async_frames_speak_with_the_blocking_ones():
    async def talk() -> list[bytes | None]:
        ours, theirs = frame_pair()
        there = FrameSocket(theirs)
        here = AsyncFrames(ours)
        sent = asyncio.get_running_loop().run_in_executor(None, there.send, b"x" * 500_000)
        got = [await here.recv()]
        await sent
        await here.send(b"answer")
        got.append(await asyncio.to_thread(there.recv, 5.0))
        there.close()
        got.append(await here.recv())
        here.close()
        return got

    assert asyncio.run(talk()) == [b"x" * 500_000, b"answer", None]


def test_a_cancelled_async_recv_loses_nothing():
    async def talk() -> bytes | None:
        ours, theirs = frame_pair()
        here = AsyncFrames(ours)
        with theirs:
            theirs.sendall(b"\x06\0\0\0abc")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(here.recv(), 0.05)
            theirs.sendall(b"def")
            payload = await here.recv()
        here.close()
        return payload

    assert asyncio.run(talk()) == b"abcdef"


class FrameSocketCloser:
    """A FrameSocket over one end of a pair, closed at the end of the block."""

    def __init__(self, sock):
        self._frames = FrameSocket(sock)

    def __enter__(self):
        return self._frames

    def __exit__(self, *_):
        self._frames.close()
