"""`vcli serve` by each start method: it answers, says how long it took, and leaves nothing."""

import json
import os
import re
import signal
import time
import urllib.request
from pathlib import Path

import pytest

from tests.support.processes import opened_devices
from tests.support.serving import serving

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

_SMALL = [
    "-tp",
    "3",
    "--max-model-len",
    "512",
    "--kv-cache-memory",
    "32M",
    "--max-num-seqs",
    "4",
    "--served-model-name",
    "demo",
]


def answer(url: str) -> str:
    body = {"model": "demo", "prompt": "The capital of France is", "max_tokens": 4}
    request = urllib.request.Request(
        f"{url}/v1/completions",
        json.dumps({**body, "temperature": 0}).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)["choices"][0]["text"]


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


@pytest.mark.parametrize("method", ["forkserver", "fork", "spawn"])
def test_each_start_method_serves_and_ends_in_order(
    tmp_path: Path, demo_model: Path, method: str
) -> None:
    arguments = [str(demo_model), *_SMALL, "--start-method", method, "--timeline"]
    with serving(arguments, folder=tmp_path) as server:
        url = server.wait_serving()
        assert f"start_method: {method} (asked for" in server.output
        assert "Paris" in answer(url)
        core, worker = server.pid_of("EngineCore"), server.pid_of("Worker_TP1")
        if method == "spawn":
            assert (parent_of(core), parent_of(worker)) == (server.pid, core)
        else:
            helper = server.pid_of("ForkServer")
            assert (parent_of(core), parent_of(worker)) == (helper, helper)
            assert len(list(Path(f"/proc/{helper}/task").iterdir())) == 1
            assert opened_devices(helper) == []
        table, *_ = re.split(r"^process +pid", server.output, flags=re.MULTILINE)[1:]
        for state in ("spawned", "device", "joined", "weights", "kv", "warm-up", "ready"):
            assert re.search(rf"t\d {state}", table)
        titles = ["ApiServer", "EngineCore", *(f"Worker_TP{rank}" for rank in range(3))]
        titles += ["ForkServer"] * (method != "spawn")
        for title in titles:
            assert re.search(rf"^{title} +\d+ +\d+\.\d\d", table, re.MULTILINE)
        # Once more after the first token, which is the API server's.
        server.wait_line("t9 ready +t10 first token$")
        server.wait_line(r"^ApiServer .* \d+\.\d\d +\d+\.\d\d$")
        os.kill(server.pid, signal.SIGINT)
        assert server.wait_exit() == 130
        assert "Traceback" not in server.output
        server.wait_nothing_left()


def test_killed_fork_server_is_named_and_requests_are_answered(
    tmp_path: Path, demo_model: Path
) -> None:
    with serving([str(demo_model), *_SMALL], folder=tmp_path) as server:
        url = server.wait_serving()
        helper, worker = server.pid_of("ForkServer"), server.pid_of("Worker_TP1")
        os.kill(helper, signal.SIGKILL)
        server.wait_line(rf"fork server \(pid {helper}\) killed by SIGKILL", timeout_s=10)
        assert "Paris" in answer(url)
        # A worker that dies now is named as ever.
        os.kill(worker, signal.SIGKILL)
        assert server.wait_exit() == 6
        assert f"pid {worker}" in server.output
        server.wait_nothing_left()


def test_fork_server_killed_before_the_core_was_started_is_replaced_by_spawn(
    tmp_path: Path, demo_model: Path
) -> None:
    with serving([str(demo_model), *_SMALL], folder=tmp_path) as server:
        server.wait_line("start_method: forkserver")
        # It may not have its title yet.
        command = "vcli.runtime.process.fork_server|vcli::ForkServer"
        (helper,) = (pid for pid, text in server.family().items() if re.search(command, text))
        os.kill(helper, signal.SIGKILL)
        assert "Paris" in answer(server.wait_serving())
        assert "no fork for EngineCore" in server.output
        os.kill(server.pid, signal.SIGTERM)
        assert server.wait_exit() == 143
        server.wait_nothing_left()


def test_ctrl_c_while_the_fork_server_imports_leaves_nothing(
    tmp_path: Path, demo_model: Path
) -> None:
    with serving([str(demo_model), *_SMALL], folder=tmp_path) as server:
        server.wait_line("start_method: forkserver")
        begun = time.monotonic()
        os.kill(server.pid, signal.SIGINT)
        assert server.wait_exit(timeout_s=10) == 130
        assert time.monotonic() - begun < 2.5
        assert "Traceback" not in server.output
        server.wait_nothing_left()


def test_owner_killed_while_the_fork_server_imports_leaves_nothing(
    tmp_path: Path, demo_model: Path
) -> None:
    with serving([str(demo_model), *_SMALL], folder=tmp_path) as server:
        server.wait_line("start_method: forkserver")
        os.kill(server.pid, signal.SIGKILL)
        server.process.wait(5)
        server.wait_nothing_left()


def test_two_instances_serve_at_once(tmp_path: Path, demo_model: Path) -> None:
    with (
        serving([str(demo_model), *_SMALL], folder=tmp_path) as first,
        serving([str(demo_model), *_SMALL], folder=tmp_path) as second,
    ):
        urls = [first.wait_serving(), second.wait_serving()]
        assert all("Paris" in answer(url) for url in urls)
        os.kill(first.pid, signal.SIGINT)
        assert first.wait_exit() == 130
        assert "Paris" in answer(urls[1])
        os.kill(second.pid, signal.SIGINT)
        assert second.wait_exit() == 130
        first.wait_nothing_left()
        second.wait_nothing_left()
