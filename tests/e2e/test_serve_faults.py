"""What a user sees when a process of a running `vcli serve` dies, or somebody stops it."""

import concurrent.futures
import json
import os
import signal
import time
from pathlib import Path

import openai
import pytest

from tests.support.serving import Server, serving

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

_TP3 = [
    "--served-model-name",
    "demo",
    "-tp",
    "3",
    "--max-model-len",
    "2048",
    "--kv-cache-memory",
    "128M",
    "--max-num-seqs",
    "16",
]


@pytest.fixture
def server(tmp_path: Path, demo_model: Path):
    with serving([str(demo_model), *_TP3], folder=tmp_path) as running:
        yield running


def open_requests(url: str, pool: concurrent.futures.ThreadPoolExecutor) -> list:
    """Two streams and one plain request that are under way; each future gives what ended it."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
    begun = []

    def stream() -> tuple[float, str]:
        events = client.completions.create(
            model="demo", prompt="Once upon a time", max_tokens=1500, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        text = ""
        try:
            for event in events:
                begun.append(1)
                text += event.choices[0].text if event.choices else ""
        except (openai.APIError, openai.APIConnectionError) as error:
            return time.monotonic(), f"{error} {getattr(error, 'body', '')} {error.__cause__!r}"
        return time.monotonic(), f"ended without error: {text[-80:]}"

    def plain() -> tuple[float, str]:
        try:
            client.completions.create(
                model="demo", prompt="Once", max_tokens=1500, extra_body={"ignore_eos": True}
            )
        except (openai.APIError, openai.APIConnectionError) as error:
            return time.monotonic(), f"{error} {error.__cause__!r}"
        return time.monotonic(), "ended without error"

    futures = [pool.submit(stream), pool.submit(stream), pool.submit(plain)]
    deadline = time.monotonic() + 60
    while len(begun) < 4 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(begun) >= 4
    return futures


@pytest.mark.parametrize(
    ("title", "words"),
    [
        ("Worker_TP1", ["rank 1", "pid {pid}", "SIGKILL"]),
        ("Worker_TP0", ["rank 0", "pid {pid}", "SIGKILL"]),
        ("EngineCore", ["EngineCore", "pid {pid}", "SIGKILL"]),
    ],
)
def test_killed_process_is_named_to_every_client_and_serve_exits_6(
    server: Server, title: str, words: list[str]
) -> None:
    url = server.wait_serving()
    pid = server.pid_of(title)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        futures = open_requests(url, pool)
        killed_at = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        ends = [future.result(30) for future in futures]
    assert server.wait_exit() == 6
    for ended_at, text in ends:
        for word in words:
            assert word.format(pid=pid) in text, (text, server.output)
        assert ended_at - killed_at < 1.0
    assert server.output.count("error: ") == 1
    for word in words:
        assert word.format(pid=pid) in server.output
    server.wait_nothing_left()


def test_sigkill_of_serve_closes_connections_and_leaves_nothing(server: Server) -> None:
    url = server.wait_serving()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        futures = open_requests(url, pool)
        os.kill(server.pid, signal.SIGKILL)
        ends = [future.result(30) for future in futures]
    server.process.wait(5)
    for _, text in ends:
        assert "ended without error" not in text
    server.wait_nothing_left()


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["^C", "SIGTERM"]
)
def test_a_signal_drains_and_leaves_within_5_s(server: Server, number: int, status: int) -> None:
    url = server.wait_serving()
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        events = client.completions.create(
            model="demo", prompt="Hello", max_tokens=8, stream=True, extra_body={"ignore_eos": True}
        )
        first = next(iter(events))
        rest = pool.submit(lambda: [event.choices[0].text for event in events])
        begun = time.monotonic()
        os.kill(server.pid, number)
        assert server.wait_exit(timeout_s=10) == status
        assert time.monotonic() - begun < 5
        assert first.choices
        assert len(rest.result(5)) >= 5  # what was under way was answered to its end
    assert "error: " not in server.output
    assert "Traceback" not in server.output
    server.wait_nothing_left()


def test_with_json_the_end_by_a_signal_is_one_document(tmp_path: Path, demo_model: Path) -> None:
    with serving([str(demo_model), "--json"], folder=tmp_path) as server:
        server.wait_serving()
        os.kill(server.pid, signal.SIGTERM)
        assert server.wait_exit() == 143
        assert server.process.stdout is not None
        document = json.loads(server.process.stdout.read())
    assert document == {"schema": "vcli.serve/1", "exit_code": 143, "ended": "terminated"}


def test_a_second_ctrl_c_leaves_at_once(server: Server) -> None:
    url = server.wait_serving()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        futures = open_requests(url, pool)
        os.kill(server.pid, signal.SIGINT)
        server.wait_line("draining")
        begun = time.monotonic()
        os.kill(server.pid, signal.SIGINT)
        assert server.wait_exit(timeout_s=10) == 130
        assert time.monotonic() - begun < 1.5
        for future in futures:
            future.result(10)
    server.wait_nothing_left()


@pytest.mark.parametrize("state", ["imported", "weights"])
def test_ctrl_c_while_starting_leaves_nothing(tmp_path: Path, demo_model: Path, state: str) -> None:
    with serving([str(demo_model), *_TP3], folder=tmp_path) as server:
        server.wait_line(f"ranks 0-2 {state}")
        os.kill(server.pid, signal.SIGINT)
        assert server.wait_exit(timeout_s=10) == 130
        assert "Traceback" not in server.output
        server.wait_nothing_left()


@pytest.mark.parametrize("title", ["Worker_TP2", "EngineCore"])
def test_a_process_killed_while_starting_is_named_and_serve_exits_5(
    tmp_path: Path, demo_model: Path, title: str
) -> None:
    with serving([str(demo_model), *_TP3], folder=tmp_path) as server:
        server.wait_line("ranks 0-2 imported")
        pid = server.pid_of(title)
        os.kill(pid, signal.SIGKILL)
        assert server.wait_exit() == 5
        assert server.output.count("error: ") == 1
        assert f"pid {pid}" in server.output
        assert "SIGKILL" in server.output
        server.wait_nothing_left()
