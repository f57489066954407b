"""What the fork server and its clients say to each other over one SEQPACKET socket pair each.

    client --StartRequest + descriptors--> server   answered by Started + pidfd, or Refused
    client --LinkRequest + socket--------> server   the other end of the socket is a new client
    client <--Preloaded, Ended------------ server   to every client: imports done, a child ended

One packet is one message. The spec of a child is not in it: that goes over the child's own control
socket, as to every other child.
"""

import array
import os
import socket
from collections.abc import Sequence

import msgspec

#: SCM_MAX_FD of the kernel: descriptors in one packet.
MAX_DESCRIPTORS = 253

_PACKET_BYTES = 32 * 1024
_FD_BYTES = array.array("i").itemsize


class StartRequest(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """Fork a child. It gets the packet's descriptors under the numbers in `targets`.

    The first is its control socket, the second its lifeline.
    """

    request_id: int
    targets: tuple[int, ...]


class LinkRequest(msgspec.Struct, frozen=True, kw_only=True, tag="link"):
    """The packet's one descriptor is the socket of another client."""


class Started(msgspec.Struct, frozen=True, kw_only=True, tag="started"):
    """The child `pid` lives; the packet's descriptor is its pidfd, made before it was reaped."""

    request_id: int
    pid: int


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """There is no child. With `is_limit` the system gives none, to whoever asks."""

    request_id: int
    reason: str
    is_limit: bool


class Preloaded(msgspec.Struct, frozen=True, kw_only=True, tag="preloaded"):
    """The imports are done, `seconds` after the server's start; `problem`: why no fork is safe.

    The first message to a client: `pid` is the server's.
    """

    seconds: float
    problem: str
    pid: int


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag="ended"):
    """A child ended, whosever it was; `exit_code` is negative for a signal."""

    pid: int
    exit_code: int


ToServer = StartRequest | LinkRequest
ToClient = Started | Refused | Preloaded | Ended


class DescriptorsLostError(Exception):
    """The kernel could not hand over the descriptors of a packet: the limit of open files."""


def link_pair() -> tuple[socket.socket, socket.socket]:
    """The two ends of a connection between the server and a client."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send_packet(
    link: socket.socket, message: ToServer | ToClient, descriptors: Sequence[int] = ()
) -> None:
    """Send one message. Raises OSError when the other end is gone, or BlockingIOError."""
    rights = array.array("i", descriptors)
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if descriptors else []
    link.sendmsg([msgspec.msgpack.encode(message)], ancillary, socket.MSG_NOSIGNAL)


def receive_packet(link: socket.socket) -> tuple[bytes, list[int]]:
    """Wait for one message and its descriptors, which are not inheritable; b"" at the end.

    Raises:
        DescriptorsLostError: some descriptors are missing; those that came are closed.
    """
    space = socket.CMSG_SPACE(MAX_DESCRIPTORS * _FD_BYTES)
    flags = socket.MSG_CMSG_CLOEXEC
    try:
        payload, ancillary, received_flags, _ = link.recvmsg(_PACKET_BYTES, space, flags)
    except ConnectionResetError:
        return b"", []
    descriptors: list[int] = []
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            numbers = array.array("i")
            numbers.frombytes(data[: len(data) - len(data) % _FD_BYTES])
            descriptors += numbers
    if received_flags & socket.MSG_CTRUNC:
        close_all(descriptors)
        raise DescriptorsLostError(payload)
    return payload, descriptors


def close_all(descriptors: Sequence[int]) -> None:
    """Close each of them."""
    for descriptor in descriptors:
        os.close(descriptor)
