"""`doctor --instance` on a real server: healthy, hung, stopped, gone; and what it refuses."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.test_doctor import Ran
from tests.diagnostics.test_watch import start_orphan
from tests.support.serving import Server, serving
from tests.support.tiny_model import write_checkpoint
from tests.support.tiny_tokenizer import write_tokenizer
from vcli.cli import doctor_instance_facts
from vcli.diagnostics.files import HostFiles
from vcli.diagnostics.instances import read_process

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("tiny")
    write_checkpoint(folder)
    write_tokenizer(folder)
    arguments = [str(folder), "-tp", "2", "--device", "cpu", "--no-preflight"]
    with serving(arguments, folder=folder) as running:
        running.wait_serving()
        yield running


def look(pid: int | str, *arguments: str) -> Ran:
    return Ran(["--instance", str(pid), *arguments])


def test_a_healthy_instance_shows_processes_ranks_and_stacks(server: Server) -> None:
    worker = server.pid_of("Worker_TP1")
    ran = look(worker, "--json")
    document = ran.document
    assert (ran.status, document["schema"], document["pid"]) == (0, "vcli.instance/1", server.pid)
    assert document["url"] == server.wait_serving()
    by_title = {item["title"]: item for item in document["processes"]}
    assert set(by_title) >= {"vcli::ForkServer", "vcli::EngineCore", "vcli::Worker_TP0"}
    core = by_title["vcli::EngineCore"]
    assert core["parent_pid"] == server.pid
    assert by_title["vcli::Worker_TP1"]["parent_pid"] == core["pid"]
    assert [(rank["rank"], rank["state"]) for rank in document["ranks"]] == [
        (0, "ready"),
        (1, "ready"),
    ]
    main = next(t for t in by_title["vcli::Worker_TP1"]["stacks"] if t["is_main"])
    assert "_serve_one" in {frame["function"] for frame in main["frames"]}
    assert document["waits"] == []
    assert "no process of it has a GPU open" in document["nccl_ras"]["skipped"]


def test_the_text_names_each_rank_and_the_place_where_it_is(server: Server) -> None:
    text = look(server.pid).out
    assert "Worker_TP0  ready" in text
    assert "nobody waits for a rank" in text
    assert "worker_proc.py" in text
    assert len(look(server.pid, "-v").out) > len(text)


def test_it_names_the_rank_that_did_not_come_and_mends_the_cause(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_instance_facts, "STALL_S", 0.5)
    monkeypatch.setattr(doctor_instance_facts, "MIN_WAIT_S", 0.5)
    late = server.pid_of("Worker_TP1")
    os.kill(late, signal.SIGSTOP)
    request = threading.Thread(target=complete, args=(server.wait_serving(),))
    request.start()
    try:
        document = wait_for_waits(server)
    finally:
        os.kill(late, signal.SIGCONT)
        request.join(60)
    assert document["exit_code"] == 1
    assert "rank 1 (Worker_TP1) has not come to the all_reduce of TP [0, 1]" in document["waits"][0]
    assert document["problems"][0]["remedy"] == f"kill -CONT {late}"
    ranks = document["ranks"]
    assert ranks[0]["collective"] == "all_reduce of TP"
    assert ranks[0]["steps_begun"] == ranks[0]["steps_ended"] + 1
    stopped = next(item for item in document["processes"] if item["pid"] == late)
    assert (stopped["state"], stopped["stacks"]) == ("stopped", [])


def complete(url: str) -> None:
    """A request that ends when the server goes on."""
    with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as response:
        name = json.load(response)["data"][0]["id"]
    request = urllib.request.Request(
        f"{url}/v1/completions",
        data=json.dumps({"model": name, "prompt": "Hello", "max_tokens": 4}).encode(),
        headers={"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        response.read()


def wait_for_waits(server: Server) -> dict:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        document = look(server.pid, "--json").document
        if document["waits"]:
            return document
    raise AssertionError("nobody waited")


def test_a_process_of_another_program_is_exit_2(server: Server) -> None:
    ran = look(os.getpid())
    assert ran.status == 2
    assert f"pid {os.getpid()} belongs to no instance of vcli" in ran.err
    assert str(server.pid) in ran.err


@pytest.mark.parametrize("typed", ["99999999", "0", "-1", "latestt", "9" * 40, "²", ""])
def test_what_is_no_pid_is_exit_2(typed: str) -> None:
    ran = Ran([f"--instance={typed}"])
    assert ran.status == 2
    assert "Traceback" not in ran.err


@pytest.mark.parametrize("flag", ["--deep", "--watch", "--fix", "--html=x", "net-01"])
def test_flags_about_checks_are_refused(flag: str) -> None:
    ran = Ran(["--instance", "latest", flag])
    assert ran.status == 2
    assert "runs no checks" in ran.err


def test_the_orphan_of_a_dead_instance_is_listed_with_its_end(server: Server) -> None:
    orphan = start_orphan()
    try:
        wait_for_title(orphan)
        text = look(server.pid).out
        left = look(server.pid, "--json").document["leftovers"]
        ran = look(orphan)
    finally:
        os.kill(orphan, signal.SIGKILL)
    assert f"kill {orphan}" in text[text.index("left over") :]
    assert f"kill {orphan}" in [item["remedy"] for item in left]
    assert ran.status == 2
    assert "is left over from an instance that is gone" in ran.err


def wait_for_title(pid: int) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        process = read_process(HostFiles(), pid)
        if process is not None and process.title.startswith("vcli::"):
            return
        time.sleep(0.01)
    raise AssertionError("no title")


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user")
def test_another_users_instance_says_why_it_cannot_be_seen(server: Server) -> None:
    # Once as root: what is imported late may lie where the other user cannot read.
    code = (
        "import io, os, sys\nfrom pathlib import Path\n"
        "from vcli.cli.environment import Environment\nfrom vcli.cli.main import main\n"
        "def look(out, err):\n"
        f"    return main(Environment(argv=('doctor', '--instance', '{server.pid}'), environ={{}},"
        " cwd=Path('/'), stdout=out, stderr=err))\n"
        "assert look(io.StringIO(), io.StringIO()) == 0\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "sys.exit(look(sys.stdout, sys.stderr))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "runs as user root" in done.stderr
    assert f"sudo -u root vcli doctor --instance {server.pid}" in done.stderr


def test_without_an_instance_latest_is_exit_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "proc").mkdir()
    monkeypatch.setattr("vcli.cli.doctor_instance.HostFiles", lambda: HostFiles(tmp_path))
    from vcli.cli import doctor_instance

    monkeypatch.setattr(doctor_instance, "find_processes", lambda files: ())
    ran = look("latest")
    assert ran.status == 1
    assert "no instance of vcli runs on this machine" in ran.err
    assert "vcli serve starts one" in ran.err
