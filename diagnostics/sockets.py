"""Names, addresses and ports of this host, asked of the kernel; tests give a made-up network."""

import contextlib
import errno
import ipaddress
import socket
from dataclasses import dataclass

_ROUTE_PROBE_PORT = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class BindProblem:
    """Why a port cannot be bound."""

    code: int
    text: str

    @property
    def is_in_use(self) -> bool:
        """Whether somebody else has it."""
        return self.code == errno.EADDRINUSE

    @property
    def is_foreign_address(self) -> bool:
        """Whether the address belongs to no interface of this host."""
        return self.code == errno.EADDRNOTAVAIL


class Network:
    """The network as this process sees it; nothing is sent."""

    def host_name(self) -> str:
        """The name of this host."""
        return socket.gethostname()

    def interface_names(self) -> tuple[str, ...]:
        """All interfaces of this network namespace."""
        return tuple(name for _, name in socket.if_nameindex())

    def addresses_of(self, name: str) -> tuple[str, ...]:
        """What the name resolves to, nothing if it doesn't; may block for as long as DNS does."""
        try:
            found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        except (socket.gaierror, UnicodeError):
            return ()
        return tuple(dict.fromkeys(str(entry[4][0]).split("%")[0] for entry in found))

    def address_toward(self, address: str) -> str | None:
        """Our own address on the way to `address`; None without a route. Sends nothing."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((address, _ROUTE_PROBE_PORT))
            except OSError:
                return None
            return str(probe.getsockname()[0]).split("%")[0]

    def bind_problem(self, address: str, port: int) -> BindProblem | None:
        """Why a TCP socket cannot be bound there; None if it can (it is closed again).

        A port whose last connections are in TIME_WAIT counts as free, a listener does not.
        """
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with contextlib.ExitStack() as stack:
            try:
                probe = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((address, port))
                probe.listen(1)
            except OSError as error:
                return BindProblem(code=error.errno or 0, text=error.strerror or str(error))
        return None

    def is_local(self, address: str) -> bool:
        """Whether an interface of this host has the address."""
        return self.bind_problem(address, 0) is None


def is_loopback(address: str) -> bool:
    """Whether the address reaches this host only."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"
