"""HTTP/1.1 as uvicorn reads it, with a limit for the head of a request and our errors."""

from http import HTTPStatus
from typing import Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from vcli.runtime.server.errors import plain_error_response

#: of the request line and all headers together
MAX_HEAD_BYTES: Final = 64 << 10


class HttpProtocol(HttpToolsProtocol):
    """A connection. A head that is too long gets 431, what is no HTTP 400, both in our shape."""

    _num_head_bytes = 0  # the path, names and values of the request, its trailers included
    _num_unread_bytes = 0  # since the parser gave something: of what has no end yet
    _is_head_too_long = False

    def data_received(self, data: bytes) -> None:
        """Parse `data`."""
        self._num_unread_bytes += len(data)
        super().data_received(data)
        if self._num_head_bytes + self._num_unread_bytes > MAX_HEAD_BYTES:
            self._is_head_too_long = True
            self.send_400_response("")

    def on_message_begin(self) -> None:
        """A head begins."""
        self._num_head_bytes = self._num_unread_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """A piece of the path."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or after a body in chunks a trailer."""
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        self._num_unread_bytes = 0
        super().on_body(body)

    def _count(self, num_bytes: int) -> None:
        self._num_unread_bytes = 0
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > MAX_HEAD_BYTES:
            self._is_head_too_long = True
            raise ValueError("the head is too long")  # ends in send_400_response

    def send_400_response(self, msg: str) -> None:
        """Refuse what cannot be served as a request; the connection ends."""
        if self.transport.is_closing():
            return
        status, message = 400, "what arrived is no valid HTTP request"
        if self._is_head_too_long:
            status, message = 431, f"the request has more than {MAX_HEAD_BYTES} bytes of headers"
        response = plain_error_response(status, message)
        head = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", "connection: close"]
        head += [f"{name}: {value}" for name, value in response.headers.items()]
        self.transport.write("\r\n".join([*head, "", ""]).encode() + bytes(response.body))
        self.transport.close()
