"""`vcli doctor` from outside: exit codes, text, JSON, selection, speed, no false alarm."""

import io
import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vcli.cli.environment import Environment
from vcli.cli.main import main

ROOT = Path(__file__).parents[2]


class Ran:
    def __init__(
        self,
        arguments: list[str],
        *,
        encoding: str = "utf-8",
        environ: dict[str, str] | None = None,
    ) -> None:
        stdout = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        stderr = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        self.status = main(
            Environment(
                argv=("doctor", *arguments), environ=environ or {}, cwd=Path.cwd(),
                stdout=stdout, stderr=stderr,
            )
        )  # fmt: skip
        self.out = stdout.buffer.getvalue().decode(encoding)
        self.err = stderr.buffer.getvalue().decode(encoding)

    @property
    def document(self) -> dict:
        return json.loads(self.out)


def test_every_check_is_listed_with_its_level() -> None:
    ran = Ran(["--list-checks", "--json"])
    assert (ran.status, ran.document["schema"]) == (0, "vcli.checks/1")
    by_id = {item["id"]: item for item in ran.document["checks"]}
    assert by_id["NET-01"] == {
        "id": "NET-01", "group": "net", "level": "L0", "title": "own address toward node 0",
        "requires": ["NET-02"],
    }  # fmt: skip
    needed = (
        "HOST-01 HOST-03 HOST-04 HOST-05 HOST-07 PY-01 PY-02 PY-03 ENV-02 ENV-05 LIM-02 LIM-05 "
        "LIM-06 LIM-08 NET-01 NET-04 FIT-02 FIT-03 PROC-01 PROC-05"
    )
    assert set(needed.split()) <= set(by_id)
    text = Ran(["--list-checks", "net"]).out
    assert "NET-04  L0  ports are free" in text
    assert "HOST-01" not in text


def test_the_document_has_the_fields_of_the_contract() -> None:
    ran = Ran(["host-01", "py", "--json"])
    document = ran.document
    assert document["schema"] == "vcli.doctor/1"
    assert document["exit_code"] == ran.status
    assert set(document) == {"schema", "exit_code", "checks", "summary", "plan", "host"}
    assert list(document["checks"][0]) == [
        "id", "group", "status", "title", "measured", "expected", "why", "remedy", "seconds",
        "node_rank",
    ]  # fmt: skip
    assert {item["group"] for item in document["checks"]} == {"host", "py"}
    assert document["plan"]["world_size"] == 1
    assert document["host"]["cpu_count"] >= 1


@pytest.mark.parametrize(
    ("arguments", "said", "hint"),
    [
        (["net-99"], "no check or group 'net-99'", "NET-"),
        (["hots"], "no check or group 'hots'", "host"),
        (["--skip", "zzz"], "no check or group 'zzz'", "vcli doctor --list-checks"),
        (["--model", "/no/such"], "model '/no/such' does not exist", "config.json"),
        (["-tp", "0"], "tensor_parallel_size=0", "1"),
        (["--port", "99999"], "port 99999", "--port 8000"),
        (["--device", "abacus"], "'abacus'", "cpu"),
    ],
)
def test_what_was_typed_wrong_is_exit_2_with_a_hint(
    arguments: list[str], said: str, hint: str
) -> None:
    ran = Ran(arguments)
    assert (ran.status, ran.out) == (2, "")
    assert said in ran.err
    assert hint in ran.err


def test_a_path_among_the_names_is_the_model(tmp_path: Path) -> None:
    ran = Ran([str(tmp_path), "fit-01", "--json"])
    assert ran.status == 1
    assert "config.json: No such file" in ran.document["checks"][0]["measured"]


def test_a_failure_is_exit_1_with_measured_expected_why_and_remedy() -> None:
    ran = Ran(["lim-08"], environ={"TMPDIR": "/" + "x" * 120})
    assert ran.status == 1
    assert "[✗] Limits & memory  LIM-08 153 bytes below" in ran.out
    assert "expected paths of at most 107 bytes" in ran.out
    assert "→ " in ran.out
    assert "TMPDIR=/tmp" in ran.out
    assert "1 failed, 0 warnings" in ran.out


def test_strict_makes_a_warning_a_failure() -> None:
    environ = {"CUDA_LAUNCH_BLOCKING": "1"}
    assert Ran(["env-03"], environ=environ).status == 0
    assert Ran(["env-03", "--strict"], environ=environ).status == 1


def test_a_skipped_check_is_not_run() -> None:
    ran = Ran(["lim-08", "--skip", "lim-08", "--json"], environ={"TMPDIR": "/" + "x" * 120})
    assert (ran.status, ran.document["checks"][0]["status"]) == (0, "skip")


