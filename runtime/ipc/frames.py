"""Whole messages over a stream socket pair: four bytes of length, little endian, then the payload.

`FrameSocket` for threads, `AsyncFrames` for an event loop; either end may be either. Neither owns a
protocol: payloads are bytes. A peer that closed, died or reset the connection reads as None.
"""

import asyncio
import contextlib
import errno
import select
import socket
import threading
import time

from vcli.runtime.log import get_logger
from vcli.topology.errors import VcliError

logger = get_logger(__name__)

MAX_FRAME_BYTES = 256 << 20
_HEADER_BYTES = 4
_CHUNK_BYTES = 1 << 20


class FrameError(VcliError):
    """What came is no frame of ours, or the stream broke in the middle of one."""


def frame_pair() -> tuple[socket.socket, socket.socket]:
    """A connected pair; neither end is inherited unless passed on by name."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)


class FrameSocket:
    """Blocking frames over `sock`, which it owns. Many threads may send, one receives.

    It never reads past the frame that it gives, so `fileno()` is readable exactly while more
    bytes wait and can be polled with other descriptors.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._send_lock = threading.Lock()
        self._is_broken = False
        self._received = bytearray()
        self._frame_bytes: int | None = None

    def fileno(self) -> int:
        """The socket's descriptor; -1 when closed."""
        return self._sock.fileno()

    def send(self, payload: bytes, timeout_s: float | None = None) -> None:
        """Send one frame; None waits as long as the peer lives.

        Raises:
            ValueError: longer than `MAX_FRAME_BYTES`.
            ConnectionError: the peer is gone.
            TimeoutError: the peer did not read in time; after a part of the frame went out,
                later sends raise `FrameError`.
        """
        self.send_rest(memoryview(_framed(payload)), timeout_s)

    def send_now(self, payload: bytes) -> memoryview:
        """Send what the socket takes without waiting; the rest is for `send_rest`.

        Nobody may send another frame before the rest is out.

        Raises:
            ValueError, ConnectionError: as `send`.
        """
        frame = memoryview(_framed(payload))
        with contextlib.suppress(BlockingIOError):
            return frame[self._sock.send(frame, socket.MSG_DONTWAIT) :]
        return frame

    def send_rest(self, frame: memoryview, timeout_s: float | None = None) -> None:
        """Send a frame, or what `send_now` left of it; raises as `send`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._send_lock:
            if self._is_broken:
                raise FrameError("an earlier frame on this socket was sent in part only")
            sent = 0
            try:
                while sent < len(frame):
                    sent += self._send_some(frame[sent:], deadline)
            finally:
                self._is_broken = 0 < sent < len(frame)

    def recv(self, timeout_s: float | None = None) -> bytes | None:
        """The next frame, or None when the peer closed or died; None waits as long as it lives.

        A frame that came in part stays for the next call.

        Raises:
            TimeoutError: no whole frame in time.
            FrameError: the length is above `MAX_FRAME_BYTES`.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        if self._frame_bytes is None:
            if not self._fill(_HEADER_BYTES, deadline):
                return None
            self._frame_bytes = _frame_bytes(bytes(self._received))
            self._received.clear()
        if not self._fill(self._frame_bytes, deadline):
            return None
        payload = bytes(self._received)
        self._received.clear()
        self._frame_bytes = None
        return payload

    def close(self) -> None:
        """Close the socket; may be called again. A `recv` in another thread sees the end."""
        if self._sock.fileno() < 0:
            return
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            if error.errno != errno.ENOTCONN:  # the peer closed first
                raise
        self._sock.close()

    def _send_some(self, rest: memoryview, deadline: float | None) -> int:
        try:
            return self._sock.send(rest, socket.MSG_DONTWAIT)
        except BlockingIOError:
            _poll(self._sock.fileno(), select.POLLOUT, deadline, "the peer does not read")
            return 0

    def _fill(self, wanted_bytes: int, deadline: float | None) -> bool:
        """Receive until `wanted_bytes` are there; False at the end of the stream."""
        while len(self._received) < wanted_bytes:
            missing = wanted_bytes - len(self._received)
            try:
                data = self._sock.recv(min(missing, _CHUNK_BYTES), socket.MSG_DONTWAIT)
            except BlockingIOError:
                _poll(self._sock.fileno(), select.POLLIN, deadline, "no frame came")
                continue
            except OSError as error:
                # EBADF: our own close() in another thread
                if error.errno not in (errno.ECONNRESET, errno.EBADF):
                    raise
                data = b""
            if not data:
                if self._received or self._frame_bytes is not None:
                    logger.warning("the peer went away in the middle of a frame")
                return False
            self._received += data
        return True


