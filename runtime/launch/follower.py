"""A node without an engine core: joins node 0, runs its ranks, ends when the job does.

    launcher of node 0  <--link-->  this process  --ring-->  workers
    engine core         <--link-->       "

What ends it, whichever comes first: node 0 says so, a worker of its own fails, node 0 is lost, its
user stops it. All of it arrives in one inbox.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from vcli.runtime.config import EngineConfig
from vcli.runtime.errors import EngineDeadError, FailureReport, ReportedError, StartupError
from vcli.runtime.executor.multinode import CAUSE_WAIT_S
from vcli.runtime.executor.node_messages import (
    NodeFailed,
    NodeHello,
    NodeMessage,
    NodeReady,
    NodeSaid,
    lost_core_report,
    lost_node_report,
)
from vcli.runtime.executor.node_workers import NodeWorkers
from vcli.runtime.ipc.node_endpoint import Event, Gone, Received
from vcli.runtime.launch.core_link import CoreLink
from vcli.runtime.launch.inbox import Inbox, Signalled
from vcli.runtime.launch.join import resolve
from vcli.runtime.launch.join_messages import (
    TO_NODE,
    Failed,
    Leaving,
    Serving,
    Start,
    Stop,
    frames_of,
)
from vcli.runtime.launch.joining import Joining
from vcli.runtime.launch.node import NodeSettings, control_port
from vcli.runtime.launch.serve_view import ServeView
from vcli.runtime.launch.stop_signals import StopSignals
from vcli.runtime.log import configure_logging, get_logger
from vcli.runtime.messages import ChildMessage
from vcli.runtime.process.environ import interface_environ
from vcli.runtime.process.failures import report_error, with_status
from vcli.runtime.process.first_cause import FirstCause
from vcli.runtime.process.fork_owner import ForkServer
from vcli.runtime.process.left_signals import LeftSignals
from vcli.runtime.worker.dispatch import StoreAddress
from vcli.topology.errors import ExitStatus, VcliError

logger = get_logger(__name__)

_FLUSH_S: Final = 0.5
_BEAT_S: Final = 1.0
#: Node 0 drains before it ends the job; so long after that the node ends alone.
_LEAVE_S: Final = 1.1
_POLL_SECOND_SIGNAL_S: Final = 0.1
#: Between the core's word to end the workers and the launcher's word why.
_REASON_S: Final = 3.0


@dataclass(frozen=True, slots=True)
class _WorkersReady:
    methods: list[str]


@dataclass(frozen=True, slots=True)
class _WorkersFailed:
    error: Exception


@dataclass(frozen=True, slots=True)
class _Caused:
    report: FailureReport


@dataclass(frozen=True, slots=True)
class _CoreStopped:
    report: FailureReport | None


_News = Event | _WorkersReady | _WorkersFailed | _Caused | _CoreStopped


def follow_until_stopped(
    config: EngineConfig,
    settings: NodeSettings,
    *,
    view: ServeView,
    fork_server: ForkServer | None = None,
) -> ExitStatus:
    """Be one of the nodes that serve no HTTP; blocks until the job ends. Nothing is left then.

    Raises:
        NodesError: the nodes did not come (exit 3), or disagree (exit 4).
        StartupError, EngineDeadError: a process of any node failed (exit 5, 6).
    """
    configure_logging("Follower", config.log_level)
    return asyncio.run(_Follower(config, settings, view, fork_server).run())


class _Follower:
    def __init__(
        self,
        config: EngineConfig,
        settings: NodeSettings,
        view: ServeView,
        fork_server: ForkServer | None,
    ) -> None:
        self._config = config
        self._settings = settings
        self._view = view
        self._fork_server = fork_server
        self._address = resolve(config.parallel.master_addr)
        self._join_settings = settings.join_settings(config, view.note)
        self._node_rank = config.parallel.node_rank
        self._core: CoreLink | None = None
        self._workers: NodeWorkers | None = None
        self._is_serving = False
        self._leader_host = ""
        self._end_at: float | None = None
        self._was_core_stopped = False

    async def run(self) -> ExitStatus:
        self._signals = StopSignals(
            lambda reason: self._view.note(f"{reason}; asking node 0 to end the job")
        )
        self._left_signals = LeftSignals(self._signals.first.is_set)
        self._signals.install()
        self._inbox: Inbox[_News] = Inbox()
        self._cause = FirstCause(
            lambda report: self._inbox.put(_Caused(report)), wait_s=CAUSE_WAIT_S
        )
        port = control_port(self._config)
        joining = Joining(self._join_settings, self._address, port, self._inbox)
        try:
            with self._inbox.with_signals(self._signals):
                start = await joining.run()
                if start is None:
                    joining.link.send(frames_of(Leaving(status=self._signals.exit_status)))
                    return self._signals.exit_status
                self._leader = joining.link
                return await self._follow(start)
        finally:
            self._cause.close()
            await asyncio.to_thread(self._end, joining)
            self._signals.uninstall()

    async def _follow(self, start: Start) -> ExitStatus:
        self._leader_host = start.hosts[0]
        self._view.note(
            f"join   {len(start.hosts)} nodes agree; "
            f"node 0 ({self._leader_host}) serves, this is node {self._node_rank}"
        )
        self._core = CoreLink(
            (self._address, start.core_port),
            self._settings.key,
            NodeHello(
                session=start.session, node_rank=self._node_rank, pid=self._join_settings.pid
            ),
            on_call=self._on_call,
            on_ask=self._on_ask,
            on_stop=lambda report: self._inbox.put(_CoreStopped(report)),
            on_gone=lambda reason: self._cause.observe(
                lost_core_report(self._leader_host, reason, phase=self._phase)
            ),
        )
        bringing_up = asyncio.create_task(asyncio.to_thread(self._bring_up))
        try:
            return await self._until_end()
        except ReportedError as error:
            # Both: the core may not be there yet, or the launcher's link may be slower.
            self._say(NodeFailed(report=error.report))
            self._leader.send(frames_of(Failed(report=error.report)))
            self._view.on_failure(error.report)
            raise
        finally:
            if self._fork_server is not None:
                self._fork_server.cancel_starts()
            await asyncio.to_thread(self._end_workers)
            await asyncio.wait({bringing_up})

    def _bring_up(self) -> None:
        """In a thread of its own: start the workers and wait for them."""
        try:
            workers = NodeWorkers(
                self._config,
                is_trusted=self._settings.key.is_secret,
                send=self._send_to_core,
                on_message=self._on_message,
                on_failure=self._on_worker_failure,
            )
            self._workers = workers
            store = StoreAddress(
                host=self._address, port=self._config.parallel.master_port, listen_fd=None
            )
            interface = self._settings.interface_towards(self._address)
            starter = None if self._fork_server is None else self._fork_server.starter
            if workers.start(store, environ=interface_environ(interface), starter=starter):
                self._inbox.put(_WorkersReady(workers.wait_ready()))
        except VcliError as error:
            self._inbox.put(_WorkersFailed(error))

    async def _until_end(self) -> ExitStatus:
        """Handle what comes; gives the exit status of an end in order, raises that of a failure."""
        next_beat = time.monotonic() + _BEAT_S
        while True:
            event = await self._inbox.get(self._patience(next_beat))
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + _BEAT_S
                self._tell_activity()
            if self._signals.second.is_set() or self._is_late():
                return self._end_alone()
            status = None if event is None else self._handle(event)
            if status is not None:
                return status

    def _handle(self, event: _News | Signalled) -> ExitStatus | None:
        """One event; gives the exit status when it ends the job in order."""
        match event:
            case Signalled():
                self._leave()
            case _WorkersReady():
                self._tell_ready(event.methods)
            case _WorkersFailed():
                self._on_workers_failed(event.error)
            case _Caused():
                raise self._failed(event.report)
            case _CoreStopped():
                self._on_core_stopped(event)
            case Gone():
                self._on_leader_gone(event)
            case Received():
                return self._on_leader_message(event)
        return None

    def _patience(self, next_beat: float) -> float:
        return next_beat - time.monotonic() if self._end_at is None else _POLL_SECOND_SIGNAL_S

    def _end_alone(self) -> ExitStatus:
        """Node 0 says nothing any more: end by the user's signal, or else as a failure."""
        if self._signals.first.is_set():
            return self._signals.exit_status
        reason = "it ended its engine core and did not say why"
        raise self._failed(lost_node_report(0, self._leader_host, reason, phase=self._phase))

    def _is_late(self) -> bool:
        return self._end_at is not None and time.monotonic() >= self._end_at

    # ---- what happens -----------------------------------------------------------------------

    def _leave(self) -> None:
        """The user stops this node: node 0 ends the job for all, in order."""
        self._leader.send(frames_of(Leaving(status=self._signals.exit_status)))
        self._end_at = time.monotonic() + self._config.deadlines.drain_s + _LEAVE_S

    def _on_worker_failure(self, report: FailureReport) -> None:
        # Workers that were told to end may do it in any way.
        if not self._was_core_stopped:
            self._cause.observe(report)

    def _on_workers_failed(self, error: Exception) -> None:
        self._on_worker_failure(
            report_error(
                error,
                process=f"node{self._node_rank}",
                phase="start",
                rank=None,
                is_serving=False,
            )
        )

    def _on_core_stopped(self, event: _CoreStopped) -> None:
        if event.report is not None:
            raise self._failed(event.report)
        self._was_core_stopped = True
        self._end_at = self._end_at or time.monotonic() + _REASON_S
        asyncio.get_running_loop().run_in_executor(None, self._end_workers)

    def _on_leader_gone(self, event: Gone) -> None:
        self._cause.observe(lost_node_report(0, self._leader_host, event.reason, phase=self._phase))

    @property
    def _phase(self) -> str:
        return "serving" if self._is_serving else "start"

    def _on_leader_message(self, event: Received) -> ExitStatus | None:
        message = TO_NODE.decode(event.frames[0])
        if isinstance(message, Serving):
            self._is_serving = True
            self._view.note(f"node 0 ({self._leader_host}) serves at {message.url}")
        elif isinstance(message, Stop):
            if message.report is not None:
                raise self._failed(message.report)
            self._view.note(message.reason)
            self._was_core_stopped = True
            return ExitStatus(message.status)
        return None

    def _failed(self, report: FailureReport) -> ReportedError:
        if self._is_serving:
            return EngineDeadError(with_status(report, ExitStatus.DIED_SERVING))
        return StartupError(with_status(report, ExitStatus.START_FAILED))

    # ---- towards the core -------------------------------------------------------------------

    def _on_call(self, frames: list[bytes]) -> None:
        if self._workers is not None:
            self._workers.call(frames)

    def _on_ask(self, number: int) -> None:
        if self._workers is not None:
            self._workers.answer(number)

    def _on_message(self, message: ChildMessage) -> None:
        if not self._left_signals.take(message):
            self._view.on_message(message)
            self._say(NodeSaid(message=message))

    def _tell_ready(self, methods: list[str]) -> None:
        assert self._workers is not None
        self._say(NodeReady(methods=methods, pids=self._workers.pids))

    def _tell_activity(self) -> None:
        if self._workers is not None and self._is_serving and not self._was_core_stopped:
            self._workers.tell_activity()

    def _say(self, message: NodeMessage) -> None:
        if self._core is not None:
            self._core.say(message)

    def _send_to_core(self, frames: Sequence[bytes]) -> None:
        if self._core is not None:
            self._core.send(frames)

    # ---- the end ----------------------------------------------------------------------------

    def _end_workers(self) -> None:
        if self._workers is not None:
            self._workers.shutdown(is_asked=self._was_core_stopped)

    def _end(self, joining: Joining) -> None:
        if self._core is not None:
            self._core.close()
        joining.link.close(_FLUSH_S)
