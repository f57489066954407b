"""Whole messages between nodes, over one encrypted TCP connection for each node.

    NodeHub (one, listens)  <--frames-->  NodeLink (one on each other node, connects)

See `node_endpoint` for what is promised, and for the events.
"""

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Sequence
from typing import Final

import zmq

from vcli.runtime.ipc.curve import JobKey, secure_client, secure_server
from vcli.runtime.ipc.node_endpoint import (
    MAX_WAITING,
    Connected,
    Endpoint,
    Frame,
    Gone,
    OnEvent,
    Peer,
    Received,
    Refused,
)

_RECONNECT_MS: Final = 200
_MAX_RECONNECT_MS: Final = 1000

#: What libzmq says when a client's key does not fit; other numbers: it speaks another mechanism.
_CRYPTOGRAPHIC: Final = 0x11000001


class NodeHub(Endpoint):
    """Listens on a socket that is bound and listening, of which it uses a copy.

    `on_event` gets `Received`, `Gone` and `Refused`. A peer is known from its first message on.
    """

    def __init__(self, listener: socket.socket, key: JobKey, on_event: OnEvent) -> None:
        self._peers: dict[bytes, Peer] = {}
        #: Accepted and not known yet: descriptor -> address.
        self._strangers: dict[int, str] = {}
        self._listener_fd = os.dup(listener.fileno())
        self._address = _endpoint(*listener.getsockname()[:2])
        super().__init__(zmq.ROUTER, on_event, name="node-hub")
        secure_server(self._socket, key)
        # A message that can't be delivered is an error, not dropped.
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.USE_FD, self._listener_fd)
        self._socket.bind(self._address)

    def send(self, peer: bytes, frames: Sequence[Frame]) -> None:
        """Send a message; one to a peer that is gone vanishes. From any thread."""
        self._post(peer, frames)

    def _accepted(self, fd: int) -> None:
        self._strangers[fd] = _peer_address(fd)

    def _judge(self, event: int, value: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            address = next(reversed(self._strangers.values()), "")
            self._on_event(Refused(address, value == _CRYPTOGRAPHIC))
        elif event == zmq.EVENT_DISCONNECTED:
            self._strangers.pop(value, None)
            # The oldest: the system may have given the descriptor to the next one already.
            peer = next((peer for peer in self._peers.values() if peer.fd == value), None)
            if peer is not None:
                del self._peers[peer.routing_id]
                self._on_event(peer.end())

    def _take(self, frames: list[zmq.Frame]) -> None:
        routing_id = frames[0].bytes
        peer = self._peers.get(routing_id)
        if peer is None:
            fd = int(frames[1].get(zmq.SRCFD))
            self._strangers.pop(fd, None)
            address = str(frames[1].get("Peer-Address"))
            peer = Peer(routing_id, address, fd, time.monotonic())
            self._peers[routing_id] = peer
        peer.seen_s = time.monotonic()
        number, *rest = (frame.bytes for frame in frames[1:])
        if not number:
            return
        if not peer.is_next(number) or not rest:
            self._drop(peer, f"message {peer.received} was lost on the way")
            return
        self._on_event(Received(routing_id, peer.address, rest))

    def _send(self, peer: bytes, frames: list[Frame]) -> None:
        known = self._peers.get(peer)
        if known is None:
            return
        try:
            self._socket.send_multipart([peer, known.next_number(), *frames], zmq.NOBLOCK)
        except zmq.Again:
            self._drop(known, f"{MAX_WAITING} messages wait for it: it does not read")
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:  # its end is about to be told
                raise

    def _beat(self) -> None:
        for routing_id in self._peers:
            with contextlib.suppress(zmq.ZMQError):
                self._socket.send_multipart([routing_id, b""], zmq.NOBLOCK)

    def _drop(self, peer: Peer, reason: str) -> None:
        self._peers.pop(peer.routing_id, None)
        self._on_event(Gone(peer.routing_id, reason))


class NodeLink(Endpoint):
    """Connects to a hub, and goes on trying until the first connection stands.

    `on_event` gets `Connected`, then `Received`, and at last `Gone`; before that perhaps `Refused`,
    once for each attempt. What is sent before the connection stands goes out first.
    """

    def __init__(self, host: str, port: int, key: JobKey, on_event: OnEvent) -> None:
        super().__init__(zmq.DEALER, on_event, name="node-link")
        secure_client(self._socket, key)
        self._socket.setsockopt(zmq.ROUTING_ID, secrets.token_bytes(12))
        self._socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, _MAX_RECONNECT_MS)
        self._hub = Peer(b"", host, -1, time.monotonic())
        self._is_connected = self._is_gone = False
        self._socket.connect(_endpoint(host, port))

    def send(self, frames: Sequence[Frame]) -> None:
        """Send a message; one to a hub that is gone vanishes. From any thread."""
        self._post(b"", frames)

    def _judge(self, event: int, value: int) -> None:
        if self._is_gone:
            return
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._hub.seen_s, self._is_connected = time.monotonic(), True
            self._on_event(Connected())
        elif event == zmq.EVENT_DISCONNECTED and self._is_connected:
            self._end(self._hub.end())
        elif event in (zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL):
            # The hub closes the connection and says nothing, when the key does not fit.
            self._on_event(
                Refused(self._hub.address, event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
            )

    def _take(self, frames: list[zmq.Frame]) -> None:
        self._hub.seen_s = time.monotonic()
        number, *rest = (frame.bytes for frame in frames)
        if not number or self._is_gone:
            return
        if not self._hub.is_next(number) or not rest:
            self._end(Gone(b"", f"message {self._hub.received} was lost on the way"))
            return
        self._on_event(Received(b"", self._hub.address, rest))

    def _send(self, peer: bytes, frames: list[Frame]) -> None:
        if self._is_gone:
            return
        try:
            self._socket.send_multipart([self._hub.next_number(), *frames], zmq.NOBLOCK)
        except zmq.Again:
            self._end(Gone(b"", f"{MAX_WAITING} messages wait for it: it does not read"))

    def _beat(self) -> None:
        if self._is_connected and not self._is_gone:
            with contextlib.suppress(zmq.ZMQError):
                self._socket.send_multipart([b""], zmq.NOBLOCK)

    def _end(self, end: Gone) -> None:
        self._is_gone = True
        self._on_event(end)


def _endpoint(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _peer_address(fd: int) -> str:
    """Who is connected to `fd`, a descriptor of libzmq; empty when it is closed already."""
    try:
        with socket.socket(fileno=os.dup(fd)) as copy:
            return str(copy.getpeername()[0])
    except OSError:
        return ""
