"""Symptoms, as in `test_symptoms.py`, of whole programs: `vcli serve` on one node and on two."""

import json
import os
import signal
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import opened_files, seconds_until_all_ended, wait_until
from tests.support.serving import Server, serving
from tests.support.tiny_model import write_checkpoint
from tests.support.tiny_tokenizer import write_tokenizer

pytestmark = [pytest.mark.process, pytest.mark.slow]

SMALL = ["--max-model-len", "64", "--kv-cache-memory", "1M", "--max-num-seqs", "4"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    write_checkpoint(folder)
    return str(write_tokenizer(folder))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Where state, cache and sockets would be."""
    folder = tmp_path / "home"
    folder.mkdir()
    return folder


@pytest.fixture
def server(tmp_path: Path, model: str, home: Path) -> Iterator[Server]:
    environ = {"HOME": str(home), "VCLI_HOME": str(home), "XDG_RUNTIME_DIR": str(home)}
    with serving([model, "-tp", "2", *SMALL], folder=tmp_path, environ=environ) as running:
        yield running


def get(url: str) -> tuple[int, dict[str, object]]:
    try:
        with urllib.request.urlopen(url, timeout=30) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def memory_files(server: Server) -> list[str]:
    """Names of the memory that the processes of a server share."""
    return [
        target
        for pid in server.family()
        for target in opened_files(pid)
        if target.startswith("/memfd:vcli-")
    ]


def test_3_engine_core_and_workers_do_not_outlive_a_killed_server(server: Server) -> None:
    server.wait_serving()
    titles = " ".join(server.family().values())
    assert all(title in titles for title in ("EngineCore", "Worker_TP0", "Worker_TP1"))
    os.kill(server.pid, signal.SIGKILL)
    server.process.wait(5)
    server.wait_nothing_left()


def test_27_all_processes_killed_at_once_leave_no_file_and_no_memory(
    server: Server, home: Path
) -> None:
    """What they share has no name, so there is nothing of a dead instance that could be reaped."""
    server.wait_serving()
    assert memory_files(server)
    os.killpg(server.pid, signal.SIGSTOP)  # so that none of them can clean up after another
    pids = list(server.family())
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    server.process.wait(5)
    seconds_until_all_ended(pids, 5.0)
    server.wait_nothing_left()
    assert list(home.rglob("*")) == []


def test_32_ready_names_a_worker_that_does_not_answer_and_forgets_it_when_it_does(
    server: Server,
) -> None:
    url = server.wait_serving()
    assert get(f"{url}/ready")[0] == 200
    worker = server.pid_of("Worker_TP1")
    os.kill(worker, signal.SIGSTOP)
    wait_until(lambda: get(f"{url}/ready")[0] == 503, 20)  # an answer holds for a second
    said = get(f"{url}/ready")[1]
    assert (said["missing"], said["answered"]) == ([1], [0])
    assert said["reason"] == "no answer of rank 1"
    os.kill(worker, signal.SIGCONT)
    wait_until(lambda: get(f"{url}/ready")[0] == 200, 20)
    os.kill(worker, signal.SIGKILL)
    assert server.wait_exit() == 6


@pytest.fixture(params=["127.0.0.1", "::1"], ids=["ipv4", "ipv6"])
def master(request: pytest.FixtureRequest) -> tuple[str, int]:
    """An address of this host, and a port where it and the two after it are free."""
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    for port in range(23000, 32000, 10):
        try:
            for offset in range(3):
                socket.create_server((request.param, port + offset), family=family).close()
        except OSError:
            continue
        return request.param, port
    pytest.skip(f"{request.param} is no address of this host")


def two_nodes(model: str, master: tuple[str, int]) -> list[str]:
    address, port = master
    node_0 = ["--master-addr", address, "--master-port", str(port), "--no-preflight"]
    return [model, "-n", "2", "-pp", "2", *node_0, *SMALL, "--join-timeout", "60"]


def test_4_12_19_a_follower_knows_its_role_and_ends_when_its_leader_is_killed(
    tmp_path: Path, model: str, master: tuple[str, int]
) -> None:
    """Started by the same command on IPv4 and IPv6; it names the leader once, and does not stay."""
    arguments = two_nodes(model, master)
    with (
        serving([*arguments, "-r", "0"], folder=tmp_path) as leader,
        serving([*arguments, "-r", "1"], folder=tmp_path) as follower,
    ):
        url = leader.wait_serving()
        follower.wait_line(rf"node 0 .* serves at {url}")
        titles = " ".join(follower.family().values())
        assert "Worker_PP1" in titles
        assert "EngineCore" not in titles
        os.kill(leader.pid, signal.SIGKILL)
        assert follower.wait_exit() == 6
        assert follower.output.count("error: ") == 1
        assert "node0" in follower.output
        assert "Traceback" not in follower.output
        leader.process.wait(5)
        leader.wait_nothing_left()
        follower.wait_nothing_left()


@pytest.mark.parametrize("master", ["127.0.0.1"], indirect=True)
def test_8_port_that_is_taken_is_told_before_anything_is_started(
    tmp_path: Path, model: str, master: tuple[str, int]
) -> None:
    with (
        socket.create_server(master),
        serving([*two_nodes(model, master), "-r", "0"], folder=tmp_path) as leader,
    ):
        assert leader.wait_exit() == 2
        port = master[1]
        assert f"port {port} of 127.0.0.1 cannot be used: Address already in use" in leader.output
        assert f"--master-port {port + 10} on all nodes" in leader.output
        assert "Traceback" not in leader.output


@pytest.mark.parametrize("master", ["127.0.0.1"], indirect=True)
def test_10_node_that_can_not_be_reached_is_told_with_the_reason_at_the_join_deadline(
    tmp_path: Path, model: str, master: tuple[str, int]
) -> None:
    arguments = [*two_nodes(model, master), "-r", "1", "--join-timeout", "2"]
    with serving(arguments, folder=tmp_path) as follower:
        assert follower.wait_exit() == 3
        assert "node 0 did not come within 2 s: " in follower.output
        assert "connection refused" in follower.output
        assert "-r 0" in follower.output  # the line to type there


def test_11_address_of_another_host_is_not_listened_on(tmp_path: Path, model: str) -> None:
    elsewhere = ("192.0.2.7", 23000)  # reserved for documentation: nobody has it
    with serving([*two_nodes(model, elsewhere), "-r", "0"], folder=tmp_path) as leader:
        assert leader.wait_exit() == 2
        assert "192.0.2.7 is no address of this host, so this is not node 0" in leader.output
        assert "Traceback" not in leader.output