def test_a_failed_requirement_is_told_though_it_was_not_asked_for() -> None:
    ran = Ran(["net-01", "-n", "2", "-tp", "2", "--master-addr", "no.such.host.invalid", "--json"])
    by_id = {item["id"]: item for item in ran.document["checks"]}
    assert by_id["NET-02"]["status"] in ("fail", "unknown")
    assert by_id["NET-01"]["status"] == "skip"
    assert "needs NET-02" in by_id["NET-01"]["measured"]


def test_a_taken_port_fails_if_typed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        ran = Ran(["net-04", "--port", str(port), "--json"])
    assert ran.status == 1
    assert f"pid {os.getpid()}" in ran.document["checks"][0]["measured"]


def test_green_groups_fold_and_verbose_opens_them() -> None:
    folded = Ran(["host"])
    assert "HOST-01" not in folded.out
    assert re.search(r"\[✓\] Host +Linux", folded.out)
    assert "HOST-01 operating system and kernel: Linux" in Ran(["host", "-v"]).out


def test_an_ascii_terminal_gets_ascii() -> None:
    ran = Ran(["host", "fit", "lim-08"], encoding="ascii", environ={"TMPDIR": "/" + "x" * 120})
    assert "[ok]" in ran.out
    assert "[FAIL]" in ran.out
    assert "[skip]" in ran.out
    assert " -> " in ran.out


def test_secrets_do_not_reach_the_report() -> None:
    environ = {
        "http_proxy": "http://user:hunter2@proxy:3128",
        "GLOO_SOCKET_IFNAME": "hf_abcdefghijklmnopqrstuvwxyz",
    }
    for arguments in (["env", "--json"], ["env", "-v"]):
        ran = Ran(arguments, environ=environ)
        assert "hunter2" not in ran.out
        assert "hf_abcdefgh" not in ran.out


def run_program(arguments: list[str]) -> tuple[subprocess.CompletedProcess[str], float]:
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "vcli.cli", "doctor", *arguments],
        capture_output=True, text=True, timeout=60, cwd=ROOT,
    )  # fmt: skip
    return done, time.monotonic() - begin


@pytest.mark.process
def test_nothing_fails_or_warns_on_this_plain_machine_and_torch_stays_out() -> None:
    done, _ = run_program(["--json", "-tp", "2", "--device", "cpu"])
    document = json.loads(done.stdout)
    wrong = [item for item in document["checks"] if item["status"] in ("fail", "warn", "unknown")]
    # What a person can act on here, and may well be so on the machine of the test.
    wrong = [item for item in wrong if item["id"] not in ("NET-04", "HOST-07")]
    assert wrong == []
    assert done.returncode == 0
    assert not re.search(r"\| +(torch|transformers|numpy|fastapi)$", done.stderr, re.M)


@pytest.mark.process
def test_the_whole_doctor_fits_its_time() -> None:
    # CPU time, since the wall clock belongs to whoever else is busy here.
    import resource

    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done, _ = run_program([])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert done.returncode == 0
    assert used < 2.0


@pytest.mark.process
def test_an_interrupt_prints_what_is_known() -> None:
    import signal

    script = (
        "import sys, threading, os, signal\n"
        "import vcli.cli.runtime_checks as checks\n"
        "from dataclasses import replace\n"
        "def hang(context):\n"
        "    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "    threading.Event().wait(50)\n"
        "checks.orphans = replace(checks.orphans, run=hang, deadline_s=40.0)\n"
        "sys.argv = ['vcli', 'doctor', 'proc', 'host']\n"
        "from vcli.cli.main import run\n"
        "run()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=30, cwd=ROOT
    )
    assert done.returncode == 128 + signal.SIGINT
    assert "PROC-05 interrupted" in done.stdout
    assert "Host" in done.stdout
    assert "what is known so far" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "nodes", "node_rank"),
    [
        (["-tp", "2"], 2, 1),
        (["-tp", "2", "-r", "0"], 2, 0),
        (["-tp", "2", "-n", "1"], 1, 0),
        ([], 1, 0),
    ],
)
def test_a_step_of_slurm_says_which_node_of_several_ranks_this_is(
    arguments: list[str], nodes: int, node_rank: int
) -> None:
    step = {
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_NODEID": "1",
        "SLURM_STEP_NODELIST": "gpu[3-4]",
    }
    ran = Ran(["lim-08", *arguments, "--json"], environ=step)

    assert (ran.status, len(ran.document["plan"]["nodes"])) == (0, nodes)
    assert {check["node_rank"] for check in ran.document["checks"]} == {node_rank}
    assert ("node-rank 1 (SLURM_NODEID)" in ran.err) == (node_rank == 1)
