"""Node 0 towards the launchers of the other nodes, from the join to the end of the job.

join     all are there and agree
watch    a launcher that is lost, or says that its workers failed, is a failure of the job
stop     the others are told why the job ends
"""

import asyncio
import threading
from collections.abc import Callable

import msgspec

from vcli.runtime.config import EngineConfig
from vcli.runtime.errors import FailureReport
from vcli.runtime.executor.node_messages import NodeLinks, lost_node_report
from vcli.runtime.ipc.node_endpoint import Event, Gone, Received
from vcli.runtime.ipc.remote import NodeHub
from vcli.runtime.launch.gathering import Gathering, Member
from vcli.runtime.launch.inbox import Inbox
from vcli.runtime.launch.join import resolve
from vcli.runtime.launch.join_messages import (
    TO_LEADER,
    Failed,
    Leaving,
    Serving,
    Start,
    Stop,
    ToNode,
    frames_of,
)
from vcli.runtime.launch.node import MasterSockets, NodeSettings, new_session
from vcli.runtime.launch.stop_signals import StopSignals
from vcli.runtime.log import get_logger
from vcli.runtime.worker.dispatch import StoreAddress
from vcli.topology.errors import ExitStatus

logger = get_logger(__name__)

_FLUSH_S = 0.5


class Leader:
    """Listens from its construction on, so that a wrong address or port is found at once.

    Raises:
        ConfigError: the master's address or port can't be listened on.
    """

    def __init__(
        self, config: EngineConfig, settings: NodeSettings, note: Callable[[str], None]
    ) -> None:
        self._config = config
        self._settings = settings
        self._address = resolve(config.parallel.master_addr)
        self._sockets = MasterSockets.bind(self._address, config)
        self._join_settings = settings.join_settings(config, note)
        self._note = note
        self._session = new_session()
        self._members: dict[int, Member] = {}
        self._hub: NodeHub | None = None
        self._inbox: Inbox[Event] | None = None
        self._on_failure: Callable[[FailureReport], None] | None = None
        self._on_leave: Callable[[Member, ExitStatus], None] | None = None
        self._is_stopping = False
        self._is_serving = False
        self._lock = threading.Lock()

    async def join(self, signals: StopSignals) -> bool:
        """Wait for the other nodes; False when a signal came first.

        Raises:
            NodesError: somebody is missing at the deadline (exit 3), or disagrees (exit 4).
        """
        inbox: Inbox[Event] = Inbox()
        self._inbox = inbox
        self._hub = NodeHub(self._sockets.control, self._settings.key, self._on_event)
        self._hub.start()
        with inbox.with_signals(signals):
            members = await Gathering(self._join_settings, self._hub, inbox).run(signals)
        if members is None:
            return False
        self._members = members
        with self._lock:
            self._inbox = None
        await asyncio.sleep(0)  # what the hub's thread has put is in the queue then
        for event in inbox.drain():
            self._on_event(event)
        hosts = self._hosts()
        self._tell(
            Start(
                session=self._session,
                core_port=int(self._sockets.core.getsockname()[1]),
                hosts=list(hosts),
            )
        )
        self._note(
            f"join   {len(hosts)} nodes agree: "
            + ", ".join(f"node{rank} {host}" for rank, host in enumerate(hosts))
        )
        return True

    def watch(
        self,
        *,
        on_failure: Callable[[FailureReport], None],
        on_leave: Callable[[Member, ExitStatus], None],
    ) -> None:
        """Before `join`: who shall hear of a node that fails, is lost, or is stopped by its user.

        Both are called in the hub's thread, from the end of the join on.
        """
        self._on_failure, self._on_leave = on_failure, on_leave

    @property
    def core_links(self) -> NodeLinks:
        """What the engine core needs; it inherits `core_fds`."""
        host, port = self._sockets.store.getsockname()[:2]
        return NodeLinks(
            listen_fd=self._sockets.core.fileno(),
            store=StoreAddress(host=host, port=port, listen_fd=self._sockets.store.fileno()),
            key=self._settings.key,
            session=self._session,
            hosts=self._hosts(),
            interface=self._settings.interface_towards(self._address),
        )

    def let_go_of_core(self) -> None:
        """The core has its sockets: when it ends, nobody may wait in vain at ours."""
        self._sockets.core.close()
        self._sockets.store.close()

    def tell_serving(self, url: str) -> None:
        """The port is open."""
        self._is_serving = True
        self._tell(Serving(url=url))

    def stop(self, status: ExitStatus, report: FailureReport | None) -> None:
        """Tell the others that the job ends, and why; what they do from now on is no failure."""
        if self._is_stopping:
            return
        self._is_stopping = True
        reason = f"node 0 ({self._join_settings.host}) ended the job"
        self._tell(Stop(status=int(status), reason=reason, report=report))

    def close(self) -> None:
        """End the connections, after what was said went out."""
        self._is_stopping = True
        if self._hub is not None:
            self._hub.close(_FLUSH_S)
        self._sockets.close()

    def _hosts(self) -> tuple[str, ...]:
        others = [self._members[rank].host for rank in sorted(self._members)]
        return (self._join_settings.host, *others)

    def _tell(self, message: ToNode) -> None:
        if self._hub is None:
            return
        for member in self._members.values():
            self._hub.send(member.peer, frames_of(message))

    # ---- in the hub's thread ----------------------------------------------------------------

    def _on_event(self, event: Event) -> None:
        with self._lock:
            if self._inbox is not None:
                self._inbox.put(event)
                return
        member = next(
            (
                member
                for member in self._members.values()
                if isinstance(event, Gone | Received) and member.peer == event.peer
            ),
            None,
        )
        if member is None or self._is_stopping:
            return
        assert self._on_failure is not None
        assert self._on_leave is not None
        if isinstance(event, Gone):
            phase = "serving" if self._is_serving else "start"
            self._on_failure(
                lost_node_report(
                    member.node_rank, member.host, event.reason, phase=phase, pid=member.pid
                )
            )
        elif isinstance(event, Received):
            try:
                message = TO_LEADER.decode(event.frames[0])
            except msgspec.MsgspecError:
                logger.warning("%s sent what is no message", member)
                return
            if isinstance(message, Failed):
                self._on_failure(message.report)
            elif isinstance(message, Leaving):
                is_term = message.status == ExitStatus.TERMINATED
                status = ExitStatus.TERMINATED if is_term else ExitStatus.INTERRUPTED
                self._on_leave(member, status)
