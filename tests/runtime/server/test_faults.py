"""Clients that leave, an engine that dies, a server that drains."""

import concurrent.futures
import json
import threading
import time

import httpx
import openai
import pytest

from tests.support.serving_core import NAME, Serving
from vcli.runtime.errors import FailureReport

BODY = {"model": NAME, "prompt": "x", "max_tokens": 50}
KILLED = FailureReport(
    process="Worker_TP1", rank=1, pid=4242, phase="execute_model", kind="", exit_code=-9,
    message="killed by SIGKILL",
)  # fmt: skip
WORDS = ("rank 1", "pid 4242", "SIGKILL")


def wait_open(served: Serving, num_requests: int = 1) -> None:
    served.core.wait(lambda core: len(core.requests) == num_requests)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [True, False])
def test_client_that_leaves_aborts_its_request_in_the_core(
    held: Serving, path: str, stream: bool
) -> None:
    body = {**BODY, "messages": [{"role": "user", "content": "x"}], "stream": stream, "n": 2}
    with httpx.Client(base_url=held.url, timeout=None if stream else 0.3) as leaving:
        if stream:
            with leaving.stream("POST", path, json=body) as answer:
                assert next(answer.iter_lines()).startswith("data: ")
        else:
            with pytest.raises(httpx.ReadTimeout):
                leaving.post(path, json=body)
    wait_open(held, 2)
    held.core.wait(lambda core: len(core.aborted) == 2)
    assert set(held.core.aborted) == {request.request_id for request in held.core.requests}
    assert held.call(lambda: held.engine.num_open_requests) == 0


def test_client_that_leaves_before_the_first_token_aborts_too(start) -> None:
    with start(holds_after=0) as served:
        with (
            httpx.Client(base_url=served.url, timeout=0.3) as leaving,
            pytest.raises(httpx.ReadTimeout),
        ):
            leaving.post("/v1/completions", json={**BODY, "stream": True})
        served.core.wait(lambda core: len(core.aborted) == 1)


@pytest.mark.parametrize("teller", ["core", "monitor", "monitor after the socket ended"])
def test_death_while_streaming_is_an_event_with_rank_pid_and_signal(
    held: Serving, teller: str
) -> None:
    with held.http.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as answer:
        lines = (line for line in answer.iter_lines() if line)
        assert json.loads(next(lines).removeprefix("data: "))["choices"]
        if teller == "core":
            held.core.fail(KILLED)
        else:
            if teller != "monitor":
                held.core.die()
            held.engine.fail(KILLED)
        rest = list(lines)
    error = json.loads(rest[-1].removeprefix("data: "))["error"]
    assert all(word in error["message"] for word in WORDS)
    assert error["code"] == "engine_dead"


def test_death_while_streaming_reaches_openais_client_as_an_error(held: Serving) -> None:
    events = held.client.completions.create(**BODY, stream=True)
    next(iter(events))
    held.core.fail(KILLED)
    with pytest.raises(openai.APIError, match="rank 1"):
        list(events)


@pytest.mark.parametrize("stream", [False, True])
def test_death_before_the_first_token_and_after_is_503_with_the_cause(start, stream: bool) -> None:
    with start(holds_after=0) as served, concurrent.futures.ThreadPoolExecutor() as pool:
        open_request = pool.submit(served.post, "/v1/completions", **BODY, stream=stream)
        wait_open(served)
        served.core.fail(KILLED)
        first = open_request.result(5)
        for answer in (first, served.post("/v1/completions", **BODY), served.http.get("/health")):
            assert answer.status_code == 503
            assert all(word in answer.json()["error"]["message"] for word in WORDS)
        assert served.http.get("/ready").status_code == 503
        assert "rank 1" in served.http.get("/ready").json()["reason"]
        assert served.http.get("/metrics").status_code == 200


def test_draining_finishes_what_runs_and_turns_new_requests_away(start, text: str) -> None:
    begun, release = threading.Event(), threading.Event()

    def script(request) -> list[int]:
        begun.set()
        assert release.wait(10)
        return tokenizer.encode(text)

    with start() as served:
        tokenizer = served.engine.tokenizer
        served.core._script = script
        with concurrent.futures.ThreadPoolExecutor() as pool:
            running = pool.submit(
                served.client.completions.create, model=NAME, prompt="x", max_tokens=50
            )
            assert begun.wait(5)
            served.call(served.server.begin_drain)
            refused = served.post("/v1/completions", **BODY)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "shutting_down"
            assert served.http.get("/health").status_code == 200
            assert served.http.get("/ready").status_code == 503
            assert served.server.num_open_responses == 1
            release.set()
            assert running.result(5).choices[0].text == text
        served.call(served.server.stop_now)


def test_stop_now_tells_open_requests_and_closes_the_port(held: Serving) -> None:
    with concurrent.futures.ThreadPoolExecutor() as pool:
        whole = pool.submit(held.post, "/v1/completions", **BODY)
        with held.http.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as streamed:
            lines = (line for line in streamed.iter_lines() if line)
            assert '"choices"' in next(lines)
            wait_open(held, 2)
            begun = time.monotonic()
            held.call(held.server.stop_now)
            assert "the server was stopped" in list(lines)[-1]
        assert whole.result(5).status_code == 503
        assert "the server was stopped" in whole.result().json()["error"]["message"]
        assert time.monotonic() - begun < 1
    held.core.wait(lambda core: len(core.aborted) == 2)
    held.thread.join(5)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{held.url}/health")
