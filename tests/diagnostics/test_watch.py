"""`doctor --watch`: what counts as a change, what is shown of it, how it ends."""

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.test_doctor import Ran
from vcli.cli.doctor_watch import DEFAULT_SECONDS, take_seconds
from vcli.cli.runtime_checks import registry
from vcli.diagnostics import CheckResult, Status
from vcli.diagnostics.changes import Kind, changes_between, is_same_measurement
from vcli.topology import ConfigError

CHECK = registry().get("LIM-03")


def result(status: Status, measured: str = "same", id_: str = "LIM-03") -> CheckResult:
    return CheckResult(check=registry().get(id_), status=status, measured=measured, remedy="rm x")


@pytest.mark.parametrize(
    ("before", "now", "kind"),
    [
        (result(Status.PASS), result(Status.WARN), Kind.WORSE),
        (result(Status.WARN), result(Status.FAIL), Kind.WORSE),
        (result(Status.FAIL), result(Status.PASS), Kind.BETTER),
        (result(Status.PASS), result(Status.SKIP), Kind.VALUE),
        (result(Status.PASS, "10.0 GiB free"), result(Status.PASS, "5.0 GiB free"), Kind.VALUE),
        (result(Status.PASS, "10.0 GiB free"), result(Status.PASS, "9.9 GiB free"), None),
        (result(Status.PASS), result(Status.PASS), None),
    ],
)
def test_what_is_a_change(before: CheckResult, now: CheckResult, kind: Kind | None) -> None:
    kinds = [change.kind for change in changes_between([before], [now])]
    assert kinds == ([] if kind is None else [kind])


def test_failures_come_first_with_what_to_type() -> None:
    before = [result(Status.PASS, "1", "LIM-01"), result(Status.PASS, "none")]
    now = [result(Status.PASS, "2", "LIM-01"), result(Status.FAIL, "some")]
    worse, other = changes_between(before, now)
    assert worse.describe() == "LIM-03 worse: pass -> fail: some; rm x"
    assert other.describe() == "LIM-01 changed: 1 -> 2"


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [("3 of 4", "3 of 4", True), ("0 errors", "1 errors", False), ("eth0 up", "eth0 down", False),
     ("100 MiB", "109 MiB", True), ("100 MiB", "120 MiB", False), ("1 GPU", "1 GPU, 2", False),
     ("97,472 tokens (11.9 × 8,192)", "97,904 tokens (12.0 × 8,192)", True),
     ("97,472 tokens", "47,472 tokens", False), ("1020.0 MiB free", "1.0 GiB free", True),
     ("1.0 MiB free", "1.0 GiB free", False), ("2 gone after 2 ms", "1 gone after 2 ms", False),
     ("GPU 0,1,2", "GPU 0,1,3", False), ("driver 580.95", "driver 550.10", False),
     ("CUDA 13.0", "CUDA 12.8", False), ("NCCL 2.28.9", "NCCL 2.28.10", False),
     ("CPUs 0,128", "CPUs 128", False), ("1,000 tokens", "999 tokens", True)],
)  # fmt: skip
def test_numbers_may_move_by_a_tenth(one: str, other: str, is_same: bool) -> None:
    assert is_same_measurement(one, other) is is_same


@pytest.mark.parametrize(
    ("one", "other"),
    [("2 workers gone 2 ms after the kill", "2 workers gone 9 ms after the kill"),
     ("513.2 MiB of weights at 875.0 MiB/s", "513.2 MiB of weights at 3.3 GiB/s"),
     ("taken by pid 12 (server, for 3 s)", "taken by pid 12 (server, for 2 min)")],
)  # fmt: skip
def test_times_and_speeds_alone_are_no_change(one: str, other: str) -> None:
    assert is_same_measurement(one, other)


def test_a_number_among_the_words_is_the_interval() -> None:
    assert take_seconds(["net"]) == (["net"], DEFAULT_SECONDS)
    assert take_seconds(["net", "30"]) == (["net"], 30.0)
    assert take_seconds(["1.5s", "lim-02"]) == (["lim-02"], 1.5)
    for words in (["0"], ["0.1"], ["99999999"], ["2", "3"]):
        with pytest.raises(ConfigError, match="one number of seconds"):
            take_seconds(words)


@pytest.mark.parametrize(
    "flags", [["--fix"], ["--bundle", "b.tgz"], ["--save-baseline", "b"], ["--save-facts", "f"]]
)
def test_files_for_one_run_are_refused(flags: list[str]) -> None:
    ran = Ran(["--watch", "lim-08", *flags])
    assert ran.status == 2
    assert "--watch goes with none of" in ran.err


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "vcli.cli", "doctor", "--watch", "0.5", "lim-08", *arguments]


@pytest.mark.process
def test_with_json_each_line_is_a_document_and_ctrl_c_is_130() -> None:
    with subprocess.Popen(command("--json"), stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        documents = [json.loads(child.stdout.readline()) for _ in range(2)]
        child.send_signal(signal.SIGINT)
        assert child.wait(20) == 130
    assert [item["schema"] for item in documents] == ["vcli.doctor/1"] * 2
    assert documents[1]["since_last"] == []
    assert documents[0]["checks"][0]["id"] == "LIM-08"


@pytest.mark.process
def test_a_pipe_gets_the_report_once_and_then_a_line_for_each_change(tmp_path: Path) -> None:
    page = tmp_path / "r.html"
    arguments = [word if word != "lim-08" else "host-09" for word in command("--html", str(page))]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, bufsize=1) as child:
        assert child.stdout is not None
        lines = iter(child.stdout.readline, "")
        assert any("exit 0" in line or "exit 1" in line for line in lines)
        orphan = start_orphan()
        try:
            change = next(line for line in lines if "HOST-09" in line)
        finally:
            os.kill(orphan, signal.SIGKILL)
        better = next(line for line in lines if "HOST-09 better" in line)
        child.send_signal(signal.SIGINT)
        assert child.wait(20) == 130
    assert f"kill {orphan}" in change
    assert "warn -> pass" in better
    assert page.read_text().startswith("<!DOCTYPE html>")


def start_orphan() -> int:
    """A process with a title of ours whose parent has ended."""
    code = (
        "import os, time\nfrom setproctitle import setproctitle\n"
        "pid = os.fork()\n"
        "if pid: os.write(1, str(pid).encode()); os._exit(0)\n"
        "os.close(1); os.close(2); os.setsid(); setproctitle('vcli::Worker_TP9'); time.sleep(120)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    return int(done.stdout)


@pytest.mark.process
def test_a_terminal_is_drawn_anew() -> None:
    leader, follower = pty.openpty()
    with subprocess.Popen(
        command(), stdout=follower, env={**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    ) as child:
        os.close(follower)
        seen = b""
        while seen.count(b"\x1b[H") < 2:
            seen += os.read(leader, 4096)
        child.send_signal(signal.SIGINT)
        assert child.wait(20) == 130
    os.close(leader)
    assert seen.count(b"\x1b[2J") == 1
    assert "^C ends" in seen.decode()
