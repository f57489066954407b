"""Connections between nodes: keys, order, ends, and nothing that is lost silently."""

import contextlib
import queue
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import zmq

from vcli.runtime.ipc import node_endpoint
from vcli.runtime.ipc.curve import job_key, secure_client
from vcli.runtime.ipc.node_endpoint import Connected, Gone, Received, Refused
from vcli.runtime.ipc.remote import NodeHub, NodeLink

TOKEN = "0123456789abcdef"


class Ends:
    """A hub and the links that a test makes; each with the queue of its events."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.hub_events: queue.Queue = queue.Queue()
        self.hub = NodeHub(self.listener, job_key(TOKEN), self.hub_events.put)
        self.hub.start()
        self.links: list[NodeLink] = []

    def link(self, token: str | None = TOKEN) -> tuple[NodeLink, queue.Queue]:
        events: queue.Queue = queue.Queue()
        link = NodeLink("127.0.0.1", self.port, job_key(token), events.put)
        link.start()
        self.links.append(link)
        return link, events

    def close(self) -> None:
        for link in self.links:
            link.close()
        self.hub.close()
        self.listener.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.close()


def test_messages_go_both_ways_in_order(ends: Ends) -> None:
    link, events = ends.link()
    for number in range(500):
        link.send([b"up", str(number).encode()])
    assert isinstance(events.get(timeout=5), Connected)
    got = [ends.hub_events.get(timeout=5) for _ in range(500)]
    assert [event.frames for event in got] == [[b"up", str(n).encode()] for n in range(500)]
    assert got[0].address == "127.0.0.1"
    for number in range(500):
        ends.hub.send(got[0].peer, [b"", bytes([number % 256]) * 3000])
    answers = [events.get(timeout=5).frames for _ in range(500)]
    assert answers == [[b"", bytes([n % 256]) * 3000] for n in range(500)]


def test_a_link_may_come_before_the_hub() -> None:
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    events: queue.Queue = queue.Queue()
    link = NodeLink("127.0.0.1", port, job_key(None), events.put)
    link.start()
    link.send([b"early"])
    hub_events: queue.Queue = queue.Queue()
    with socket.create_server(("127.0.0.1", port)) as listener:
        hub = NodeHub(listener, job_key(None), hub_events.put)
        hub.start()
        assert hub_events.get(timeout=10).frames == [b"early"]
        link.close()
        hub.close()


@pytest.mark.parametrize("token", ["another token 123", None])
def test_a_wrong_key_is_refused_on_both_sides_and_no_message_arrives(
    ends: Ends, token: str | None
) -> None:
    link, events = ends.link(token)
    link.send([b"secret"])
    refused = [events.get(timeout=5) for _ in range(2)]
    assert refused == [Refused("127.0.0.1", is_key=True)] * 2
    seen = [ends.hub_events.get(timeout=5) for _ in range(2)]
    assert all(isinstance(event, Refused) and event.is_key for event in seen)


def test_nothing_of_a_client_without_encryption_arrives(ends: Ends) -> None:
    context = zmq.Context()
    client = context.socket(zmq.DEALER)
    monitor = client.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    client.connect(f"tcp://127.0.0.1:{ends.port}")
    with contextlib.suppress(zmq.Again):  # refused already, and never to be connected again
        client.send(b"hello", zmq.NOBLOCK)
    was_closed = monitor.poll(5000)
    client.disable_monitor()
    monitor.close(linger=0)
    client.close(linger=0)
    context.term()
    assert was_closed
    link, _ = ends.link()
    link.send([b"of the job"])
    # Who closes first decides whether the hub learns why; the client tries again by itself.
    seen = ends.hub_events.get(timeout=5)
    while isinstance(seen, Refused):
        assert not seen.is_key
        seen = ends.hub_events.get(timeout=5)
    assert seen.frames == [b"of the job"]


def test_the_last_message_comes_before_the_end(ends: Ends) -> None:
    link, _ = ends.link()
    for number in range(200):
        link.send([str(number).encode()])
    link.close(flush_s=2)
    got = [ends.hub_events.get(timeout=5) for _ in range(201)]
    assert [event.frames for event in got[:-1]] == [[str(n).encode()] for n in range(200)]
    assert got[-1] == Gone(got[0].peer, "its connection was closed")


def test_a_killed_peer_is_known_at_once(ends: Ends) -> None:
    program = (
        "import sys, time\n"
        "from vcli.runtime.ipc.curve import job_key\n"
        "from vcli.runtime.ipc.remote import NodeLink\n"
        "link = NodeLink('127.0.0.1', int(sys.argv[1]), job_key(sys.argv[2]), lambda event: None)\n"
        "link.send([b'here']); link.start(); time.sleep(60)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", program, str(ends.port), TOKEN])
    assert ends.hub_events.get(timeout=20).frames == [b"here"]
    child.kill()
    child.wait(5)
    gone = ends.hub_events.get(timeout=5)
    assert isinstance(gone, Gone)
    assert gone.reason == "its connection was closed"  # not found out by its silence


def test_a_stopped_peer_is_known_by_its_silence(ends: Ends) -> None:
    program = (
        "import os, signal, sys, time\n"
        "from vcli.runtime.ipc.curve import job_key\n"
        "from vcli.runtime.ipc.remote import NodeLink\n"
        "link = NodeLink('127.0.0.1', int(sys.argv[1]), job_key(sys.argv[2]), lambda event: None)\n"
        "link.send([b'here']); link.start(); time.sleep(1); os.kill(os.getpid(), signal.SIGSTOP)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", program, str(ends.port), TOKEN])
    try:
        assert ends.hub_events.get(timeout=20).frames == [b"here"]
        begun = time.monotonic()
        gone = ends.hub_events.get(timeout=15)
        assert isinstance(gone, Gone)
        assert "no sign of life for" in gone.reason
        assert 3 < time.monotonic() - begun < node_endpoint.SILENCE_S + 3
    finally:
        child.kill()
        child.wait(5)


def test_a_peer_that_skips_a_number_is_dropped(ends: Ends) -> None:
    context = zmq.Context()
    client = context.socket(zmq.DEALER)
    secure_client(client, job_key(TOKEN))
    client.connect(f"tcp://127.0.0.1:{ends.port}")
    for number in (1, 2, 4):
        client.send_multipart([number.to_bytes(8, "little"), b"x"])
    kinds = [type(ends.hub_events.get(timeout=5)) for _ in range(3)]
    assert kinds == [Received, Received, Gone]
    client.close(linger=0)
    context.term()


def test_a_peer_that_does_not_read_is_dropped_not_waited_for(ends: Ends) -> None:
    """Its process lives and its connection stands; only nobody takes what is sent."""
    context = zmq.Context()
    client = context.socket(zmq.DEALER)
    client.setsockopt(zmq.RCVHWM, 1)
    secure_client(client, job_key(TOKEN))
    client.connect(f"tcp://127.0.0.1:{ends.port}")
    client.send_multipart([(1).to_bytes(8, "little"), b"x"])
    peer = ends.hub_events.get(timeout=5).peer
    block = bytes(64 << 10)
    for _ in range(node_endpoint.MAX_WAITING + 2000):
        ends.hub.send(peer, [block])
    gone = ends.hub_events.get(timeout=30)
    client.close(linger=0)
    context.term()
    assert isinstance(gone, Gone)
    assert "does not read" in gone.reason


def test_keys_follow_from_the_token_alone() -> None:
    assert job_key(TOKEN) == job_key(TOKEN)
    assert job_key(TOKEN).public != job_key(TOKEN + "x").public
    assert job_key(None).public != job_key("").public
    assert not job_key(None).is_secret
    assert TOKEN not in repr(job_key(TOKEN))
    assert job_key(TOKEN).secret.decode() not in repr(job_key(TOKEN))
    long = "x" * 5000
    assert job_key(long).public != job_key(long + "y").public