class FrameParser:
    """Frames out of the bytes that were received, wherever they were cut."""

    def __init__(self) -> None:
        self._received = bytearray()

    @property
    def is_between_frames(self) -> bool:
        """Whether no frame came in part."""
        return not self._received

    def feed(self, data: bytes) -> list[bytes]:
        """The frames that `data` completes.

        Raises:
            FrameError: a length is above `MAX_FRAME_BYTES`.
        """
        self._received += data
        frames, begin = [], 0
        while len(self._received) - begin >= _HEADER_BYTES:
            length = _frame_bytes(bytes(self._received[begin : begin + _HEADER_BYTES]))
            end = begin + _HEADER_BYTES + length
            if end > len(self._received):
                break
            frames.append(bytes(self._received[begin + _HEADER_BYTES : end]))
            begin = end
        del self._received[:begin]
        return frames


class AsyncFrames:
    """Frames over `sock`, which it owns, in the running event loop. One task receives.

    A cancelled `recv` loses nothing; the next one goes on where it stopped.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._open_lock = asyncio.Lock()
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._frame_bytes: int | None = None

    async def send(self, payload: bytes) -> None:
        """Send one frame; waits while the peer is slow to read.

        Raises:
            ValueError: longer than `MAX_FRAME_BYTES`.
            ConnectionError: the peer is gone.
        """
        _, writer = await self._streams()
        writer.write(_framed(payload))
        await writer.drain()

    async def recv(self) -> bytes | None:
        """The next frame, or None when the peer closed or died.

        Raises:
            FrameError: the length is above `MAX_FRAME_BYTES`.
        """
        reader, _ = await self._streams()
        try:
            if self._frame_bytes is None:
                self._frame_bytes = _frame_bytes(await reader.readexactly(_HEADER_BYTES))
            payload = await reader.readexactly(self._frame_bytes)
        except asyncio.IncompleteReadError as error:
            if error.partial or self._frame_bytes is not None:
                logger.warning("the peer went away in the middle of a frame")
            return None
        except ConnectionError:
            return None
        self._frame_bytes = None
        return payload

    def close(self) -> None:
        """Close the socket; may be called again. What was sent still goes out."""
        if self._writer is None:
            self._sock.close()
        else:
            self._writer.close()

    async def _streams(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        async with self._open_lock:
            if self._reader is None or self._writer is None:
                self._sock.setblocking(False)
                self._reader, self._writer = await asyncio.open_unix_connection(sock=self._sock)
            return self._reader, self._writer


def _framed(payload: bytes) -> bytes:
    if len(payload) > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {len(payload)} bytes is above {MAX_FRAME_BYTES}")
    return len(payload).to_bytes(_HEADER_BYTES, "little") + payload


def _frame_bytes(header: bytes) -> int:
    length = int.from_bytes(header, "little")
    if length > MAX_FRAME_BYTES:
        raise FrameError(f"a frame claims {length} bytes, above {MAX_FRAME_BYTES}")
    return length


def _poll(fd: int, events: int, deadline: float | None, missing: str) -> None:
    """Wait until `fd` is ready, or raise TimeoutError saying what was `missing`."""
    if fd < 0:
        return  # closed by another thread; the next call on the socket says so
    poll = select.poll()
    poll.register(fd, events)
    left_s = None if deadline is None else deadline - time.monotonic()
    if left_s is None:
        poll.poll()
    elif left_s < 0 or not poll.poll(left_s * 1e3):
        raise TimeoutError(f"{missing} in time")
