"""What a node of a job needs beside its configuration, and the sockets of node 0."""

import errno
import os
import secrets
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from vcli.runtime.config import EngineConfig
from vcli.runtime.ipc.curve import JobKey
from vcli.runtime.launch.agreement import job_document
from vcli.runtime.launch.join import JoinSettings
from vcli.topology.errors import ConfigError

_CONTROL_OFFSET: Final = 1
_CORE_OFFSET: Final = 2
_ANY_PORT: Final = 40000


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """How this node meets the others.

    `command_for` gives the line to type on a node, `interfaces` the name of the interface of each
    own address.
    """

    key: JobKey
    join_timeout_s: float
    command_for: Callable[[int], str]
    interfaces: Mapping[str, str]

    def join_settings(self, config: EngineConfig, note: Callable[[str], None]) -> JoinSettings:
        """The settings of the join."""
        return JoinSettings(
            nnodes=config.parallel.nnodes,
            node_rank=config.parallel.node_rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            document=job_document(config),
            key=self.key,
            timeout_s=self.join_timeout_s,
            note=note,
            command_for=self.command_for,
        )

    def interface_towards(self, address: str) -> str:
        """The interface by which `address` is reached, or that has it; "" where it is not known."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((address, _ANY_PORT))  # sends nothing: it only asks for the route
            except OSError:
                return ""
            return self.interfaces.get(str(probe.getsockname()[0]), "")


def control_port(config: EngineConfig) -> int:
    """Where nodes join."""
    return config.parallel.master_port + _CONTROL_OFFSET


@dataclass(frozen=True, slots=True)
class MasterSockets:
    """What node 0 listens on: the join, torch's store, the engine core."""

    control: socket.socket
    store: socket.socket
    core: socket.socket

    @classmethod
    def bind(cls, address: str, config: EngineConfig) -> "MasterSockets":
        """Listen on the master's address, and on no other.

        Raises:
            ConfigError: it is no address of this host, or a port is taken.
        """
        port = config.parallel.master_port
        bound: list[socket.socket] = []
        try:
            bound.append(_listen(address, port + _CONTROL_OFFSET, port))
            bound.append(_listen(address, port, port))
            bound.append(_listen_near(address, port + _CORE_OFFSET))
        except BaseException:
            for sock in bound:
                sock.close()
            raise
        return cls(*bound)

    def close(self) -> None:
        """Close this process' ends."""
        for sock in (self.control, self.store, self.core):
            sock.close()


def new_session() -> str:
    """The secret that says who belongs to this start of the job."""
    return secrets.token_hex(16)


def _listen(address: str, port: int, master_port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, backlog=128)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(
                f"--master-addr {address} is no address of this host, so this is not node 0",
                hint="--node-rank 1 or higher here, or --master-addr with an address of this host",
            ) from error
        raise ConfigError(
            f"port {port} of {address} cannot be used: {error.strerror}",
            hint=f"--master-port {master_port + 10} on all nodes",
        ) from error


def _listen_near(address: str, port: int) -> socket.socket:
    """At `port` where it is free, for firewalls; else anywhere: the others are told."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, backlog=128)
    except (OSError, OverflowError):
        return socket.create_server((address, 0), family=family, backlog=128)
