"""An HTTP server that answers with bytes that a test wrote, for a client that must bear them."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

#: Gets the request (head and body) and its connection; what it leaves open is closed after it.
Handler = Callable[[bytes, socket.socket], None]


class ScriptedServer:
    """Counts connections and requests; each connection has a thread."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.requests: list[bytes] = []
        self.num_connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.num_connections += 1
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            while (request := read_request(connection)) is not None:
                self.requests.append(request)
                self._handler(request, connection)


def read_request(connection: socket.socket) -> bytes | None:
    data = b""
    while b"\r\n\r\n" not in data:
        if not (piece := connection.recv(65536)):
            return None
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    length = next(
        (int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if b"length:" in line), 0
    )
    while len(body) < length:
        body += connection.recv(65536)
    return head + b"\r\n\r\n" + body


def whole(status: int, body: bytes) -> bytes:
    """A response with a length; the connection stays open."""
    return b"HTTP/1.1 %d Said\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)


STREAM_HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def piece(data: bytes) -> bytes:
    """A chunk of a stream; empty: its end."""
    return b"%x\r\n%s\r\n" % (len(data), data)


@contextmanager
def scripted(handler: Handler) -> Iterator[ScriptedServer]:
    server = ScriptedServer(handler)
    try:
        yield server
    finally:
        server.close()
