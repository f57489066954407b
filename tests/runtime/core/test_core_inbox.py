"""The core's one wait: events of other threads, frames and replies, none of them lost."""

import socket
import threading
from collections.abc import Iterator
from queue import Empty

import msgspec
import pytest

from tests.support.fake_executor import FakeExecutor, fake_engine_config
from tests.support.ipc_queues import in_thread, sleeping
from vcli.runtime.core.client_channel import ClientChannel
from vcli.runtime.core.core_events import ClientGone, StepDone
from vcli.runtime.core.core_inbox import CoreInbox
from vcli.runtime.ipc.frames import FrameSocket, frame_pair
from vcli.runtime.messages import (
    AbortRequests,
    CoreMessage,
    EngineOutput,
    EngineOutputs,
    UtilityReply,
)

WAIT_S = 10.0


class Ends:
    """A core's inbox and channel, and the client's end of the socket."""

    def __init__(self) -> None:
        self.client, theirs = frame_pair()
        self.frames = FrameSocket(self.client)
        self.inbox = CoreInbox()
        self.channel = ClientChannel(theirs, self.inbox.put)
        self.executor = FakeExecutor(fake_engine_config(), on_message=lambda _: None)

    def listen(self) -> None:
        self.inbox.listen(self.executor, self.channel.fileno(), self.channel.read)

    def get(self) -> object:
        self.listen()
        return self.inbox.get(WAIT_S)

    def send(self, *request_ids: str) -> None:
        for request_id in request_ids:
            self.frames.send(msgspec.msgpack.encode(AbortRequests(request_ids=[request_id])))


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    ends.inbox.close()
    ends.channel.close(WAIT_S)
    ends.frames.close()


def test_event_of_another_thread_wakes_the_sleeping_loop(ends: Ends) -> None:
    join = in_thread(ends.get)
    sleeping(join.thread)
    ends.inbox.put(StepDone())
    assert join() == StepDone()


def test_frame_wakes_the_sleeping_loop(ends: Ends) -> None:
    join = in_thread(ends.get)
    sleeping(join.thread)
    ends.send("a")
    assert join() == AbortRequests(request_ids=["a"])


def test_events_from_before_the_loop_and_frames_are_all_taken_in_order(ends: Ends) -> None:
    ends.inbox.put(StepDone())
    ends.listen()
    ends.send("a", "b")
    assert ends.inbox.take_all() == [
        StepDone(),
        AbortRequests(request_ids=["a"]),
        AbortRequests(request_ids=["b"]),
    ]
    assert ends.inbox.take_all() == []


def test_frame_in_pieces_is_one_message(ends: Ends) -> None:
    ends.listen()
    payload = msgspec.msgpack.encode(AbortRequests(request_ids=["a"]))
    for byte in len(payload).to_bytes(4, "little") + payload:
        assert ends.inbox.take_all() == []
        ends.client.send(bytes([byte]))
    assert ends.inbox.take_all() == [AbortRequests(request_ids=["a"])]


def test_wait_in_vain_ends_at_its_deadline(ends: Ends) -> None:
    ends.listen()
    with pytest.raises(Empty):
        ends.inbox.get(0.001)


def test_end_of_the_stream_tells_that_the_client_is_gone(ends: Ends) -> None:
    ends.listen()
    ends.client.shutdown(socket.SHUT_WR)
    assert ends.inbox.get(WAIT_S) == ClientGone()


def test_many_threads_lose_no_event(ends: Ends) -> None:
    ends.listen()
    threads = [
        threading.Thread(target=lambda: [ends.inbox.put(StepDone()) for _ in range(500)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    assert [ends.inbox.get(WAIT_S) for _ in range(2000)] == [StepDone()] * 2000
    for thread in threads:
        thread.join()


def test_put_after_the_close_does_no_harm(ends: Ends) -> None:
    ends.listen()
    ends.inbox.close()
    ends.inbox.put(StepDone())


def test_messages_that_the_client_does_not_read_keep_their_order_and_block_nobody(
    ends: Ends,
) -> None:
    big = EngineOutput(request_id="x" * 50_000, new_token_ids=[])
    for number in range(100):
        ends.channel.send(EngineOutputs(outputs=[big]))
        ends.channel.send(UtilityReply(call_id=number, value=None))
    decoder = msgspec.msgpack.Decoder(CoreMessage)
    for number in range(100):
        assert decoder.decode(ends.frames.recv(WAIT_S) or b"").outputs == [big]
        assert decoder.decode(ends.frames.recv(WAIT_S) or b"").call_id == number
    # The socket has room again: the next one goes out at once, behind all of them.
    ends.channel.send(UtilityReply(call_id=100, value=None))
    assert decoder.decode(ends.frames.recv(WAIT_S) or b"").call_id == 100
