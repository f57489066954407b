"""The HTTP server: uvicorn on a socket that was bound long before."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from vcli.runtime.server.errors import DrainingError
from vcli.runtime.server.http_protocol import HttpProtocol
from vcli.runtime.server.listen import start_listening
from vcli.runtime.server.state import ServerState

_BACKLOG = 2048
_CLOSE_S = 1  # for clients that do not read their answer after stop_now


class _InFlight:
    """Counts the HTTP requests that are being served."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._count = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        self._count += 1
        self._is_idle.clear()
        try:
            await self._app(scope, receive, send)
        finally:
            self._count -= 1
            if self._count == 0:
                self._is_idle.set()

    @property
    def count(self) -> int:
        return self._count

    async def wait_idle(self) -> None:
        await self._is_idle.wait()


class _Server(uvicorn.Server):
    """uvicorn without signal handlers: the launcher owns the signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class ApiServer:
    """Serves `app` on `listener`. Create it in the event loop that serves.

    The port is open as soon as the object is there; clients wait for `serve` to answer them.

    Raises:
        ConfigError: another process listens on the port by now.
    """

    def __init__(self, app: FastAPI, listener: socket.socket) -> None:
        self._state: ServerState = app.state.server
        self._listener = listener
        start_listening(listener, backlog=_BACKLOG)
        self._in_flight = _InFlight(app)
        config = uvicorn.Config(
            self._in_flight,
            http=HttpProtocol,
            loop="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            backlog=_BACKLOG,
            timeout_graceful_shutdown=_CLOSE_S,
        )
        self._server = _Server(config)

    @property
    def num_open_responses(self) -> int:
        """HTTP requests that are being served."""
        return self._in_flight.count

    async def serve(self) -> None:
        """Serve until `stop_now`; the listener is closed in the end."""
        await self._server.serve(sockets=[self._listener])

    def begin_drain(self) -> None:
        """Turn new requests away with 503; running ones go on."""
        self._state.is_draining = True

    async def wait_drained(self, timeout_s: float) -> bool:
        """Wait until no request is being served; False when `timeout_s` passed before."""
        try:
            await asyncio.wait_for(self._in_flight.wait_idle(), timeout_s)
        except TimeoutError:
            return False
        return True

    def stop_now(self) -> None:
        """Close the port and end what still runs with an error; `serve` returns shortly."""
        self.begin_drain()
        self._state.engine.abort_all(
            lambda: DrainingError("the server was stopped before the request was finished")
        )
        self._server.should_exit = True
