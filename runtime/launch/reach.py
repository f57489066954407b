"""Why a node cannot be reached, as the kernel tells it."""

import errno
import socket
from dataclasses import dataclass
from typing import Final

_CONNECT_S: Final = 2.0
_GREETING_S: Final = 1.0
#: How libzmq greets whoever connects.
_GREETING: Final = b"\xff"

_REASONS: Final = {
    errno.ECONNREFUSED: "connection refused: nobody listens there yet",
    errno.EHOSTUNREACH: "no route to host: it is down, or not in this network",
    errno.ENETUNREACH: "network unreachable: this host has no route there",
    errno.ETIMEDOUT: "no answer: it is down, or a firewall drops what is sent there",
}


@dataclass(frozen=True, slots=True)
class Reach:
    """Whether something listens there, and whether it talks like a node."""

    place: str
    is_open: bool
    is_node: bool
    reason: str

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}"


def find_out(address: str, port: int) -> Reach:
    """Try to connect; takes at most three seconds."""
    place = f"{address}:{port}"
    try:
        with socket.create_connection((address, port), timeout=_CONNECT_S) as connection:
            connection.settimeout(_GREETING_S)
            greeting = connection.recv(1)
    except TimeoutError:
        return _closed_or_silent(place, address, port)
    except OSError as error:
        reason = _REASONS.get(error.errno or 0, str(error))
        return Reach(place, is_open=False, is_node=False, reason=reason)
    if greeting == _GREETING:
        return Reach(place, is_open=True, is_node=True, reason="it listens and does not let us in")
    return Reach(place, is_open=True, is_node=False, reason="what listens there is no vcli node")


def _closed_or_silent(place: str, address: str, port: int) -> Reach:
    try:
        socket.create_connection((address, port), timeout=_CONNECT_S).close()
    except OSError:
        return Reach(place, is_open=False, is_node=False, reason=_REASONS[errno.ETIMEDOUT])
    return Reach(place, is_open=True, is_node=False, reason="what listens there says nothing")
