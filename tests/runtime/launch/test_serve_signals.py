"""Signals to a running `vcli serve`, to all of its processes or to one: what its user sees."""

import contextlib
import json
import os
import signal
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.serving import Server, serving
from tests.support.tiny_model import write_checkpoint
from tests.support.tiny_tokenizer import write_tokenizer

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.usefixtures("hang_up_ends")]

FLAGS = ["--max-model-len", "512", "--kv-cache-memory", "4M", "--max-num-seqs", "4"]
#: A drain is not what is tested for its speed.
PATIENT = ["--shutdown-timeout", "60"]
LONG = 500


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    write_checkpoint(folder)
    return str(write_tokenizer(folder))


@contextlib.contextmanager
def served(model: str, folder: Path, *flags: str) -> Iterator[tuple[Server, str]]:
    arguments = [model, "--served-model-name", "tiny", *FLAGS, *(flags or ("-tp", "2", *PATIENT))]
    with serving(arguments, folder=folder) as server:
        yield server, server.wait_serving()


class Answer:
    """A stream that has begun; `rest` gives its finish reason and number of tokens."""

    def __init__(self, url: str, max_tokens: int) -> None:
        options = {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        body = {"model": "tiny", "prompt": "Hello", "max_tokens": max_tokens, **options}
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), headers
        )
        self._lines = urllib.request.urlopen(request, timeout=120)
        self._lines.readline()

    def rest(self) -> tuple[str, int]:
        with self._lines as lines:
            events = [line.removeprefix(b"data: ") for line in lines if line.startswith(b"data: ")]
        assert events[-1].strip() == b"[DONE]"
        decoded = [json.loads(event) for event in events[:-1]]
        (reason,) = {
            choice["finish_reason"]
            for event in decoded
            for choice in event["choices"]
            if choice["finish_reason"] is not None
        }
        return reason, decoded[-1]["usage"]["completion_tokens"]


def warnings_of(server: Server) -> list[str]:
    return [line for line in server.lines if " WARNING " in line or " ERROR " in line]


@pytest.mark.parametrize(
    ("layout", "number"),
    [
        ("tp", signal.SIGTERM),
        ("tp", signal.SIGINT),
        ("tp", signal.SIGHUP),
        ("pp", signal.SIGTERM),
        ("one", signal.SIGTERM),
    ],
)
def test_signal_to_every_process_drains_what_runs(
    model: str, tmp_path: Path, layout: str, number: signal.Signals
) -> None:
    """As an init system sends it to a control group, and a terminal's end to all of a session."""
    sizes = {"tp": ["-tp", "2"], "pp": ["-pp", "2"], "one": []}[layout]
    with served(model, tmp_path, *sizes, *PATIENT) as (server, url):
        answer = Answer(url, LONG)
        for pid in server.family():
            os.kill(pid, number)
        assert answer.rest() == ("length", LONG)
        assert server.wait_exit() == (130 if number == signal.SIGINT else 143)
        assert server.output.count("stopping: ") == 1
        assert f"stopping: {number.name}; draining 1 request for up to 60 s" in server.output
        assert warnings_of(server) == []
        server.wait_nothing_left()


def test_systemd_stop_with_a_hang_up_after_sigterm_still_drains(model: str, tmp_path: Path) -> None:
    with served(model, tmp_path) as (server, url):
        answer = Answer(url, LONG)
        for number in (signal.SIGTERM, signal.SIGCONT, signal.SIGHUP, signal.SIGHUP):
            for pid in server.family():
                os.kill(pid, number)
        assert answer.rest() == ("length", LONG)
        assert server.wait_exit() == 143
        server.wait_nothing_left()


def test_signal_to_single_processes_is_told_and_ends_nothing(model: str, tmp_path: Path) -> None:
    with served(model, tmp_path) as (server, url):
        worker, core = server.pid_of("Worker_TP1"), server.pid_of("EngineCore")
        os.kill(worker, signal.SIGTERM)
        os.kill(core, signal.SIGHUP)
        os.kill(server.pid_of("ForkServer"), signal.SIGTERM)
        line = server.wait_line(rf"Worker_TP1 \(rank 1, pid {worker}\) got SIGTERM and runs on")
        assert f"`kill {server.pid}` stops this one" in line
        server.wait_line(rf"EngineCore \(pid {core}\) got SIGHUP and runs on")
        assert Answer(url, 8).rest() == ("length", 8)
        os.kill(server.pid, signal.SIGTERM)
        assert server.wait_exit() == 143
        server.wait_nothing_left()


def test_nohup_keeps_serving_at_the_end_of_the_terminal(model: str, tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with served(model, tmp_path) as (server, url):
            for pid in server.family():
                os.kill(pid, signal.SIGHUP)
            assert Answer(url, 8).rest() == ("length", 8)
            os.kill(server.pid, signal.SIGTERM)
            assert server.wait_exit() == 143
            assert "stopping: SIGHUP" not in server.output
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    ("number", "to_all"),
    [
        (signal.SIGINT, False),
        (signal.SIGTERM, False),
        (signal.SIGHUP, False),
        (signal.SIGTERM, True),
    ],
)
def test_start_that_is_stopped_says_so_in_one_line(
    model: str, tmp_path: Path, number: signal.Signals, to_all: bool
) -> None:
    with serving([model, "-tp", "2", *FLAGS], folder=tmp_path) as server:
        server.wait_line("ranks 0-1 device")
        for pid in server.family() if to_all else [server.pid]:
            os.kill(pid, number)
        assert server.wait_exit() == (130 if number == signal.SIGINT else 143)
        stopping = [line for line in server.lines if "stopping: " in line]
        assert len(stopping) == 1
        assert f"stopping: {number.name}" in stopping[0]
        assert warnings_of(server) == []
        assert "error: " not in server.output
        server.wait_nothing_left()


def test_ctrl_c_before_the_engine_is_started_says_so_too(model: str, tmp_path: Path) -> None:
    with serving([model, *FLAGS], folder=tmp_path) as server:
        server.wait_line("^plan ")
        os.kill(server.pid, signal.SIGINT)
        assert server.wait_exit() == 130
        assert server.output.count("stopping: SIGINT ") == 1
        assert warnings_of(server) == []
        server.wait_nothing_left()


def free_ports(count: int) -> int:
    """The first of so many free ports in a row."""
    for first in range(24000, 32000, 10):
        with contextlib.suppress(OSError), contextlib.ExitStack() as held:
            for port in range(first, first + count):
                held.enter_context(socket.create_server(("127.0.0.1", port)))
            return first
    raise AssertionError("no free ports")


def test_signal_to_every_process_of_two_nodes_drains_what_runs(model: str, tmp_path: Path) -> None:
    master = ["--master-addr", "127.0.0.1", "--master-port", str(free_ports(3))]
    arguments = [
        *(model, "--served-model-name", "tiny", "-n", "2", "-pp", "2", *master, *FLAGS, *PATIENT),
        *("--no-preflight", "--join-timeout", "60"),
    ]
    with (
        serving([*arguments, "-r", "0"], folder=tmp_path) as leader,
        serving([*arguments, "-r", "1"], folder=tmp_path) as follower,
    ):
        url = leader.wait_serving()
        answer = Answer(url, LONG)
        for pid in (*follower.family(), *leader.family()):
            os.kill(pid, signal.SIGTERM)
        assert answer.rest() == ("length", LONG)
        for node in (leader, follower):
            assert node.wait_exit() == 143, node.output
            assert node.output.count("stopping: ") == 1
            assert warnings_of(node) == []
            assert "error: " not in node.output
            node.wait_nothing_left()
