"""Bodies as bytes: too long, missing, of another type, no JSON, no text. The server stays well."""

import gzip
import threading
import time
from collections.abc import Iterator

import pytest

from tests.support.serving_core import NAME, Serving
from vcli.runtime.server.body import MAX_BODY_BYTES

JSON = {"content-type": "application/json"}
POST_ROUTES = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")


def refused(
    served: Serving, path: str, content: bytes | Iterator[bytes], status: int, **headers: str
) -> dict:
    answer = served.http.post(path, content=content, headers=headers or JSON)
    assert answer.status_code == status, answer.text
    assert served.post("/v1/completions", prompt="x", max_tokens=1).status_code == 200
    return answer.json()["error"]


@pytest.mark.parametrize("path", POST_ROUTES)
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "no body"),
        (b"  ", "no body"),
        (b"{", "no valid JSON"),
        (b'{"prompt": "x"} trailing', "no valid JSON"),
        (b'{"prompt": NaN}', "no valid JSON"),
        (b'{"prompt": "\xff"}', "no valid JSON"),
        (b'{"temperature": 1e999, "prompt": "x"}', "no valid JSON"),
        (b'{"top_k": ' + b"9" * 5000 + b"}", "no valid JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[1]", "must be a JSON object"),
        (b"null", "must be a JSON object, it is null"),
    ],
    ids=lambda value: value[:12] if isinstance(value, bytes) else None,
)
def test_body_that_is_no_json_object_is_400_and_says_what_it_is(
    served: Serving, path: str, content: bytes, words: str
) -> None:
    error = refused(served, path, content, 400)
    assert words in error["message"]
    assert error["param"] is None


@pytest.mark.parametrize("path", POST_ROUTES)
@pytest.mark.parametrize("media_type", ["", "text/plain", "application/x-www-form-urlencoded"])
def test_body_of_another_type_is_415_and_names_the_header(
    served: Serving, path: str, media_type: str
) -> None:
    headers = {"content-type": media_type} if media_type else {"x-none": "1"}
    error = refused(served, path, b"{}", 415, **headers)
    assert "content-type: application/json" in error["message"]


@pytest.mark.parametrize("path", POST_ROUTES)
def test_compressed_body_is_415_and_names_its_coding(served: Serving, path: str) -> None:
    headers = {**JSON, "content-encoding": "gzip"}
    error = refused(served, path, gzip.compress(b'{"prompt": "x"}'), 415, **headers)
    assert '"gzip"' in error["message"]


def test_byte_order_mark_before_the_body_is_no_error(served: Serving) -> None:
    answer = served.http.post(
        "/v1/completions", content=b'\xef\xbb\xbf{"prompt": "x"}', headers=JSON
    )
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("media_type", ["application/json; charset=utf-8", "Application/JSON"])
def test_content_type_is_read_as_http_has_it(served: Serving, media_type: str) -> None:
    answer = served.http.post(
        "/v1/completions", content=b'{"prompt": "x"}', headers={"content-type": media_type}
    )
    assert answer.status_code == 200, answer.text


SURROGATE_BODIES = [
    ("/v1/completions", b'{"prompt": "a\\ud800b"}'),
    ("/v1/completions", b'{"prompt": ["a", "\\udc00"]}'),
    ("/v1/completions", b'{"prompt": "x", "stop": "\\ud800"}'),
    ("/v1/completions", b'{"prompt": "x", "model": "\\ud800"}'),
    ("/v1/completions", b'{"prompt": "x", "\\ud800": 1}'),
    ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "\\ud800"}]}'),
    (
        "/v1/chat/completions",
        b'{"messages": [{"role": "user", "content": [{"type": "text", "text": "\\ud800"}]}]}',
    ),
    (
        "/v1/chat/completions",
        b'{"messages": [{"role": "user", "content": "x", "name": "\\ud800"}]}',
    ),
    ("/tokenize", b'{"prompt": "\\ud800"}'),
]


@pytest.mark.parametrize(("path", "content"), SURROGATE_BODIES)
def test_half_a_surrogate_pair_anywhere_is_400(served: Serving, path: str, content: bytes) -> None:
    assert refused(served, path, content, 400)["type"] == "invalid_request_error"


def test_deep_values_in_a_message_are_400_or_ignored_never_a_bug(served: Serving) -> None:
    deep = b"[" * 900 + b"]" * 900
    message = b'{"role": "user", "content": "x", "name": ' + deep + b"}"
    answer = served.http.post(
        "/v1/chat/completions", content=b'{"messages": [' + message + b"]}", headers=JSON
    )
    assert answer.status_code in (200, 400), answer.text


@pytest.mark.parametrize("is_announced", [True, False])
def test_body_above_the_limit_is_413(served: Serving, is_announced: bool) -> None:
    content = b'{"prompt": "' + b"a" * MAX_BODY_BYTES + b'"}'
    chunks = (content[start : start + 2**20] for start in range(0, len(content), 2**20))
    error = refused(served, "/v1/completions", content if is_announced else chunks, 413)
    assert str(MAX_BODY_BYTES) in error["message"]


def test_text_that_cannot_fit_is_refused_at_once_with_both_numbers(served: Serving) -> None:
    begun = time.monotonic()
    for path, body in (
        ("/v1/completions", {"prompt": "hello " * 1_000_000}),
        ("/tokenize", {"prompt": "hello " * 1_000_000}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "hello " * 1_000_000}]},
        ),
    ):
        answer = served.post(path, **body)
        assert answer.status_code == 400, answer.text
        assert "max_model_len=200" in answer.json()["error"]["message"]
        assert "60000" in answer.json()["error"]["message"]
    assert time.monotonic() - begun < 2


def test_other_clients_are_answered_while_a_long_text_is_tokenised(start) -> None:
    text = "hello " * 400_000
    with start(max_model_len=1_000_000) as served:
        longest, is_over = 0.0, threading.Event()

        def watch() -> None:
            nonlocal longest
            while not is_over.is_set():
                begun = time.monotonic()
                served.call(lambda: None)
                longest = max(longest, time.monotonic() - begun)

        watcher = threading.Thread(target=watch)
        watcher.start()
        begun = time.monotonic()
        try:
            answer = served.http.post("/v1/completions", json={"prompt": text}, timeout=60)
        finally:
            took = time.monotonic() - begun
            is_over.set()
            watcher.join()
        assert "1600000 tokens" in answer.json()["error"]["message"]
        assert longest < took / 2


def test_path_with_a_slash_too_many_is_404_and_no_redirect(served: Serving) -> None:
    for path in POST_ROUTES:
        answer = served.post(f"{path}/", model=NAME)
        assert answer.status_code == 404
        assert f"{path}/" in answer.json()["error"]["message"]


def test_wrong_method_names_the_right_one(served: Serving) -> None:
    answer = served.http.get("/v1/completions")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    answer = served.http.options("/health")
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD")
    assert served.http.get("/v1/models/").status_code == 404
