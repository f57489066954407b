"""A process of a running `vcli serve` that is stopped: named, waited for, to blame in the end."""

import concurrent.futures
import json
import os
import signal
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.support.processes import wait_until
from tests.support.serving import Server, serving
from tests.support.tiny_model import write_checkpoint
from tests.support.tiny_tokenizer import write_tokenizer

pytestmark = [pytest.mark.process, pytest.mark.slow]

FLAGS = ["-tp", "2", "--max-model-len", "64", "--kv-cache-memory", "1M", "--max-num-seqs", "4"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    write_checkpoint(folder)
    return str(write_tokenizer(folder))


def complete(url: str) -> tuple[int, str]:
    """HTTP status, and the finish reason or the message."""
    body = {"prompt": "Hello", "max_tokens": 32, "ignore_eos": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return response.status, json.load(response)["choices"][0]["finish_reason"]
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)["error"]["message"]


def ready(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=30) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def stop(server: Server, title: str) -> int:
    pid = server.pid_of(title)
    os.kill(pid, signal.SIGSTOP)
    return pid


@pytest.mark.parametrize("title", ["EngineCore", "Worker_TP1"])
def test_who_is_stopped_is_named_and_everything_goes_on_with_it(
    model: str, tmp_path: Path, title: str
) -> None:
    with serving([model, *FLAGS], folder=tmp_path) as server:
        url = server.wait_serving()
        pid = stop(server, title)
        with concurrent.futures.ThreadPoolExecutor() as pool:
            answer = pool.submit(complete, url)
            line = server.wait_line(f"{title}.* is stopped", timeout_s=30)
            assert f"kill -CONT {pid}" in line
            status, said = ready(url)
            assert status == 503
            assert f"kill -CONT {pid}" in said
            os.kill(pid, signal.SIGCONT)
            assert answer.result() == (200, "length")
        wait_until(lambda: ready(url)[0] == 200, 20)
        os.kill(server.pid, signal.SIGTERM)
        assert server.wait_exit() == 143
        assert "error: " not in server.output


@pytest.mark.parametrize(
    ("title", "who"),
    [("EngineCore", "EngineCore pid {pid}"), ("Worker_TP1", "Worker_TP1 (rank 1)")],
)
def test_who_stays_stopped_is_blamed_at_the_deadline_of_a_step(
    model: str, tmp_path: Path, title: str, who: str
) -> None:
    deadline = ["--execute-model-timeout", "6"]
    with serving([model, *FLAGS, *deadline], folder=tmp_path) as server:
        url = server.wait_serving()
        pid = stop(server, title)
        status, message = complete(url)
        assert status == 503
        assert f"kill -CONT {pid}" in message
        assert server.wait_exit() == 6
        error = server.wait_line("error: ")
        assert who.format(pid=pid) in error.partition(" failed in ")[0]
        assert "is stopped" in error or "stopped (SIGSTOP" in error
        server.wait_nothing_left()
