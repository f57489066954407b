"""The `vcli serve` process: starts the engine core, serves HTTP, ends everything in order."""

import asyncio
import socket
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import uvloop

from vcli.runtime.config import EngineConfig
from vcli.runtime.engine.async_engine import AsyncEngine
from vcli.runtime.engine.stand_in_tokenizer import tokenizer_of
from vcli.runtime.engine.tokenizer import Tokenizer
from vcli.runtime.errors import EngineDeadError, FailureReport, ReportedError, StartupError
from vcli.runtime.ipc.frames import frame_pair
from vcli.runtime.launch.core_child import CORE_PATIENCE_S, core_child
from vcli.runtime.launch.serve_view import ServeView
from vcli.runtime.launch.start_phase import StartPhase
from vcli.runtime.launch.stop_signals import StopSignals
from vcli.runtime.log import configure_logging
from vcli.runtime.messages import ChildMessage, ChildState, GroupReport, MemoryReport
from vcli.runtime.process.failures import with_status
from vcli.runtime.process.fork_owner import ForkServer
from vcli.runtime.process.group import ChildGroup
from vcli.runtime.process.left_signals import LeftSignals
from vcli.runtime.process.silence import SilenceWatch
from vcli.runtime.server.api_server import ApiServer
from vcli.runtime.server.app import build_app
from vcli.runtime.server.listen import url_of
from vcli.runtime.server.metrics import ServerMetrics
from vcli.topology import ExitStatus, plan_to_json
from vcli.topology.names import API_SERVER

if TYPE_CHECKING:
    from vcli.runtime.launch.gathering import Member
    from vcli.runtime.launch.leader import Leader

#: Open requests get their error and clients read it, before the server closes.
_FAILURE_FLUSH_S = 1.0
_CORE_STOP_S = 1.5


def serve_until_stopped(
    config: EngineConfig,
    listener: socket.socket,
    *,
    view: ServeView,
    environ: Mapping[str, str],
    tokenizer: Tokenizer | None = None,
    fork_server: ForkServer | None = None,
    nodes: "Leader | None" = None,
) -> ExitStatus:
    """Start the engine, by the fork server if there is one, and serve on `listener`; blocks.

    `tokenizer` is the model's, loaded here if not given. With `nodes` the other nodes of the job
    join first. Returns the status for the signal that ended it; nothing that was started is left.

    Raises:
        ConfigError: the tokenizer of the model is damaged.
        NodesError: the other nodes did not come (exit 3), or disagree (exit 4).
        StartupError: something failed before ready (exit 5).
        EngineDeadError: a process died or failed while serving (exit 6).
    """
    configure_logging(API_SERVER, config.log_level)
    tokenizer = tokenizer or tokenizer_of(config.model)
    server = _Server(
        config,
        listener,
        view=view,
        environ=environ,
        tokenizer=tokenizer,
        fork_server=fork_server,
        nodes=nodes,
    )
    return uvloop.run(server.run())


