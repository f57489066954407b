"""`vcli explain` from outside: checks, groups, logs of all sources, wrong names, exit codes."""

import gzip
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vcli.cli.environment import Environment
from vcli.cli.explain import cause_lines
from vcli.cli.main import main
from vcli.runtime.errors import FailureReport, StartupError, WorkerError

ROOT = Path(__file__).parents[2]
LOG = ROOT / "tests" / "diagnostics" / "fixtures" / "explain" / "nccl-290.log"


class Ran:
    def __init__(self, arguments: list[str], *, cwd: Path = ROOT) -> None:
        stdout = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
        stderr = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
        self.status = main(
            Environment(
                argv=("explain", *arguments), environ={}, cwd=cwd, stdout=stdout, stderr=stderr
            )
        )
        self.out = stdout.buffer.getvalue().decode()
        self.err = stderr.buffer.getvalue().decode()

    @property
    def document(self) -> dict:
        return json.loads(self.out)


def piped(data: bytes, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "vcli.cli", "explain", *arguments],
        input=data,
        capture_output=True,
        timeout=60,
        cwd=ROOT,
    )


def test_a_check_tells_what_it_looks_at_and_what_to_type() -> None:
    ran = Ran(["lim-03"])
    assert ran.status == 0
    for text in ("LIM-03  nothing left over", "level      L0", "looks at", "why", "rm PATHS"):
        assert text in ran.out


def test_the_paragraphs_of_a_check_are_filled_without_gaps() -> None:
    out = Ran(["lim-02"]).out
    assert "drops it. At most" in " ".join(line.strip() for line in out.splitlines())
    assert "SIZEi" not in out
    assert "CUDA CUDA" not in Ran(["py-03"]).out


def test_a_killed_worker_of_our_own_log_is_told_with_the_hint_below(tmp_path: Path) -> None:
    path = tmp_path / "serve.log"
    path.write_text(
        "   9.3 s  serving tiny at http://127.0.0.1:8131 · try: curl http://127.0.0.1:8131/v1\n"
        "error: Worker_TP1 (rank 1) pid 12741 on node0 failed in serving: killed by SIGKILL\n"
        "  → often the kernel's out-of-memory killer: look for the pid in `dmesg`\n"
    )
    ran = Ran([str(path)])
    assert f"{path}:2: a process of vcli was killed by SIGKILL" in ran.out
    assert "  line 2     error: Worker_TP1 (rank 1) pid 12741" in ran.out
    assert "  remedy     often the kernel's out-of-memory killer" in ran.out


def test_a_check_names_the_symptoms_that_it_foretells() -> None:
    assert "NCCL finds no room in /dev/shm" in Ran(["LIM-01"]).out


def test_a_group_lists_its_checks() -> None:
    ran = Ran(["lim"])
    assert ran.status == 0
    assert "LIM-01  L0  size of /dev/shm" in ran.out
    assert "NET-01" not in ran.out


def test_a_check_as_json() -> None:
    document = Ran(["LIM-03", "--json"]).document
    assert (document["schema"], document["exit_code"], document["matches"]) == (
        "vcli.explain/1", 0, [],
    )  # fmt: skip
    assert document["checks"][0]["id"] == "LIM-03"


def test_a_log_tells_cause_lines_remedy_and_check() -> None:
    ran = Ran([str(LOG)])
    assert ran.status == 0
    lines = ran.out.splitlines()
    assert lines[0].endswith("NCCL finds no room in /dev/shm  [LIM-01]")
    assert lines[1].startswith("  cause      /dev/shm is full")
    assert "  line 36    gpu-node-1:8101:8301 [1] include/shm.h:28 NCCL WARN Call" in ran.out
    assert "--shm-size=8g" in ran.out
    assert "vcli doctor lim-01" in ran.out
    assert "follows    a call to NCCL failed on this rank (line" in ran.out
    assert "another rank is gone" not in ran.out


def test_a_log_as_json_has_the_fields_of_the_contract() -> None:
    document = Ran([str(LOG), "--json"]).document
    assert (document["schema"], document["exit_code"]) == ("vcli.explain/1", 0)
    (match,) = document["matches"]
    assert {"check", "symptom", "cause", "evidence", "remedy"} <= set(match)
    assert match["check"] == "LIM-01"
    assert match["evidence"][0]["line"] == 36
    assert "posix_fallocate failed" in match["evidence"][0]["text"]


