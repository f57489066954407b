"""The control socket between parent and child: four bytes of length, little endian, then bytes.

The child's side blocks: it has a parent, or its lifeline ends it. The parent's side trusts nothing
and never blocks: a child that is out of order must not take its parent along. So a wrong length or
an unreadable message is an error, and so are more messages than a sane child sends.
"""

import socket
import struct
import time
from collections import deque

import msgspec

from vcli.runtime.messages import ChildMessage

#: A message holds a traceback at most; a length above this is no length.
MAX_MESSAGE_BYTES = 8 * 1024 * 1024

#: More than this within a second is a flood: every state of a start-up is ten times less.
MAX_MESSAGES_PER_S = 1000

_LENGTH = struct.Struct("<I")
_READ_BYTES = 64 * 1024


class ControlProtocolError(Exception):
    """What came is not what a child sends; the message says what it was."""


def send_frame(control: socket.socket, payload: bytes) -> None:
    """Send one frame; one thread at a time. Raises OSError when the other end is gone."""
    control.sendall(_LENGTH.pack(len(payload)) + payload)


def receive_frame(control: socket.socket) -> bytes | None:
    """Wait for one frame; None when the other end is gone."""
    header = _receive_exactly(control, _LENGTH.size)
    if header is None:
        return None
    return _receive_exactly(control, _LENGTH.unpack(header)[0])


class ControlReader:
    """Messages of one child from its non-blocking control socket."""

    def __init__(self, control: socket.socket) -> None:
        self.is_closed = False
        self._control = control
        self._buffer = bytearray()
        self._decoder = msgspec.msgpack.Decoder(ChildMessage)
        self._arrivals_s: deque[float] = deque(maxlen=MAX_MESSAGES_PER_S)

    def read(self) -> list[ChildMessage]:
        """Whole messages that are there now; sets `is_closed` at the end of the stream.

        Raises:
            ControlProtocolError: the stream makes no sense any more; read no further.
        """
        messages: list[ChildMessage] = []
        while not self.is_closed:
            try:
                data = self._control.recv(_READ_BYTES)
            except BlockingIOError:
                break
            except ConnectionResetError:
                data = b""
            if not data:
                self.is_closed = True
            self._buffer += data
            messages += self._take_messages()
        return messages

    def _take_messages(self) -> list[ChildMessage]:
        messages: list[ChildMessage] = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            if length > MAX_MESSAGE_BYTES:
                raise ControlProtocolError(
                    f"wrote garbage to its control socket: a message of {length} bytes announced, "
                    f"at most {MAX_MESSAGE_BYTES} are allowed"
                )
            end = start + _LENGTH.size + length
            if len(self._buffer) < end:
                break
            messages.append(self._decode(bytes(self._buffer[start + _LENGTH.size : end])))
            start = end
        del self._buffer[:start]
        return messages

    def _decode(self, payload: bytes) -> ChildMessage:
        self._arrivals_s.append(time.monotonic())
        is_full = len(self._arrivals_s) == MAX_MESSAGES_PER_S
        if is_full and self._arrivals_s[-1] - self._arrivals_s[0] < 1.0:
            raise ControlProtocolError(
                f"floods its control socket: over {MAX_MESSAGES_PER_S} messages within a second"
            )
        try:
            return self._decoder.decode(payload)
        except msgspec.DecodeError as error:
            raise ControlProtocolError(f"wrote garbage to its control socket: {error}") from error


def _receive_exactly(control: socket.socket, num_bytes: int) -> bytes | None:
    received = bytearray()
    while len(received) < num_bytes:
        data = control.recv(min(num_bytes - len(received), _READ_BYTES))
        if not data:
            return None
        received += data
    return bytes(received)
