"""Nodes meet before anything of the job is started: who is missing, who disagrees.

    node I  --Hello-->  node 0         as soon as either finds the other
            <--Waiting--               each five seconds, with who is missing
            <--Start--                 all are there and agree
            <--Reject--                they don't, or somebody did not come in time

Both sides may start first, and a node that left before the start may come again. `gathering` is
node 0's side, `joining` that of every other node.
"""

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from vcli.runtime.ipc.curve import JobKey
from vcli.topology.errors import ExitStatus, VcliError

#: Between two lines that say who is missing.
NEWS_S: Final = 5.0

TOKEN_HINT: Final = "give all nodes the same --job-token-file or VCLI_JOB_TOKEN"


class NodesError(VcliError):
    """The nodes did not come together; `exit_status` says whether they are missing or disagree."""

    def __init__(self, message: str, status: int, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.exit_status = ExitStatus(status)


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinSettings:
    """What a join needs to know beside the plan. `command_for` gives the line for a node."""

    nnodes: int
    node_rank: int
    host: str
    pid: int
    document: Mapping[str, str]
    key: JobKey
    timeout_s: float
    note: Callable[[str], None]
    command_for: Callable[[int], str]


def resolve(host: str) -> str:
    """The address of the master, by which interfaces are chosen.

    Raises:
        NodesError: the name is not known here.
    """
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except (socket.gaierror, UnicodeError) as error:
        raise NodesError(
            f"--master-addr {host} is not known here: {error}",
            ExitStatus.USAGE,
            hint="--master-addr with the IP address of node 0",
        ) from error


def named_nodes(ranks: list[int]) -> str:
    """Nodes in words."""
    word = "node" if len(ranks) == 1 else "nodes"
    return f"{word} {', '.join(map(str, ranks))}"
