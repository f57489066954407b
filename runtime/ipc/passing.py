"""A queue's handle for a process that did not inherit it: any process of the same user.

The descriptors travel over a socket with an abstract name (no file), and each side looks at the
other's user before it reads a byte. Opening `/proc/PID/fd/N` of the owner would do for the memory,
but not for the bells: an eventfd cannot be opened a second time.
"""

import os
import secrets
import socket
import struct
import time
from collections.abc import Sequence

import msgspec

from vcli.runtime.ipc.errors import HandshakeTimeout, QueueError
from vcli.runtime.ipc.handles import ReaderHandle, WriterHandle

Handle = ReaderHandle | WriterHandle

_MAX_MESSAGE_BYTES = 64 << 10
_NUM_FDS = 3
"""Memory, and a bell for each side."""
_CREDENTIALS = struct.Struct("3i")
_INDEX = struct.Struct("<I")


class HandleOffer:
    """Gives each of `handles` to the process that asks for it by its index; the queue stays open.

    One thread serves. `address` is what the other process needs to know.
    """

    def __init__(self, handles: Sequence[Handle]) -> None:
        self._handles = list(handles)
        self.address = f"vcli-{os.getpid()}-{secrets.token_hex(8)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(f"\0{self.address}")
        self._listener.listen(len(self._handles) + 8)

    def serve(self, timeout_s: float) -> None:
        """Return when every handle was fetched.

        Raises:
            HandshakeTimeout: names the handles that nobody fetched.
        """
        deadline = time.monotonic() + timeout_s
        missing = set(range(len(self._handles)))
        while missing:
            self._listener.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                peer, _ = self._listener.accept()
            except TimeoutError:
                raise HandshakeTimeout(self._handles[0].name, timeout_s, sorted(missing)) from None
            with peer:
                missing.discard(self._give(peer, deadline))

    def close(self) -> None:
        """Take the address back."""
        self._listener.close()

    def _give(self, peer: socket.socket, deadline: float) -> int:
        """The index that was given to this peer; -1 when it got nothing."""
        if _user_of(peer) != os.getuid():
            return -1
        # One that connects and says nothing must not keep the others waiting.
        peer.settimeout(max(0.001, min(1.0, deadline - time.monotonic())))
        try:
            asked = peer.recv(_INDEX.size)
            if len(asked) != _INDEX.size:
                return -1
            (index,) = _INDEX.unpack(asked)
            if index >= len(self._handles):
                return -1
            handle = self._handles[index]
            socket.send_fds(peer, [msgspec.msgpack.encode(handle)], handle.fds())
        except (TimeoutError, ConnectionError):
            return -1
        return int(index)


def fetch_reader_handle(address: str, index: int, timeout_s: float) -> ReaderHandle:
    """The handle `index` of an offer, its descriptors open in this process: attach it once.

    Raises:
        QueueError: nobody of this user offers such a handle there.
    """
    data, fds = _fetch(address, index, timeout_s)
    handle = msgspec.msgpack.decode(data, type=ReaderHandle)
    segment_fd, doorbell_fd, space_fd = fds
    return msgspec.structs.replace(
        handle, segment_fd=segment_fd, doorbell_fd=doorbell_fd, space_fd=space_fd, creator_pid=0
    )


def fetch_writer_handle(address: str, index: int, timeout_s: float) -> WriterHandle:
    """As `fetch_reader_handle`, for the writing end."""
    data, fds = _fetch(address, index, timeout_s)
    handle = msgspec.msgpack.decode(data, type=WriterHandle)
    segment_fd, doorbell_fd, space_fd = fds
    return msgspec.structs.replace(
        handle,
        segment_fd=segment_fd,
        doorbell_fd=doorbell_fd,
        space_fd=space_fd,
        creator_pid=0,
    )


def _fetch(address: str, index: int, timeout_s: float) -> tuple[bytes, list[int]]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as offer:
        offer.settimeout(timeout_s)
        try:
            offer.connect(f"\0{address}")
            if _user_of(offer) != os.getuid():
                raise QueueError(f"{address} is offered by another user")
            offer.send(_INDEX.pack(index))
            data, fds, _, _ = socket.recv_fds(
                offer, _MAX_MESSAGE_BYTES, _NUM_FDS, socket.MSG_CMSG_CLOEXEC
            )
        except (TimeoutError, ConnectionError) as error:
            raise QueueError(
                f"nobody gave the handle {index} at {address}: {error}",
                hint="the process that offers it has ended, or runs in another container",
            ) from error
    if not data:
        raise QueueError(f"{address} has no handle {index}")
    return data, fds


def _user_of(peer: socket.socket) -> int:
    """The user of the process at the other end, as the kernel knows it."""
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(credentials)
    return int(uid)
