"""What goes between an engine core and the launchers of the other nodes; never a pickle of theirs.

core      c, CallHeader, payload ...        a call for the node's workers, as it stands in the ring
          m, AskNode
          m, StopNode
launcher  m, NodeHello                      the first
          m, NodeSaid ... NodeReady         while its workers start
          r, rank, ReplyHeader, payload ... what a worker replied
          m, NodeActivity                   what its workers do now; also the answer to AskNode
          m, NodeFailed                     the first cause of a failure there

The first frame is the kind. Payloads are what `ipc.codec` gives, or `ipc.plain` without a token.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Final

import msgspec

from vcli.runtime.errors import FailureReport
from vcli.runtime.ipc.curve import JobKey
from vcli.runtime.messages import ChildMessage
from vcli.runtime.worker.call_messages import RankActivity
from vcli.runtime.worker.dispatch import StoreAddress
from vcli.runtime.worker.progress import RankProgress


class FrameKind(bytes, Enum):
    """The first frame of a message."""

    CALL = b"c"
    REPLY = b"r"
    MESSAGE = b"m"


class NodeHello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """Who the launcher is; `session` is the secret that the nodes got when they had joined."""

    session: str
    node_rank: int
    pid: int


class NodeSaid(msgspec.Struct, frozen=True, kw_only=True, tag="said"):
    """A start-up state of one of the node's workers."""

    message: ChildMessage


class NodeReady(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """All workers of the node can be called; their pids by title."""

    methods: list[str]
    pids: dict[str, int]


class NodeActivity(msgspec.Struct, frozen=True, kw_only=True, tag="activity"):
    """What the workers do now, by rank; those that do nothing are not in it.

    `stopped` are those whose process is stopped, with what continues it. In an answer `answers` is
    the number of the question, and `progress` has all ranks of the node.
    """

    by_rank: dict[int, RankActivity]
    stopped: dict[int, str] = {}
    progress: tuple[RankProgress, ...] = ()
    answers: int = 0


class NodeFailed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The node's workers are of no use any more."""

    report: FailureReport


class AskNode(msgspec.Struct, frozen=True, kw_only=True, tag="ask"):
    """Say now what the workers do, and in which collective each is."""

    number: int


class StopNode(msgspec.Struct, frozen=True, kw_only=True, tag="stop"):
    """End the node's workers; `report` is the failure that ended the others, if one did."""

    report: FailureReport | None = None


NodeMessage = NodeHello | NodeSaid | NodeReady | NodeActivity | NodeFailed
TO_CORE: Final = msgspec.msgpack.Decoder(NodeMessage)
TO_NODE: Final = msgspec.msgpack.Decoder(AskNode | StopNode)
_ENCODER: Final = msgspec.msgpack.Encoder()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLinks:
    """What an engine core needs to run ranks on other nodes.

    `listen_fd` is the socket where their launchers come to, `store` the torch store with rank 0's
    socket; both are inherited. `hosts` are the names of the nodes by rank, `interface` is this
    node's towards the others ("": not known).
    """

    listen_fd: int
    store: StoreAddress
    key: JobKey
    session: str
    hosts: tuple[str, ...]
    interface: str

    def fds(self) -> tuple[int, ...]:
        """The descriptors to inherit."""
        store_fd = self.store.listen_fd
        return (self.listen_fd,) if store_fd is None else (self.listen_fd, store_fd)


def message_frames(message: NodeMessage | AskNode | StopNode) -> list[bytes]:
    """A message as frames."""
    return [FrameKind.MESSAGE.value, _ENCODER.encode(message)]


def lost_node_report(
    node_rank: int, host: str, reason: str, *, phase: str, pid: int | None = None
) -> FailureReport:
    """A node whose launcher cannot be heard any more, in whoever's eyes."""
    return FailureReport(
        process=f"node{node_rank}",
        phase=phase,
        kind="NodeLost",
        message=f"its launcher is gone: {reason}",
        pid=pid,
        host=host,
        hint="look at the launcher's output there; a host that crashed or lost its network has "
        "none",
    )


def lost_core_report(host: str, reason: str, *, phase: str) -> FailureReport:
    """An engine core that cannot be heard: a consequence, whose cause its launcher tells."""
    return FailureReport(
        process="EngineCore",
        phase=phase,
        kind="PeerDiedError",
        message=f"node 0's engine core is gone: {reason}",
        host=host,
    )
