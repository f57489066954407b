"""What a user sees when a process is stopped while `vcli serve` starts: who, and what helps."""

import contextlib
import os
import signal
import socket
from pathlib import Path

import pytest

from tests.support.processes import wait_until
from tests.support.serving import Server, serving
from tests.support.tiny_model import write_checkpoint
from tests.support.tiny_tokenizer import write_tokenizer
from vcli.topology.errors import ExitStatus

pytestmark = [pytest.mark.e2e, pytest.mark.process, pytest.mark.slow]

SMALL = ["--max-model-len", "64", "--kv-cache-memory", "1M", "--max-num-seqs", "4"]

#: Imported by each worker when it is made: stops the process that is named, at a known moment.
_STOPS_ITSELF = """
import os, signal
from pathlib import Path
if os.environ["STOPPED"] in Path("/proc/self/cmdline").read_text():
    os.kill(os.getpid(), signal.SIGSTOP)
class Extension: ...
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    write_checkpoint(folder)
    return str(write_tokenizer(folder))


def assert_held(server: Server, process: str) -> None:
    assert server.wait_exit(timeout_s=60) == ExitStatus.START_FAILED
    (told,) = [line for line in server.lines if line.startswith("error: ")]
    assert told.startswith(f"error: {process} ")
    assert "StartTimeout: " in told
    assert "stopped (SIGSTOP or a debugger): kill -CONT " in told
    assert "a longer --start-timeout does not help" in server.output
    server.wait_nothing_left()


@pytest.mark.parametrize(
    ("title", "size", "process"),
    [("EngineCore", "1", "EngineCore pid"), ("Worker_TP1", "2", "Worker_TP1 (rank 1) pid")],
)
def test_a_process_that_is_stopped_in_the_start_is_named(
    tmp_path: Path, model: str, title: str, size: str, process: str
) -> None:
    (tmp_path / "stops_itself.py").write_text(_STOPS_ITSELF)
    flags = ["-tp", size, "--worker-extension-cls", "stops_itself.Extension"]
    environ = {"PYTHONPATH": str(tmp_path), "STOPPED": title}
    arguments = [model, *SMALL, *flags, "--start-timeout", "12"]
    with serving(arguments, folder=tmp_path, environ=environ) as server:
        assert_held(server, process)


def test_a_fork_server_that_is_stopped_in_its_imports_is_named(tmp_path: Path, model: str) -> None:
    arguments = [model, *SMALL, "--start-timeout", "2"]
    with serving(arguments, folder=tmp_path) as server:

        def fork_server() -> list[int]:
            family = server.family().items()
            return [pid for pid, command in family if "fork_server" in command]

        wait_until(lambda: fork_server() != [], timeout_s=20)
        os.kill(fork_server()[0], signal.SIGSTOP)
        assert_held(server, "ForkServer pid")


def free_port() -> int:
    """One that is free together with the two after it."""
    for port in range(24000, 32000, 10):
        with contextlib.suppress(OSError):
            for offset in range(3):
                socket.create_server(("127.0.0.1", port + offset)).close()
            return port
    raise AssertionError("no free port")


@pytest.mark.parametrize("rank", [0, 1])
def test_of_two_nodes_both_name_the_worker_that_is_stopped_and_not_the_one_that_waits_for_it(
    tmp_path: Path, model: str, rank: int
) -> None:
    (tmp_path / "stops_itself.py").write_text(_STOPS_ITSELF)
    master = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    flags = ["-n", "2", "-pp", "2", *master, *SMALL, "--start-timeout", "12", "--no-preflight"]
    extension = ["--worker-extension-cls", "stops_itself.Extension"]
    environ = {"PYTHONPATH": str(tmp_path), "STOPPED": f"Worker_PP{rank}"}
    arguments = [model, *flags, *extension]
    with (
        serving([*arguments, "-r", "0"], folder=tmp_path, environ=environ) as leader,
        serving([*arguments, "-r", "1"], folder=tmp_path, environ=environ) as follower,
    ):
        assert_held(leader, f"Worker_PP{rank} (rank {rank}) pid")
        assert_held(follower, f"Worker_PP{rank} (rank {rank}) pid")
