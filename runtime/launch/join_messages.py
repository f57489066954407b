"""What launchers say to each other: to join, while the job runs, and to end it. Never a pickle.

node I  Hello                       here I am, and this is what I was started with
        Leaving                     somebody stops me
        Failed                      my workers are of no use any more
node 0  Waiting                     you are in, these are missing
        Reject                      you can't be in, or the job can't be
        Start                       all are here and agree
        Serving                     the port is open
        Stop                        the job ends
"""

from typing import Final

import msgspec

from vcli.runtime.errors import FailureReport

PROTOCOL: Final = 1


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """A node and what it was started with; `document` is what must be equal on all nodes."""

    node_rank: int
    host: str
    pid: int
    document: dict[str, str]


class Leaving(msgspec.Struct, frozen=True, kw_only=True, tag="leaving"):
    """The launcher is about to end with this exit status; a signal's means: end the job."""

    status: int


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The first cause of a failure on the node."""

    report: FailureReport


class Waiting(msgspec.Struct, frozen=True, kw_only=True, tag="waiting"):
    """The nodes that have not come."""

    missing: list[int]


class Reject(msgspec.Struct, frozen=True, kw_only=True, tag="reject"):
    """Why there will be no job with this node, or at all."""

    status: int
    message: str
    hint: str = ""


class Start(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """All nodes agree. The core is at `core_port`; `session` tells it who belongs to the job."""

    session: str
    core_port: int
    hosts: list[str]


class Serving(msgspec.Struct, frozen=True, kw_only=True, tag="serving"):
    """Requests are taken at `url`."""

    url: str


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag="stop"):
    """The job ends with this exit status; `report` is its failure, if it ends by one."""

    status: int
    reason: str
    report: FailureReport | None = None


ToLeader = Hello | Leaving | Failed
ToNode = Waiting | Reject | Start | Serving | Stop
TO_LEADER: Final = msgspec.msgpack.Decoder(ToLeader)
TO_NODE: Final = msgspec.msgpack.Decoder(ToNode)
_ENCODER: Final = msgspec.msgpack.Encoder()


def frames_of(message: ToLeader | ToNode) -> list[bytes]:
    """A message as frames."""
    return [_ENCODER.encode(message)]
