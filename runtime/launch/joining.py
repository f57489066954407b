"""The join as every node but node 0 does it: finds node 0, and waits with it for the rest."""

import asyncio
import time
from typing import Any, Final

from vcli.runtime.ipc.node_endpoint import Connected, Event, Gone, Received, Refused
from vcli.runtime.ipc.remote import NodeLink
from vcli.runtime.launch.inbox import Inbox, Signalled
from vcli.runtime.launch.join import NEWS_S, TOKEN_HINT, JoinSettings, NodesError, named_nodes
from vcli.runtime.launch.join_messages import (
    TO_NODE,
    Hello,
    Reject,
    Start,
    Waiting,
    frames_of,
)
from vcli.runtime.launch.reach import Reach, find_out
from vcli.topology.errors import ExitStatus

#: One handshake may also end because node 0 was just ended.
_REFUSALS: Final = 2


class Joining:
    """The side of every other node: finds node 0, and waits with it for the rest."""

    def __init__(self, settings: JoinSettings, address: str, port: int, inbox: Inbox[Any]) -> None:
        self._settings = settings
        self._address = address
        self._port = port
        self._inbox = inbox
        self._missing: list[int] | None = None
        self._refusals = 0
        self._was_foreign = False
        self.link = self._connect()

    async def run(self) -> Start | None:
        """What node 0 says when all are there; None: a signal came. `link` is open then.

        Raises:
            NodesError: node 0 did not come, or refuses.
        """
        settings = self._settings
        deadline = time.monotonic() + settings.timeout_s
        next_news = time.monotonic() + 1.0
        while True:
            now = time.monotonic()
            # Once node 0 is there its deadline counts: it names who is missing, to all.
            is_alone = self._missing is None
            if is_alone and now >= deadline:
                raise await self._late_error()
            if now >= next_news:
                next_news = now + NEWS_S
                left = f", {deadline - now:.0f} s left" if is_alone else ""
                settings.note(f"join   {await self._news()}{left}")
            wake_at = min(deadline, next_news) if is_alone else next_news
            event = await self._inbox.get(wake_at - now)
            if isinstance(event, Signalled):
                return None
            started = await self._handle(event)
            if started is not None:
                return started

    async def _handle(self, event: Event | None) -> Start | None:
        if isinstance(event, Received):
            message = TO_NODE.decode(event.frames[0])
            if isinstance(message, Reject):
                raise NodesError(message.message, message.status, hint=message.hint)
            if isinstance(message, Waiting):
                if self._missing is None:
                    self._settings.note(f"join   node 0 at {self._place} is here")
                self._missing = message.missing
            return message if isinstance(message, Start) else None
        if isinstance(event, Gone):
            self._settings.note(f"join   node 0 went away: {event.reason}")
            self._missing = None
            self.link.close()
            self.link = self._connect()
        elif isinstance(event, Connected):
            self._refusals = 0
        elif isinstance(event, Refused):
            await self._on_refused()
        return None

    async def _on_refused(self) -> None:
        """A closed handshake is a wrong key, if what listens there is a node at all."""
        reach = await asyncio.to_thread(find_out, self._address, self._port)
        if reach.is_node:
            self._refusals += 1
        elif reach.is_open and not self._was_foreign:
            self._was_foreign = True
            self._settings.note(f"join   {reach}")
        elif self._refusals and not reach.is_open:
            self._refusals += 1  # it refused us, said so, and ended
        if self._refusals < _REFUSALS:
            return
        mine = "another one than node 0" if self._settings.key.is_secret else "none, node 0 has one"
        raise NodesError(
            f"refused by node 0 at {self._place}: of job tokens this node has {mine}",
            ExitStatus.PEERS_DISAGREE,
            hint=TOKEN_HINT,
        )

    async def _late_error(self) -> NodesError:
        limit_s = self._settings.timeout_s
        reach = await self._reach()
        return NodesError(
            f"node 0 did not come within {limit_s:g} s: {reach}",
            ExitStatus.PEERS_MISSING,
            hint=f"on node 0: {self._settings.command_for(0)}",
        )

    async def _news(self) -> str:
        if self._missing is not None:
            return f"node 0 is here, missing {named_nodes(self._missing)}"
        return f"waiting for node 0: {await self._reach()}"

    async def _reach(self) -> Reach:
        return await asyncio.to_thread(find_out, self._address, self._port)

    def _connect(self) -> NodeLink:
        settings = self._settings
        link = NodeLink(self._address, self._port, settings.key, self._inbox.put)
        hello = Hello(
            node_rank=settings.node_rank,
            host=settings.host,
            pid=settings.pid,
            document=dict(settings.document),
        )
        link.send(frames_of(hello))
        link.start()
        return link

    @property
    def _place(self) -> str:
        return f"{self._address}:{self._port}"
