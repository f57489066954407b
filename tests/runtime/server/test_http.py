"""Bytes that are no HTTP request, or one with too long a head: an answer in our shape, no bug."""

import json
import socket

import pytest

from tests.support.serving_core import Serving
from vcli.runtime.server.http_protocol import MAX_HEAD_BYTES

POST = b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\n"

#: a body that has ended; trailers may follow
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"


def answer(served: Serving, data: bytes) -> tuple[int, dict]:
    """Status and body of the answer to `data`, after which the server ends the connection."""
    host, port = served.url.removeprefix("http://").split(":")
    received = b""
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(data)
        while piece := connection.recv(65536):
            received += piece
    head, _, body = received.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


def pour(connection: socket.socket) -> None:
    for _ in range(1024):
        connection.sendall(b"a" * 2**16)


@pytest.mark.parametrize(
    "data",
    [
        b"hello\r\n\r\n",
        b"\x16\x03\x01\x02\x00",
        b"FOO / HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "GET /é HTTP/1.1\r\n\r\n".encode(),
        b"CONNECT h:1 HTTP/1.1\r\n\r\n",
        b"GET /version HTTP/1.1\r\nx: a\x00b\r\n\r\n",
        POST + b"content-length: -1\r\n\r\n{}",
        POST + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}",
        POST + b"transfer-encoding: chunked\r\n\r\nZZ\r\n{}",
    ],
)
def test_what_is_no_request_is_400_in_our_shape(
    served: Serving, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    status, body = answer(served, data)
    assert (status, body["error"]["code"]) == (400, "bad_request")
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert not any(record.exc_info for record in caplog.records)
    assert served.http.get("/health").status_code == 200


@pytest.mark.parametrize(
    "data",
    [
        b"GET /version HTTP/1.1\r\nx: " + b"a" * MAX_HEAD_BYTES + b"\r\n\r\n",
        b"GET /" + b"a" * MAX_HEAD_BYTES + b" HTTP/1.1\r\n\r\n",
        b"GET /version HTTP/1.1\r\n" + b"x: aaaaaaaa\r\n" * (MAX_HEAD_BYTES // 9) + b"\r\n",
        CHUNKED + b"x: aaaaaaaa\r\n" * (MAX_HEAD_BYTES // 9),
    ],
    ids=["one", "path", "many", "trailers"],
)
def test_too_long_a_head_is_431_and_names_the_limit(served: Serving, data: bytes) -> None:
    status, body = answer(served, data)
    assert (status, str(MAX_HEAD_BYTES) in body["error"]["message"]) == (431, True)


@pytest.mark.parametrize(
    "begin", [b"GET /version HTTP/1.1\r\nx: ", CHUNKED + b"x: "], ids=["header", "trailer"]
)
def test_a_head_without_end_is_refused_before_it_is_kept(served: Serving, begin: bytes) -> None:
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(begin)
        with pytest.raises(ConnectionError):
            pour(connection)


def test_heads_up_to_the_limit_and_long_bodies_are_served_on_one_connection(
    served: Serving,
) -> None:
    for _ in range(3):
        headers = {"x-long": "a" * (MAX_HEAD_BYTES - 1000)}
        body = {"prompt": "x", "padding": "y" * 10 * MAX_HEAD_BYTES}
        answered = served.http.post("/v1/completions", json=body, headers=headers)
        assert answered.status_code == 200, answered.text
