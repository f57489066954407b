"""What both ends of a connection between nodes share: the thread, the numbers, the signs of life.

Nothing is lost silently: every message has a number, a gap or a peer that does not read ends the
connection. A connection that ends once it stood is never made again: it is told as `Gone`, within
a moment when the peer's process ended, within `SILENCE_S` when the peer or the network fell silent.
libzmq itself sends and expects the signs of life, so an interpreter that is busy is not taken for
dead. Each end has a thread that owns the socket and calls `on_event`, which must not block long.

    on the wire   number (8 bytes, little endian), frames of the message ...
                  a single empty frame is a beat: it only says that the peer lives
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import zmq
from zmq.utils.monitor import recv_monitor_message

from vcli.runtime.log import get_logger

logger = get_logger(__name__)

Frame = bytes | bytearray | memoryview

BEAT_S: Final = 1.0
#: Without a sign of life for so long after the last beat, a peer counts as gone.
SILENCE_S: Final = 5.0

#: Messages that may wait for a peer. No call needs more than a few; a peer that is so far behind
#: does not read at all.
MAX_WAITING: Final = 10_000
_NUMBER_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class Connected:
    """A link's handshake is done: the other side has the same key."""


@dataclass(frozen=True, slots=True)
class Received:
    """A message of `peer` (b"" on a link); `address` is where it came from."""

    peer: bytes
    address: str
    frames: list[bytes]


@dataclass(frozen=True, slots=True)
class Gone:
    """The connection to `peer` has ended; nothing more comes from it."""

    peer: bytes
    reason: str


@dataclass(frozen=True, slots=True)
class Refused:
    """A handshake failed. `is_key`: by the key; else the other one speaks something else.

    `address` is "" where the connection was gone before it was looked at.
    """

    address: str
    is_key: bool


Event = Connected | Received | Gone | Refused
OnEvent = Callable[[Event], None]


class Endpoint:
    """What both ends share: the thread, the outbox, the options, the numbers."""

    def __init__(self, kind: int, on_event: OnEvent, *, name: str) -> None:
        self._on_event = on_event
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = self._context.socket(kind)
        self._set_options()
        self._monitor = self._socket.get_monitor_socket()
        self._outbox: deque[tuple[bytes, list[Frame]]] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_closing = False
        self._close_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin to send and receive."""
        self._thread.start()

    def close(self, flush_s: float = 0.0) -> None:
        """End the connections; what was sent may take `flush_s` to go out. May be called again."""
        with self._close_lock:
            if self._is_closing:
                return
            self._is_closing = True
        if self._thread.ident is not None:
            os.eventfd_write(self._wake_fd, 1)
            self._thread.join()
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=int(flush_s * 1000))
        self._context.term()
        os.close(self._wake_fd)

    def _set_options(self) -> None:
        options = {
            zmq.SNDHWM: MAX_WAITING,
            zmq.RCVHWM: MAX_WAITING,
            zmq.LINGER: 0,
            zmq.HEARTBEAT_IVL: int(BEAT_S * 1000),
            zmq.HEARTBEAT_TIMEOUT: int((SILENCE_S - BEAT_S) * 1000),
            zmq.IPV6: 1,
        }
        for option, value in options.items():
            self._socket.setsockopt(option, value)

    def _post(self, peer: bytes, frames: Sequence[Frame]) -> None:
        if self._is_closing:
            return
        self._outbox.append((peer, list(frames)))
        os.eventfd_write(self._wake_fd, 1)

    def _run(self) -> None:
        poller = zmq.Poller()
        for source in (self._socket, self._monitor, self._wake_fd):
            poller.register(source, zmq.POLLIN)
        next_beat_s = time.monotonic() + BEAT_S
        while True:
            left_s = next_beat_s - time.monotonic()
            ready = dict(poller.poll(max(0, int(left_s * 1000) + 1)))
            if self._wake_fd in ready:
                os.eventfd_read(self._wake_fd)
            # The end of a connection is told after everything that came over it.
            news = self._read_monitor() if self._monitor in ready else []
            self._receive_all()
            for event, value in news:
                self._judge(event, value)
            self._send_outbox()
            if self._is_closing:
                return
            if time.monotonic() >= next_beat_s:
                next_beat_s = time.monotonic() + BEAT_S
                self._beat()

    def _read_monitor(self) -> list[tuple[int, int]]:
        found = []
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)
            value = int(event["value"])
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._accepted(value)  # at once: its descriptor may soon be another's
            found.append((int(event["event"]), value))
        return found

    def _receive_all(self) -> None:
        while not self._is_closing:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._take(frames)

    def _send_outbox(self) -> None:
        while self._outbox:
            self._send(*self._outbox.popleft())

    def _accepted(self, fd: int) -> None:
        """A connection came in on `fd`."""

    def _judge(self, event: int, value: int) -> None:
        raise NotImplementedError

    def _take(self, frames: list[zmq.Frame]) -> None:
        raise NotImplementedError

    def _send(self, peer: bytes, frames: list[Frame]) -> None:
        raise NotImplementedError

    def _beat(self) -> None:
        raise NotImplementedError


@dataclass(slots=True)
class Peer:
    """The other end of one connection."""

    routing_id: bytes
    address: str
    fd: int
    seen_s: float
    received: int = 0
    sent: int = 0

    def next_number(self) -> bytes:
        """The number of the message that is sent now."""
        self.sent += 1
        return self.sent.to_bytes(_NUMBER_BYTES, "little")

    def is_next(self, number: bytes) -> bool:
        """Whether none was lost before the message with this number."""
        self.received += 1
        return int.from_bytes(number, "little") == self.received

    def end(self) -> Gone:
        """Why it ended, as far as the silence before it tells."""
        silent_s = time.monotonic() - self.seen_s
        if silent_s > SILENCE_S - 2 * BEAT_S:
            return Gone(self.routing_id, f"no sign of life for {silent_s:.0f} s")
        return Gone(self.routing_id, "its connection was closed")
