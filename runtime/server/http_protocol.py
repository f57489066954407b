"""HTTP/1.1 as uvicorn reads it, with a limit for the head of a request and our errors."""

from http import HTTPStatus
from typing import Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from vcli.runtime.server.errors import plain_error_response

#: of the request line and all headers together
MAX_HEAD_BYTES: Final = 64 << 10


class HttpProtocol(HttpToolsProtocol):
    """A connection. A head that is too long gets 431, what is no HTTP 400, both in our shape."""

    _num_head_bytes = 0  # of a head that has not ended, with what came before it in its piece
    _is_in_head = True
    _is_head_too_long = False

    def data_received(self, data: bytes) -> None:
        """Parse `data`."""
        self._num_head_bytes += len(data)
        super().data_received(data)
        if self._is_in_head and self._num_head_bytes > MAX_HEAD_BYTES:
            self._is_head_too_long = True
            self.send_400_response("")

    def on_headers_complete(self) -> None:
        """A body follows, which may be empty."""
        num_bytes = sum(len(name) + len(value) for name, value in self.headers)
        if len(self.url) + num_bytes > MAX_HEAD_BYTES:
            self._is_head_too_long = True
            raise ValueError("the head is too long")  # ends in send_400_response
        self._is_in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The next head follows."""
        self._is_in_head = True
        self._num_head_bytes = 0
        super().on_message_complete()

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
