"""Node 0's side of the join: takes nodes in, compares them with itself, names who is missing."""

import time
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from vcli.runtime.ipc.node_endpoint import Event, Gone, Received, Refused
from vcli.runtime.ipc.remote import NodeHub
from vcli.runtime.launch.agreement import differences
from vcli.runtime.launch.inbox import Inbox, Signalled
from vcli.runtime.launch.join import NEWS_S, TOKEN_HINT, JoinSettings, NodesError, named_nodes
from vcli.runtime.launch.join_messages import (
    TO_LEADER,
    Hello,
    Leaving,
    Reject,
    Waiting,
    frames_of,
)
from vcli.runtime.launch.stop_signals import StopSignals
from vcli.topology.errors import ExitStatus

#: A node whose key does not fit tries again several times within this, and so learns why.
_REFUSAL_S: Final = 2.5
_ENDED_BY_USER: Final = (ExitStatus.INTERRUPTED, ExitStatus.TERMINATED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """Another node that is in."""

    peer: bytes
    node_rank: int
    host: str
    pid: int
    address: str

    def __str__(self) -> str:
        return f"node {self.node_rank} ({self.host}, {self.address})"


class Gathering:
    """Node 0's side. Events of `hub` come into `inbox`."""

    def __init__(self, settings: JoinSettings, hub: NodeHub, inbox: Inbox[Any]) -> None:
        self._settings = settings
        self._hub = hub
        self._inbox = inbox
        self._members: dict[int, Member] = {}
        self._strangers: set[str] = set()

    async def run(self, signals: StopSignals) -> dict[int, Member] | None:
        """The other nodes by rank, once all are there and agree; None: a signal came.

        Raises:
            NodesError: somebody is missing at the deadline, disagrees, or was stopped by its user.
        """
        limit_s = self._settings.timeout_s
        deadline = time.monotonic() + limit_s
        next_news = time.monotonic()
        while self._missing:
            now = time.monotonic()
            if now >= deadline:
                raise self._ends(self._missing_error(limit_s))
            if now >= next_news:
                next_news = now + NEWS_S
                self._tell_news(deadline - now)
            event = await self._inbox.get(min(deadline, next_news) - now)
            if isinstance(event, Signalled):
                text = f"node 0 ({self._settings.host}) was stopped by its user"
                self._ends(NodesError(text, signals.exit_status))
                return None
            if event is not None:
                await self._handle(event)
        return self._members

    @property
    def _missing(self) -> list[int]:
        return [rank for rank in range(1, self._settings.nnodes) if rank not in self._members]

    async def _handle(self, event: Event) -> None:
        if isinstance(event, Received):
            self._on_received(event)
        elif isinstance(event, Gone):
            member = self._member_of(event.peer)
            if member is not None:
                del self._members[member.node_rank]
                self._settings.note(f"join   {member} went away: {event.reason}")
        elif isinstance(event, Refused) and event.is_key:
            raise self._ends(self._refusal_error(await self._name_refused(event.address)))
        elif isinstance(event, Refused) and event.address not in self._strangers:
            self._strangers.add(event.address)
            who = event.address or "somebody"
            self._settings.note(f"join   {who} came and is no vcli node")

    async def _name_refused(self, address: str) -> str:
        """Where the refused node is, and time for it to find out that it is refused.

        A connection may be gone before anybody could see whose it was; it comes several times.
        """
        deadline = time.monotonic() + _REFUSAL_S
        while (left_s := deadline - time.monotonic()) > 0:
            event = await self._inbox.get(left_s)
            if isinstance(event, Refused) and not address:
                address = event.address
            elif isinstance(event, Signalled):
                break
        return address or "an unknown address"

    def _on_received(self, event: Received) -> None:
        try:
            message = TO_LEADER.decode(event.frames[0])
        except msgspec.MsgspecError as error:
            self._settings.note(f"join   {event.address} sent what is no message: {error}")
            return
        if isinstance(message, Hello):
            self._on_hello(event, message)
            return
        member = self._member_of(event.peer)
        if member is None or not isinstance(message, Leaving):
            return
        del self._members[member.node_rank]
        if message.status in _ENDED_BY_USER:
            raise self._ends(NodesError(f"{member} was stopped by its user", message.status))
        self._settings.note(f"join   {member} left")

    def _on_hello(self, event: Received, hello: Hello) -> None:
        member = Member(
            peer=event.peer,
            node_rank=hello.node_rank,
            host=hello.host,
            pid=hello.pid,
            address=event.address,
        )
        there = self._members.get(hello.node_rank)
        if hello.node_rank == 0 or there is not None:
            holder = str(there or f"node 0 ({self._settings.host})")
            text = f"--node-rank {hello.node_rank} is taken by {holder}"
            self._send(event.peer, Reject(status=ExitStatus.PEERS_DISAGREE, message=text))
            self._settings.note(f"join   refused {member}, pid {hello.pid}: {text}")
            return
        lines = differences(self._settings.document, hello.document, node_rank=hello.node_rank)
        self._members[hello.node_rank] = member
        if lines:
            raise self._ends(
                NodesError(
                    f"node 0 ({self._settings.host}) and {member} disagree:\n  "
                    + "\n  ".join(lines),
                    ExitStatus.PEERS_DISAGREE,
                    hint="start all nodes with the same flags, versions and model",
                )
            )
        self._settings.note(f"join   {member} is here, pid {hello.pid}")
        self._send(event.peer, Waiting(missing=self._missing))

    def _tell_news(self, left_s: float) -> None:
        settings, missing = self._settings, self._missing
        settings.note(
            f"join   {settings.nnodes - len(missing)}/{settings.nnodes} nodes, "
            f"missing {named_nodes(missing)}, {left_s:.0f} s left"
        )
        for rank in missing:
            settings.note(f"         run there: {settings.command_for(rank)}")
        for member in self._members.values():
            self._send(member.peer, Waiting(missing=missing))

    def _missing_error(self, limit_s: float) -> NodesError:
        missing = self._missing
        return NodesError(
            f"{named_nodes(missing)} did not come within {limit_s:g} s",
            ExitStatus.PEERS_MISSING,
            hint=f"on node {missing[0]}: {self._settings.command_for(missing[0])}",
        )

    def _refusal_error(self, address: str) -> NodesError:
        if self._settings.key.is_secret:
            what = f"the job token of a node at {address} is another one, or it has none"
        else:
            what = f"a node at {address} has a job token, node 0 has none"
        return NodesError(
            f"refused: {what}",
            ExitStatus.PEERS_DISAGREE,
            hint=TOKEN_HINT,
        )

    def _ends(self, error: NodesError) -> NodesError:
        """Tell all who are in that there will be no job."""
        reject = Reject(status=error.exit_status, message=error.message, hint=error.hint)
        for member in self._members.values():
            self._send(member.peer, reject)
        return error

    def _send(self, peer: bytes, message: Reject | Waiting) -> None:
        self._hub.send(peer, frames_of(message))

    def _member_of(self, peer: bytes) -> Member | None:
        return next((member for member in self._members.values() if member.peer == peer), None)
