"""The other nodes as the engine core sees them: calls go to their launchers, replies come back.

    send --> hub --> launcher of each node --> its ring --> its workers
    RpcClient <-- hub <-- launcher <-- reply rings <-- its workers

Everything comes in the hub's thread. A node that is lost, or whose workers failed, is told to the
`FirstCause`; what a node says of ranks that are not its own is refused.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from vcli.runtime.errors import FailureReport
from vcli.runtime.executor.base import RpcCall
from vcli.runtime.executor.node_messages import (
    TO_CORE,
    AskNode,
    FrameKind,
    NodeActivity,
    NodeFailed,
    NodeHello,
    NodeLinks,
    NodeReady,
    NodeSaid,
    StopNode,
    lost_node_report,
    message_frames,
)
from vcli.runtime.executor.pending_call import PendingCall
from vcli.runtime.executor.rpc import RpcClient
from vcli.runtime.ipc.codec import decode
from vcli.runtime.ipc.node_endpoint import Event, Gone, Received
from vcli.runtime.ipc.plain import from_plain, to_plain
from vcli.runtime.ipc.remote import NodeHub
from vcli.runtime.log import get_logger
from vcli.runtime.messages import ChildMessage
from vcli.runtime.process.failures import report_error
from vcli.runtime.process.first_cause import FirstCause
from vcli.runtime.worker.call_messages import (
    ALL_RANKS,
    CallHeader,
    CallKind,
    RankActivity,
    ReplyHeader,
)
from vcli.runtime.worker.progress import RankProgress
from vcli.topology.errors import VcliError
from vcli.topology.names import TITLE_PREFIX
from vcli.topology.plan import RankPlan

logger = get_logger(__name__)

#: Small, and the network is fast: what does not go out in this time goes nowhere.
_FLUSH_S: Final = 0.5


@dataclass(slots=True)
class _Node:
    """One other node. `peer` is None until its launcher has come."""

    node_rank: int
    host: str
    ranks: frozenset[int]
    peer: bytes | None = None
    pid: int | None = None
    ready: NodeReady | None = None
    activity: dict[int, RankActivity] = field(default_factory=dict)
    stopped: dict[int, str] = field(default_factory=dict)
    activity_s: float = 0.0
    answered: int = 0
    progress: tuple[RankProgress, ...] = ()


class RemoteNodes:
    """The nodes of `ranks`, by the hub that they connect to; `ready` is done when all are."""

    def __init__(
        self,
        links: NodeLinks,
        ranks: Sequence[RankPlan],
        *,
        rpc: RpcClient,
        cause: FirstCause,
        on_message: Callable[[ChildMessage], None],
    ) -> None:
        self.ready: Future[None] = Future()
        self._links = links
        self._rpc = rpc
        self._cause = cause
        self._on_message = on_message
        self._titles = {rank.rank: rank.title.removeprefix(TITLE_PREFIX) for rank in ranks}
        self._nodes = {
            node_rank: _Node(
                node_rank,
                links.hosts[node_rank],
                frozenset(rank.rank for rank in ranks if rank.node_rank == node_rank),
            )
            for node_rank in sorted({rank.node_rank for rank in ranks})
        }
        self._by_peer: dict[bytes, _Node] = {}
        self._reply_headers = msgspec.msgpack.Decoder(ReplyHeader)
        self._num_asked = 0
        self._answered = threading.Condition()
        self._stop_lock = threading.Lock()
        self._is_stopping = False
        with socket.socket(fileno=links.listen_fd) as listener:
            os.set_inheritable(listener.fileno(), False)
            self._hub = NodeHub(listener, links.key, self._on_event)

    @property
    def pids(self) -> dict[str, int]:
        """Pids on their own nodes, by title."""
        return {
            title: pid
            for node in self._nodes.values()
            if node.ready is not None
            for title, pid in node.ready.pids.items()
        }

    def start(self) -> None:
        """Let the launchers in."""
        self._hub.start()

    def send(
        self, pending: PendingCall, call: RpcCall, payload: tuple[CallKind, list[Any]]
    ) -> None:
        """Give a booked call to every node.

        Raises:
            NotPlainError: the job has no token, and the call needs a pickle.
        """
        kind, buffers = payload
        if not self._links.key.is_secret:
            buffers = to_plain(buffers)
        reply_rank = ALL_RANKS if call.reply_rank is None else call.reply_rank
        header = msgspec.msgpack.encode(CallHeader(pending.call_id, kind, call.name, reply_rank))
        frames = [FrameKind.CALL.value, header, *(bytes(buffer) for buffer in buffers)]
        for node in self._nodes.values():
            if node.peer is not None:
                self._hub.send(node.peer, frames)

    def activity(self, rank: int) -> RankActivity | None:
        """What a rank does, as its node last said."""
        node = next(node for node in self._nodes.values() if rank in node.ranks)
        doing = node.activity.get(rank)
        if doing is None:
            return None
        return msgspec.structs.replace(doing, age_s=time.monotonic() - node.activity_s)

    @property
    def stopped(self) -> dict[int, str]:
        """What holds the ranks whose process is stopped, as their nodes last said."""
        nodes = self._nodes.values()
        return {rank: hold for node in nodes for rank, hold in node.stopped.items()}

    def progress(self, timeout_s: float) -> dict[int, RankProgress]:
        """Ask all nodes in which collective their ranks are; who does not answer is not in it.

        One thread asks.
        """
        asked_s = time.monotonic()
        self._num_asked += 1
        number, nodes = self._num_asked, self._nodes.values()
        for node in nodes:
            if node.peer is not None:
                self._hub.send(node.peer, message_frames(AskNode(number=number)))
        with self._answered:
            self._answered.wait_for(
                lambda: self._is_stopping or all(node.answered == number for node in nodes),
                timeout_s,
            )
            # The answers were written after the question: they are no older than it.
            age_s = time.monotonic() - asked_s
            return {
                line.rank: msgspec.structs.replace(line, age_s=age_s)
                for node in nodes
                if node.answered == number
                for line in node.progress
            }

    def describe_missing(self) -> str:
        """Which nodes are not ready."""
        missing = [node for node in self._nodes.values() if node.ready is None]
        return "; ".join(
            f"node {node.node_rank} ({node.host}) "
            + ("has not come" if node.peer is None else "has ranks that are not ready")
            for node in missing
        )

    def stop(self, report: FailureReport | None) -> None:
        """Tell all nodes to end their workers, and why. What ends now is no failure."""
        with self._stop_lock:
            if self._is_stopping:
                return
            self._is_stopping = True
        with self._answered:
            self._answered.notify()
        for node in self._nodes.values():
            if node.peer is not None:
                self._hub.send(node.peer, message_frames(StopNode(report=report)))

    def close(self) -> None:
        """End the connections."""
        self._hub.close(_FLUSH_S)

    # ---- what comes, in the hub's thread ----------------------------------------------------

    def _on_event(self, event: Event) -> None:
        if isinstance(event, Gone):
            self._on_gone(event)
        elif isinstance(event, Received):
            try:
                self._on_frames(event)
            except (msgspec.MsgspecError, ValueError, IndexError, VcliError) as error:
                # From somebody who has the key and is no launcher of this version: nothing is
                # done with it, and the peer is told as a failure if it is one of ours.
                logger.warning("a message from %s is refused: %s", event.address, error)
                node = self._by_peer.get(event.peer)
                if node is not None:
                    self._cause.observe(self._lost(node, f"it sent what is no message: {error}"))

    def _on_gone(self, event: Gone) -> None:
        node = self._by_peer.pop(event.peer, None)
        if node is not None and not self._is_stopping:
            self._cause.observe(self._lost(node, event.reason))

    def _on_frames(self, event: Received) -> None:
        kind, *frames = event.frames
        node = self._by_peer.get(event.peer)
        if node is not None and kind == FrameKind.REPLY:
            self._on_reply(node, frames)
            return
        message = TO_CORE.decode(frames[0])
        if isinstance(message, NodeHello):
            self._on_hello(event, message)
        elif node is None:
            raise ValueError("it did not say who it is")
        elif isinstance(message, NodeSaid):
            self._on_message(message.message)
        elif isinstance(message, NodeReady):
            node.ready = message
            are_ready = all(node.ready is not None for node in self._nodes.values())
            if are_ready and not self.ready.done():
                self.ready.set_result(None)
        elif isinstance(message, NodeActivity):
            self._on_activity(node, message)
        elif isinstance(message, NodeFailed) and not self._is_stopping:
            self._cause.observe(message.report)

    def _on_activity(self, node: _Node, message: NodeActivity) -> None:
        told = {*message.by_rank, *message.stopped, *(line.rank for line in message.progress)}
        if not told <= node.ranks:
            raise ValueError(f"ranks {sorted(told - node.ranks)} are not on node {node.node_rank}")
        node.activity, node.activity_s = message.by_rank, time.monotonic()
        if message.answers:
            with self._answered:
                node.answered, node.progress = message.answers, message.progress
                self._answered.notify()
        else:
            node.stopped = message.stopped

    def _on_hello(self, event: Received, hello: NodeHello) -> None:
        node = self._nodes.get(hello.node_rank)
        if hello.session != self._links.session or node is None:
            raise ValueError("it is not of this job")
        if node.peer is not None:
            raise ValueError(f"node {hello.node_rank} has come already")
        node.peer, node.pid = event.peer, hello.pid
        self._by_peer[event.peer] = node
        logger.info("node %d (%s) is here", node.node_rank, node.host)

    def _on_reply(self, node: _Node, frames: list[bytes]) -> None:
        rank = int.from_bytes(frames[0], "little")
        if rank not in node.ranks:
            raise ValueError(f"rank {rank} is not on node {node.node_rank}")
        header = self._reply_headers.decode(frames[1])
        failure = header.failure
        if failure is not None and not header.has_output:
            self._rpc.deliver_failure(header.call_id, failure)
            return
        try:
            payload = frames[2:]
            result = decode(payload if self._links.key.is_secret else from_plain(payload))
        except Exception as error:  # noqa: BLE001 - border: unpickling runs foreign code
            self._rpc.deliver_failure(header.call_id, self._unreadable(rank, error))
            return
        if failure is None:
            self._rpc.deliver(rank, header.call_id, result)
        else:
            self._rpc.deliver_output_of_failed(rank, header.call_id, failure, result)

    def _unreadable(self, rank: int, error: Exception) -> FailureReport:
        return report_error(
            error, process=self._titles[rank], phase="reply", rank=rank, is_serving=True
        )

    def _lost(self, node: _Node, reason: str) -> FailureReport:
        phase = "start" if node.ready is None else "serving"
        return lost_node_report(node.node_rank, node.host, reason, phase=phase, pid=node.pid)
