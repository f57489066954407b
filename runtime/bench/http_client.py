"""A small HTTP/1.1 client for one server: many requests at once, bodies as they arrive.

Pieces of a body carry the time at which the system handed them over, so that what this process
does in between does not count.
"""

import asyncio
import contextlib
import os
import socket
import ssl
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

import httptools
import msgspec

from vcli.topology.errors import ConfigError, VcliError

#: Longest body that is read whole: error texts, lists of models.
_MAX_WHOLE_BYTES: Final = 4 << 20


class ServerGoneError(VcliError):
    """Nobody listens at the address, or its name leads nowhere."""


class BrokenResponseError(VcliError):
    """The server closed the connection, or said something that is no HTTP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAddress:
    """Where a server is; `prefix` stands before every path and has no slash at its end."""

    host: str
    port: int
    is_tls: bool
    prefix: str

    @property
    def authority(self) -> str:
        """The value of the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def parse_base_url(url: str) -> ServerAddress:
    """`http://127.0.0.1:8000`, with or without `/v1`.

    Raises:
        ConfigError: no URL of a server.
    """
    hint = "--base-url http://127.0.0.1:8000"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"--base-url {url!r} is no URL: {error}", hint=hint) from error
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise ConfigError(f"--base-url {url!r} is no URL of an HTTP server", hint=hint)
    is_tls = parts.scheme == "https"
    prefix = parts.path.rstrip("/").removesuffix("/v1")
    if not (prefix + parts.hostname).isascii() or any(char.isspace() for char in prefix):
        raise ConfigError(f"--base-url {url!r} has characters that no URL has", hint=hint)
    return ServerAddress(
        host=parts.hostname,
        port=port or (443 if is_tls else 80),
        is_tls=is_tls,
        prefix=prefix,
    )


class HttpResponse:
    """Status and body of one response."""

    def __init__(self, connection: "_Connection", status: int) -> None:
        self.status = status
        self._connection = connection

    async def pieces(self) -> AsyncGenerator[tuple[float, bytes], None]:
        """Pieces of the body with their times (monotonic seconds), to its end.

        Raises:
            BrokenResponseError: the connection ended before the body.
        """
        connection = self._connection
        while True:
            arrived = connection.take()
            for piece in arrived:
                yield piece
            if not arrived:
                if connection.is_complete:
                    return
                await connection.wait_news()

    async def whole(self) -> bytes:
        """The whole body, or its beginning where it is very long."""
        body = b""
        async with contextlib.aclosing(self.pieces()) as pieces:
            async for _, piece in pieces:
                body += piece
                if len(body) > _MAX_WHOLE_BYTES:
                    break
        return body


class HttpClient:
    """Connections to one server, kept for the next request; belongs to one event loop."""

    def __init__(self, address: ServerAddress, *, headers: Mapping[str, str]) -> None:
        self._address = address
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self._idle: list[_Connection] = []
        self._tls = ssl.create_default_context() if address.is_tls else None

    @contextlib.asynccontextmanager
    async def request(
        self, path: str, body: object | None = None
    ) -> AsyncGenerator[HttpResponse, None]:
        """POST `body` as JSON, or GET without one; gives the response when its head is there.

        Raises:
            ServerGoneError: no connection.
            BrokenResponseError: no response.
        """
        payload = self._payload(path, body)
        connection, is_used = await self._connect()
        try:
            try:
                status = await connection.ask(payload)
            except BrokenResponseError:
                # The server may have closed a connection that it kept, just before.
                if not is_used or connection.has_data:
                    raise
                connection.close()
                connection = await self._open()
                status = await connection.ask(payload)
            yield HttpResponse(connection, status)
        finally:
            if connection.is_reusable:
                self._idle.append(connection)
            else:
                connection.close()

    async def is_listening(self) -> bool:
        """Whether somebody takes connections."""
        try:
            self._idle.append(await self._open())
        except ServerGoneError:
            return False
        return True

    def close(self) -> None:
        """Close all connections that nobody uses."""
        while self._idle:
            self._idle.pop().close()

    async def _connect(self) -> "tuple[_Connection, bool]":
        while self._idle:
            connection = self._idle.pop()
            if connection.is_reusable:
                return connection, True
        return await self._open(), False

    async def _open(self) -> "_Connection":
        address = self._address
        try:
            _, connection = await asyncio.get_running_loop().create_connection(
                _Connection, address.host, address.port, ssl=self._tls
            )
        except (OSError, UnicodeError) as error:
            raise ServerGoneError(
                f"no connection to {address.authority}: {_reason(error)}"
            ) from error
        return connection

    def _payload(self, path: str, body: object | None) -> bytes:
        address = self._address
        data = b"" if body is None else msgspec.json.encode(body)
        head = (
            f"{'GET' if body is None else 'POST'} {address.prefix}{path} HTTP/1.1\r\n"
            f"Host: {address.authority}\r\nAccept: */*\r\n{self._headers}"
        )
        if body is not None:
            head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n"
        return head.encode("latin-1") + b"\r\n" + data