def test_a_log_with_nothing_wrong_says_so(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_text("all is well\n" * 5)
    ran = Ran([str(path)])
    assert (ran.status, ran.out) == (0, f"{path}: no known failure in 5 lines\n")
    document = Ran([str(path), "--json"]).document
    assert (document["matches"], document["first_failure"]) == ([], None)


def test_an_unknown_failure_shows_the_first_line_that_looks_like_one(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_text("[rank3]: hello\n[rank3]: FrobError: no frob today\n[rank0]: FrobError: too\n")
    ran = Ran([str(path)])
    assert ran.status == 0
    assert "no known failure in 3 lines" in ran.out
    assert "rank3: the first line that looks like an error" in ran.out
    assert "line 2     [rank3]: FrobError: no frob today" in ran.out


def test_stdin_is_read_and_not_as_a_file_of_that_name() -> None:
    done = piped(LOG.read_bytes(), "-", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["matches"][0]["check"] == "LIM-01"


@pytest.mark.parametrize(
    ("data", "said"), [(b"", "stdin is empty"), (os.urandom(4096), "stdin is no text")]
)
def test_stdin_without_a_log_is_refused(data: bytes, said: str) -> None:
    done = piped(data, "-")
    assert done.returncode == 2
    assert said.encode() in done.stderr
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("word", "said", "hint"),
    [
        ("LIM-33", "there is no check, group or file 'LIM-33'", "LIM-03"),
        ("lmi", "there is no check, group or file 'lmi'", "lim"),
        ("no/such.log", "there is no file no/such.log", "vcli explain -"),
        ("missing.log", "there is no file missing.log", "vcli explain FILE"),
        (str(LOG) + "/x", "there is no file", "vcli explain FILE"),
        ("docs/", "docs/ is a folder, not a log", "vcli explain FILE"),
        ("/dev/zero", "/dev/zero is a device, not a log", "vcli explain FILE"),
        ("x" * 5000, "cannot be read: File name too long", "vcli explain FILE"),
        ("", "the name to explain is empty", "vcli explain FILE"),
        ("a\0b", "cannot be read: embedded null byte", "vcli explain FILE"),
    ],
)
def test_a_wrong_name_is_exit_2_with_a_hint(word: str, said: str, hint: str) -> None:
    ran = Ran([word])
    assert ran.status == 2
    assert said in ran.err
    assert hint in ran.err
    document = Ran([word, "--json"]).document
    assert (document["schema"], document["exit_code"]) == ("vcli.error/1", 2)


def test_without_a_word_it_says_what_is_missing() -> None:
    ran = Ran([])
    assert ran.status == 2
    assert "explain --help" in ran.err


def test_files_that_are_no_logs_are_named_for_what_they_are(tmp_path: Path) -> None:
    packed = tmp_path / "x.log.gz"
    packed.write_bytes(gzip.compress(b"hello\n"))
    ran = Ran([str(packed)])
    assert ran.status == 2
    assert "compressed (gzip)" in ran.err
    assert f"zcat {packed} | vcli explain -" in ran.err
    assert "is a program" in Ran([sys.executable]).err
    (tmp_path / "empty.log").touch()
    ran = Ran([str(tmp_path / "empty.log")])
    assert ran.status == 2
    assert "is empty" in ran.err


def test_a_log_that_may_not_be_read_is_exit_2(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        # Root reads everything but this: a process' memory has nothing at address 0.
        path, reason = Path("/proc/self/mem"), "Input/output error"
    else:
        path, reason = tmp_path / "x.log", "Permission denied"
        path.touch(mode=0)
    ran = Ran([str(path)])
    assert ran.status == 2
    assert f"cannot be read: {reason}" in ran.err


def test_a_fifo_that_nobody_writes_is_empty_and_no_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    ran = Ran([str(tmp_path / "fifo")])
    assert ran.status == 2
    assert "is empty" in ran.err


@pytest.mark.process
def test_a_pipe_of_the_shell_is_read_to_its_end() -> None:
    command = f"{sys.executable} -m vcli.cli explain <(cat {LOG}) --json"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, timeout=60, cwd=ROOT, check=True
    )
    assert json.loads(done.stdout)["matches"][0]["check"] == "LIM-01"


def test_zeros_of_a_truncated_log_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    with path.open("wb") as file:
        file.truncate(3 << 20)
        file.seek(0, os.SEEK_END)
        file.write(LOG.read_bytes())
    assert Ran([str(path), "--json"]).document["matches"][0]["evidence"][0]["line"] == 36


def test_a_check_goes_before_a_file_of_its_name(tmp_path: Path) -> None:
    (tmp_path / "lim").write_text("hello\n")
    assert "LIM-01" in Ran(["lim"], cwd=tmp_path).out
    assert "no known failure in 1 lines" in Ran(["./lim"], cwd=tmp_path).out


def report(**fields: object) -> FailureReport:
    usual = {
        "process": "Worker_TP1", "phase": "device", "kind": "RuntimeError", "message": "failed",
        "rank": 1, "exit_status": 5,
    }  # fmt: skip
    return FailureReport(**{**usual, **fields})


def test_a_failure_of_our_own_gets_cause_and_remedy() -> None:
    trace = 'Traceback (most recent call last):\n  File "x.py", line 1\nRuntimeError: Error 802: '
    error = StartupError(report(traceback=trace + "system not yet initialized"))
    lines = cause_lines(error)
    assert lines[0].startswith("  cause: the fabric manager does not run")
    assert lines[0].endswith("[LINK-07]")
    assert "systemctl status nvidia-fabricmanager" in lines[1]
    assert cause_lines(
        WorkerError(report(message="CUDA error: uncorrectable ECC error encountered"))
    )


def test_a_failure_that_nobody_knows_gets_nothing() -> None:
    assert cause_lines(StartupError(report())) == ()
    assert cause_lines(StartupError(report(message="EngineDeadError: gone"))) == ()


def test_the_printed_failure_of_a_command_has_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    from vcli.cli import main as main_module
    from vcli.cli.explain import ExplainSession

    def fail(*arguments: object) -> int:
        raise StartupError(report(message="CUDA error: uncorrectable ECC error encountered"))

    monkeypatch.setattr(ExplainSession, "run", fail)
    ran = Ran(["lim"])
    assert main_module is not None
    assert ran.status == 5
    assert "error: Worker_TP1 (rank 1) failed in device" in ran.err
    assert "cause: a fault of the GPU's memory" in ran.err


def test_it_needs_no_torch_and_no_web_server() -> None:
    script = (
        "import sys\n"
        f"sys.argv = ['vcli', 'explain', {str(LOG)!r}]\n"
        "from vcli.cli.main import main\n"
        "from vcli.cli.environment import Environment\n"
        "status = main(Environment.of_this_process())\n"
        "heavy = ('torch', 'transformers', 'fastapi', 'ray', 'numpy')\n"
        "loaded = [name for name in heavy if name in sys.modules]\n"
        "print('LOADED', loaded, status, file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "LOADED [] 0" in done.stderr, done.stderr[-2000:]
