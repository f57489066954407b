"""Responses of requests that take long: whole or as server-sent events.

Both watch the connection: when the client goes, the work is cancelled at once, which aborts the
request in the engine.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from vcli.runtime.log import get_logger
from vcli.runtime.server.errors import error_of, error_response
from vcli.topology.errors import VcliError

logger = get_logger(__name__)

_DONE = b"data: [DONE]\n\n"


def event(body: object) -> bytes:
    """`body` as one server-sent event."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


class _WatchedResponse(Response):
    """Runs `_work` as a task that ends with the connection."""

    def __init__(self) -> None:
        super().__init__()
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(self._work(scope, receive, send))
        gone = asyncio.create_task(_wait_disconnect(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                logger.debug("client left path=%s", scope.get("path"))
        finally:
            for task in (gone, work):
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await gone
            with contextlib.suppress(asyncio.CancelledError):
                await work

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError


async def _wait_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class WholeResponse(_WatchedResponse):
    """The response that `make` gives, or the error it raises."""

    def __init__(self, make: Callable[[], Awaitable[Response]]) -> None:
        super().__init__()
        self._make = make

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = await self._make()
        except VcliError as error:
            response = error_response(error)
        await response(scope, receive, send)


class EventStream(_WatchedResponse):
    """The bytes of `events`, then `[DONE]`.

    The status line waits for the first event, so that an error before it has its HTTP status. A
    later error is an event of its own and ends the stream without `[DONE]`.
    """

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__()
        self._events = events

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self._events) as events:
            try:
                first = await anext(events, b"")
            except VcliError as error:
                await error_response(error)(scope, receive, send)
                return
            await send(_start())
            await send(_body(first))
            last = _DONE
            try:
                async for payload in events:
                    await send(_body(payload))
            except VcliError as error:
                last = event(error_of(error)[1])
            await send(_body(last, more=False))


def _start() -> Message:
    headers = [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),  # nginx would collect the events
    ]
    return {"type": "http.response.start", "status": 200, "headers": headers}


def _body(payload: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": payload, "more_body": more}
