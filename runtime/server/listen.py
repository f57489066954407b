"""The listening socket, bound before anything slow is started.

A wrong or taken port is found in the first milliseconds, and whoever holds it is named.
"""

import contextlib
import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vcli.topology.errors import ConfigError

_TCP_LISTEN = "0A"
_NUM_PORTS_TRIED = 20
_HOST_HINT = "use --host 127.0.0.1 for this machine only, --host 0.0.0.0 for all networks"


def bind_listener(host: str, port: int) -> socket.socket:
    """A TCP socket bound to `host` and `port` (0: a free one), which does not listen yet.

    It is bound without SO_REUSEADDR where that works: on Linux two sockets with it can be bound to
    one port until one of them listens, and the later server would start for minutes only to fail.

    Raises:
        ConfigError: not an address of this machine, a port that is taken or needs privileges.
    """
    if not 0 <= port <= 65535:
        raise ConfigError(f"port {port} is not between 0 and 65535", hint="use --port 8000")
    family, address = _resolve(host, port)
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        try:
            listener.bind(address)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            # Perhaps only connections of an earlier server in TIME_WAIT.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
    except OSError as error:
        listener.close()
        raise _bind_error(error, host, port, family) from error
    return listener


def start_listening(listener: socket.socket, *, backlog: int = 2048) -> None:
    """Open the port. From here on the accepted connections do not hinder the next server's bind.

    Raises:
        ConfigError: another process listens there by now.
    """
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.listen(backlog)
    except OSError as error:
        host, port = listener.getsockname()[:2]
        raise _bind_error(error, host, port, listener.family) from error


def url_of(listener: socket.socket) -> str:
    """The URL of a bound socket, with the port that the system chose for port 0."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    name = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not name:
        # An unset variable of a script: it must not mean all networks.
        raise ConfigError(f"host {host!r} is empty", hint=_HOST_HINT)
    try:
        found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        reason = error.strerror if isinstance(error, socket.gaierror) else error
        raise ConfigError(
            f"host {host!r} is not known: {reason}",
            hint=_HOST_HINT,
        ) from error
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)  # `localhost` means IPv4 first
    family, _, _, _, address = found[0]
    return family, address


def _bind_error(error: OSError, host: str, port: int, family: socket.AddressFamily) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        free = _free_port_after(host, port)
        return ConfigError(
            f"port {port} on {host or 'this machine'} is in use by {_holder(port)}",
            hint=f"use --port {free}" if free else "use --port 0 for a free one",
        )
    if error.errno == errno.EACCES:
        return ConfigError(
            f"port {port} is for privileged users (ports below {_first_free_port()} are)",
            hint="use --port 8000",
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return ConfigError(
            f"{host} is not an address of this machine",
            hint=_HOST_HINT,
        )
    kind = "IPv6" if family == socket.AF_INET6 else "IPv4"
    return ConfigError(f"cannot listen on {kind} address {host} port {port}: {error.strerror}")


def _free_port_after(host: str, port: int) -> int | None:
    for candidate in range(port + 1, min(port + _NUM_PORTS_TRIED, 65536)):
        family, address = _resolve(host, candidate)
        with socket.socket(family, socket.SOCK_STREAM) as probe, contextlib.suppress(OSError):
            probe.bind(address)
            return candidate
    return None


def _first_free_port() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").read_text())
    except (OSError, ValueError):
        return 1024


def _holder(port: int) -> str:
    """Who listens on `port`, as far as /proc shows it."""
    inodes = set(_listening_inodes(port))
    if not inodes:
        return "a process that has bound it and does not listen yet"
    for pid in _pids():
        with contextlib.suppress(OSError):
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    if str(link.readlink()) in inodes:
                        return f"pid {pid} ({_command_name(pid)})"
    return "another user's process"


def _listening_inodes(port: int) -> Iterator[str]:
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == _TCP_LISTEN and int(fields[1].rsplit(":", 1)[1], 16) == port:
                yield f"socket:[{fields[9]}]"


def _pids() -> list[int]:
    own = os.getpid()
    try:
        pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    except OSError:
        return []
    return sorted(pids, key=lambda pid: (pid == own, pid))


def _command_name(pid: int) -> str:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        words = [Path(word.decode(errors="replace")).name for word in command if word]
        return " ".join(words[:3]) or Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "gone meanwhile"