class _Server:
    def __init__(
        self,
        config: EngineConfig,
        listener: socket.socket,
        *,
        view: ServeView,
        environ: Mapping[str, str],
        tokenizer: Tokenizer,
        fork_server: ForkServer | None,
        nodes: "Leader | None",
    ) -> None:
        self._tokenizer = tokenizer
        self._fork_server = fork_server
        self._nodes = nodes
        self._config = config
        self._deadlines = config.deadlines
        self._listener = listener
        self._view = view
        self._environ = environ
        self._children = ChildGroup(on_message=self._on_message, on_failure=self._on_failure)
        self._phase = StartPhase()
        self._failure: FailureReport | None = None
        self._is_ending = False
        self._has_failed = asyncio.Event()
        self._engine: AsyncEngine | None = None

    async def run(self) -> ExitStatus:
        self._loop = asyncio.get_running_loop()
        self._signals = StopSignals(self._tell_stopping)
        self._left_signals = LeftSignals(self._signals.first.is_set)
        self._signals.install()
        core_socket, core_end = frame_pair()
        try:
            payload = None
            if await self._join_nodes() and await self._start_core(core_end):
                payload = await self._wait_until_ready()
            if payload is None:
                return self._signals.exit_status
            await self._serve(core_socket, payload)
        except ReportedError as error:
            self._failure = self._failure or error.report
            raise
        finally:
            self._stop_nodes()
            grace_s = 0.0 if self._signals.second.is_set() else _CORE_STOP_S
            await asyncio.to_thread(self._children.shutdown, grace_s)
            core_socket.close()
            core_end.close()
            self._signals.uninstall()
        if self._failure is not None:
            self._view.on_failure(self._failure)
            raise EngineDeadError(self._failure)
        return self._signals.exit_status

    async def _join_nodes(self) -> bool:
        """Wait for the other nodes, if there are any; False when a signal came first."""
        if self._nodes is None:
            return True
        self._nodes.watch(on_failure=self._on_node_failure, on_leave=self._on_leave)
        self._phase = StartPhase("waiting for the other nodes")
        return await self._nodes.join(self._signals)

    async def _start_core(self, core_end: socket.socket) -> bool:
        """Start the core; False when a signal came first.

        In a thread: the fork server may still be importing. The start's deadline runs from here.
        """
        self._deadlines = self._config.deadlines.begun()
        link = self._fork_server.new_link() if self._fork_server is not None else None
        spec = core_child(
            replace(self._config, deadlines=self._deadlines),
            core_end.fileno(),
            link_fd=None if link is None else link.fileno(),
            nodes=None if self._nodes is None else self._nodes.core_links,
        )
        starter = None if self._fork_server is None else self._fork_server.starter
        left_s = self._deadlines.start_left_s()
        starting = asyncio.create_task(
            asyncio.to_thread(self._children.start, [spec], starter=starter, timeout_s=left_s)
        )
        try:
            await self._until_done_or_signal(starting)
            if not starting.done() and self._fork_server is not None:
                self._fork_server.cancel_starts()
            # What it raised is taken here: after a signal nobody asks for its result.
            await asyncio.gather(starting, return_exceptions=True)
        finally:
            core_end.close()
            if link is not None:
                link.close()
            if self._nodes is not None:
                self._nodes.let_go_of_core()
        if self._signals.first.is_set():
            return False
        if self._failure is not None:
            raise StartupError(self._failure)
        starting.result()
        self._tell_of_fork_server()
        return True

    def _tell_of_fork_server(self) -> None:
        server = self._fork_server
        if server is not None and server.preloaded is not None:
            seconds = server.preloaded.seconds
            self._view.on_message(
                ChildState(process="ForkServer", state="imported", seconds=seconds, pid=server.pid)
            )

    async def _wait_until_ready(self) -> dict[str, Any] | None:
        """What the core reports; None when a signal came first.

        Raises:
            StartupError: the core, one of its workers, or another node failed.
        """
        waiting = asyncio.create_task(
            asyncio.to_thread(
                self._children.wait_ready,
                self._deadlines.start_s,
                left_s=self._deadlines.start_left_s(),
                patience_s=CORE_PATIENCE_S,
            )
        )
        await self._until_done_or_signal(waiting)
        if waiting.done() and self._failure is None:
            return dict(waiting.result()[0])
        self._stop_nodes()
        await asyncio.to_thread(self._children.shutdown, _CORE_STOP_S, asked=False)
        await asyncio.gather(waiting, return_exceptions=True)
        if self._failure is not None:
            raise StartupError(self._failure)
        return None

    async def _until_done_or_signal(self, task: asyncio.Task[Any]) -> None:
        """Or until another node failed."""
        events = [
            asyncio.create_task(self._signals.first.wait()),
            asyncio.create_task(self._has_failed.wait()),
        ]
        await asyncio.wait({task, *events}, return_when=asyncio.FIRST_COMPLETED)
        for event in events:
            event.cancel()

    async def _serve(self, core_socket: socket.socket, payload: Mapping[str, Any]) -> None:
        spec = self._config.model.spec
        metrics = ServerMetrics(
            self._config.model.served_name, on_first_token=self._view.on_first_token
        )
        engine = AsyncEngine(
            core_socket,
            self._tokenizer,
            max_model_len=self._config.model.max_model_len,
            vocab_size=spec.vocab_size,
            default_sampling=self._tokenizer.default_sampling,
            observer=metrics,
            on_own_failure=self._on_failure,
            core_watch=SilenceWatch(
                "EngineCore",
                self._children.pids[0],
                stall_s=self._config.deadlines.stall_s,
                limit_s=self._config.deadlines.execute_model_s,
            ),
        )
        self._engine = engine
        await engine.start()
        app = build_app(
            engine,
            served_name=self._config.model.served_name,
            metrics=metrics,
            server_info=self._server_info(payload),
        )
        self._view.on_groups(msgspec.convert(payload["group_reports"], list[GroupReport]))
        self._view.on_memory(msgspec.convert(payload["memory"], list[MemoryReport]))
        # The port is open from here on.
        server = ApiServer(app, self._listener)
        serving = asyncio.create_task(server.serve())
        self._view.on_serving(
            url_of(self._listener), int(payload["num_kv_blocks"]) * int(payload["block_size"])
        )
        if self._nodes is not None:
            self._nodes.tell_serving(url_of(self._listener))
        try:
            await self._until_stop_or_failure(serving)
            await self._wind_down(engine, server)
        finally:
            server.stop_now()
            await asyncio.gather(serving, return_exceptions=True)
            await engine.close()

    async def _until_stop_or_failure(self, serving: asyncio.Task[None]) -> None:
        events = [
            asyncio.create_task(self._signals.first.wait()),
            asyncio.create_task(self._has_failed.wait()),
        ]
        await asyncio.wait({serving, *events}, return_when=asyncio.FIRST_COMPLETED)
        for event in events:
            event.cancel()
        if serving.done():
            serving.result()

    async def _wind_down(self, engine: AsyncEngine, server: ApiServer) -> None:
        """Let open requests end (with their answer, or with the failure), within a deadline."""
        server.begin_drain()
        drain_s = self._config.deadlines.drain_s
        limit_s = _FAILURE_FLUSH_S if self._has_failed.is_set() else drain_s
        deadline = self._loop.time() + limit_s
        while engine.num_open_requests or server.num_open_responses:
            if self._loop.time() > deadline or self._signals.second.is_set():
                break
            await asyncio.sleep(0.02)
        if not self._has_failed.is_set():
            self._is_ending = True
            self._children.expect_end()
            engine.shut_down_core(drain=False)

    def _tell_stopping(self, reason: str) -> None:
        """One line for the first signal: what it interrupts, and what still happens."""
        if self._engine is None:
            reason += f" while {self._phase.doing}"
        elif count := self._engine.num_open_requests:
            reason += (
                f"; draining {count} request{'s' * (count > 1)} for up to "
                f"{self._config.deadlines.drain_s:g} s; a second ^C ends them at once"
            )
        self._view.note(reason)

    def _on_message(self, message: ChildMessage) -> None:
        """From the monitor's thread."""
        if not self._left_signals.take(message):
            self._phase.take(message)
            self._view.on_message(message)

    def _on_failure(self, report: FailureReport) -> None:
        """From the monitor's thread: the first cause, once; an end that was asked for is none."""
        if self._is_ending or self._failure is not None:
            return
        self._failure = report
        if self._engine is not None:
            self._engine.fail(report)
        self._loop.call_soon_threadsafe(self._has_failed.set)

    def _stop_nodes(self) -> None:
        """Before anything here is ended, which the other nodes would take for a failure."""
        if self._nodes is not None:
            status = self._signals.exit_status or ExitStatus.BUG
            self._nodes.stop(status, self._failure)

    def _on_node_failure(self, report: FailureReport) -> None:
        """From the thread of the nodes' hub; a node does not know whether the others are ready."""
        status = ExitStatus.START_FAILED if self._engine is None else ExitStatus.DIED_SERVING
        self._on_failure(with_status(report, status))

    def _on_leave(self, member: "Member", status: ExitStatus) -> None:
        """From the thread of the nodes' hub: another node's user ends the job."""
        reason = f"stopping: {member} was stopped by its user"
        self._loop.call_soon_threadsafe(self._signals.ask, status, reason)

    def _server_info(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "model": self._config.model.served_name,
            "dtype": self._config.model.dtype,
            "max_model_len": self._config.model.max_model_len,
            "plan": plan_to_json(self._config.plan),
            "started": dict(payload),
        }