def _reason(error: Exception) -> str:
    """Why there is no connection; asyncio's own text names the address a second time."""
    if isinstance(error, OSError) and not isinstance(error, ssl.SSLError | socket.gaierror):
        return os.strerror(error.errno) if error.errno else str(error)
    return getattr(error, "strerror", None) or str(error)


class _Connection(asyncio.Protocol):
    """One connection with at most one request under way; the parser's callbacks are `on_...`."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._news = asyncio.Event()
        self._error = ""
        self._pieces: list[tuple[float, bytes]] = []
        self._begin()

    @property
    def is_reusable(self) -> bool:
        """Whether the response is over and the connection stays open."""
        is_open = self._transport is not None and not self._transport.is_closing()
        return is_open and self.is_complete and self._keeps_alive and not self._error

    async def ask(self, payload: bytes) -> int:
        """Send a request; the status, when the head of the response is there."""
        if self._transport is None:
            raise BrokenResponseError("the connection is not open")
        self._begin()
        self._transport.write(payload)
        while self._status is None:
            await self.wait_news()
        return self._status

    async def wait_news(self) -> None:
        """Until something more has come; called when all that came was taken.

        Raises:
            BrokenResponseError: the connection has ended.
        """
        if self._error:
            raise BrokenResponseError(self._error)
        self._news.clear()
        await self._news.wait()

    def take(self) -> list[tuple[float, bytes]]:
        """What came of the body since the last time."""
        pieces = self._pieces
        self._pieces = []
        return pieces

    def close(self) -> None:
        """Close the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def _begin(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._pieces = []
        self._status: int | None = None
        self._has_length = False
        self._keeps_alive = False
        self._now_s = 0.0
        self.is_complete = False
        self.has_data = False

    # ---- asyncio ----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is open."""
        if isinstance(transport, asyncio.Transport):
            self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Something came."""
        self._now_s = time.monotonic()
        self.has_data = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(f"the server's answer is no HTTP: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is over; a body without a length ends with it."""
        if self._status is not None and not self._has_length:
            self.is_complete = True
        self._end(f"the server closed the connection{f' ({exc})' if exc else ''}")

    def _end(self, error: str) -> None:
        self._error = self._error or error
        if self._transport is not None:
            self._transport.abort()
        self._news.set()

    # ---- httptools --------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        """One line of the head."""
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._has_length = True

    def on_headers_complete(self) -> None:
        """The head is there."""
        self._status = self._parser.get_status_code()
        self._keeps_alive = self._parser.should_keep_alive()
        self._news.set()

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        self._pieces.append((self._now_s, body))
        self._news.set()

    def on_message_complete(self) -> None:
        """The response is over."""
        # Interim responses (100) come before the real one.
        if self._status is not None and self._status < 200:
            self._status = None
            return
        self.is_complete = True
        self._news.set()
