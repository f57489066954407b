"""The `vcli serve` process: starts the engine core, serves HTTP, ends everything in order."""

import asyncio
import socket
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec
import uvloop

from vcli.runtime.config import EngineConfig
from vcli.runtime.engine.async_engine import AsyncEngine
from vcli.runtime.engine.tokenizer import Tokenizer
from vcli.runtime.errors import EngineDeadError, FailureReport
from vcli.runtime.ipc.frames import frame_pair
from vcli.runtime.launch.stop_signals import StopSignals
from vcli.runtime.log import configure_logging
from vcli.runtime.messages import ChildMessage, GroupReport
from vcli.runtime.process.child import ChildSpec
from vcli.runtime.process.group import ChildGroup
from vcli.runtime.server.api_server import ApiServer
from vcli.runtime.server.app import build_app
from vcli.runtime.server.listen import url_of
from vcli.runtime.server.metrics import ServerMetrics
from vcli.topology import ExitStatus, plan_to_json

#: ^C until the last open request is aborted; with the ladder below it stays within five seconds.
_DRAIN_S = 2.5
#: Open requests get their error and clients read it, before the server closes.
_FAILURE_FLUSH_S = 1.0
_CORE_STOP_S = 1.5


class ServeView(Protocol):
    """What the server tells while it starts and ends; called from any thread."""

    def on_message(self, message: ChildMessage) -> None:
        """A process reported a start-up state."""

    def on_groups(self, reports: Sequence[GroupReport]) -> None:
        """All ranks are ready; their groups were verified."""

    def on_serving(self, url: str, kv_tokens: int) -> None:
        """The port is open."""

    def on_failure(self, report: FailureReport) -> None:
        """Something failed; the report is the first cause."""

    def note(self, text: str) -> None:
        """Anything else."""


def serve_until_stopped(
    config: EngineConfig, listener: socket.socket, *, view: ServeView, environ: Mapping[str, str]
) -> ExitStatus:
    """Start the engine and serve on `listener` until a signal; blocks.

    Returns the status for the signal that ended it; nothing that was started is left.

    Raises:
        StartupError: something failed before ready (exit 5).
        EngineDeadError: a process died or failed while serving (exit 6).
    """
    configure_logging("ApiServer", config.log_level)
    return uvloop.run(_Server(config, listener, view, environ).run())


class _Server:
    def __init__(
        self,
        config: EngineConfig,
        listener: socket.socket,
        view: ServeView,
        environ: Mapping[str, str],
    ) -> None:
        self._config = config
        self._listener = listener
        self._view = view
        self._environ = environ
        self._children = ChildGroup(on_message=view.on_message, on_failure=self._on_failure)
        self._failure: FailureReport | None = None
        self._is_ending = False
        self._has_failed = asyncio.Event()
        self._engine: AsyncEngine | None = None

    async def run(self) -> ExitStatus:
        self._loop = asyncio.get_running_loop()
        self._signals = StopSignals()
        self._signals.install()
        core_socket: socket.socket | None = None
        try:
            core_socket = self._start_core()
            payload = await self._wait_until_ready()
            if payload is None:
                return self._signals.exit_status
            await self._serve(core_socket, payload)
        finally:
            grace_s = 0.0 if self._signals.second.is_set() else _CORE_STOP_S
            await asyncio.to_thread(self._children.shutdown, grace_s)
            if core_socket is not None:
                core_socket.close()
            self._signals.uninstall()
        if self._failure is not None:
            self._view.on_failure(self._failure)
            raise EngineDeadError(self._failure)
        return self._signals.exit_status

    def _start_core(self) -> socket.socket:
        own_end, core_end = frame_pair()
        core_fd = core_end.fileno()
        self._children.start(
            [
                ChildSpec(
                    target="vcli.runtime.core.core_proc:core_main",
                    arguments=(self._config, core_fd),
                    title="EngineCore",
                    pass_fds=(core_fd,),
                    log_level=self._config.log_level,
                )
            ]
        )
        core_end.close()
        return own_end

    async def _wait_until_ready(self) -> dict[str, Any] | None:
        """What the core reports; None when a signal came first."""
        waiting = asyncio.create_task(
            asyncio.to_thread(self._children.wait_ready, self._config.deadlines.start_s)
        )
        stopping = asyncio.create_task(self._signals.first.wait())
        await asyncio.wait({waiting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if waiting.done():
            return dict(waiting.result()[0])
        await asyncio.to_thread(self._children.shutdown, 0.0)
        await asyncio.gather(waiting, return_exceptions=True)
        return None

    async def _serve(self, core_socket: socket.socket, payload: Mapping[str, Any]) -> None:
        spec = self._config.model.spec
        tokenizer = await asyncio.to_thread(Tokenizer.from_folder, self._config.model.path)
        metrics = ServerMetrics(self._config.model.served_name)
        engine = AsyncEngine(
            core_socket,
            tokenizer,
            max_model_len=self._config.model.max_model_len,
            vocab_size=spec.vocab_size,
            default_sampling=tokenizer.default_sampling,
            observer=metrics,
        )
        self._engine = engine
        await engine.start()
        app = build_app(
            engine,
            served_name=self._config.model.served_name,
            metrics=metrics,
            server_info=self._server_info(payload),
        )
        server = ApiServer(app, self._listener)
        serving = asyncio.create_task(server.serve())
        self._view.on_groups(msgspec.convert(payload["group_reports"], list[GroupReport]))
        self._view.on_serving(
            url_of(self._listener), int(payload["num_kv_blocks"]) * int(payload["block_size"])
        )
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
        if engine.num_open_requests and not self._has_failed.is_set():
            self._view.note(
                f"draining {engine.num_open_requests} requests for up to {_DRAIN_S:g} s; "
                "a second ^C ends them at once"
            )
        limit_s = _FAILURE_FLUSH_S if self._has_failed.is_set() else _DRAIN_S
        deadline = self._loop.time() + limit_s
        while engine.num_open_requests or server.num_open_responses:
            if self._loop.time() > deadline or self._signals.second.is_set():
                break
            await asyncio.sleep(0.02)
        if not self._has_failed.is_set():
            self._is_ending = True
            engine.shut_down_core(drain=False)

    def _on_failure(self, report: FailureReport) -> None:
        """From the monitor's thread: the first cause, once; an end that was asked for is none."""
        if self._is_ending:
            return
        self._failure = report
        if self._engine is not None:
            self._engine.fail(report)
        self._loop.call_soon_threadsafe(self._has_failed.set)

    def _server_info(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "model": self._config.model.served_name,
            "dtype": self._config.model.dtype,
            "max_model_len": self._config.model.max_model_len,
            "plan": plan_to_json(self._config.plan),
            "started": dict(payload),
        }

