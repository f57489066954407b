"""Closed and full output: the exit status says it, and nobody sees a traceback."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.process

_SHELL = 'exec "$0" -m vcli.cli '


def _vcli(words: str) -> "subprocess.CompletedProcess[str]":
    """Run `vcli` with flags and redirections as a shell reads them."""
    return subprocess.run(
        ["/bin/sh", "-c", _SHELL + words, sys.executable],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("words", ["topo -tp 2", "topo -tp 2 --json", "--help", "version"])
def test_a_full_disk_under_stdout_is_told_on_stderr_with_exit_1(words: str) -> None:
    ran = _vcli(f"{words} >/dev/full")
    assert ran.returncode == 1
    assert ran.stderr.count("error: ") == 1
    assert "No space left on device" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_an_error_that_json_cannot_say_is_said_on_stderr_and_keeps_its_status() -> None:
    ran = _vcli("topo -tp 0 --json >/dev/full")
    assert ran.returncode == 2
    assert "tensor_parallel_size=0" in ran.stderr
    assert "No space left on device" in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize("redirection", [">&-", "<&- >&- 2>&-", "2>&-", "2>/dev/full"])
def test_a_lost_stream_does_not_change_what_happens(redirection: str) -> None:
    done = _vcli(f"topo -tp 2 {redirection}")
    refused = _vcli(f"topo -tp 0 {redirection}")
    assert (done.returncode, refused.returncode) == (0, 2)
    assert "Traceback" not in done.stderr + refused.stderr


@pytest.mark.parametrize("words", ["--help", "serve --help", "topo -tp 64 --json", "version"])
def test_a_reader_that_has_enough_is_no_failure(words: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)  # as of `head` that has left already
    ran = subprocess.run(
        [sys.executable, "-m", "vcli.cli", *words.split()],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    os.close(writer)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_a_result_is_whole_where_only_stderr_is_lost() -> None:
    ran = _vcli("topo -tp 2 --json 2>/dev/full")
    assert ran.returncode == 0
    assert json.loads(ran.stdout)["exit_code"] == 0


def test_no_file_gets_the_number_of_a_closed_stream() -> None:
    script = (
        "import os\n"
        "from vcli.cli.environment import Environment\n"
        "environment = Environment.of_this_process()\n"
        "opened = os.open('/dev/null', os.O_RDONLY)\n"
        "print('nowhere', file=environment.stdout)\n"
        "raise SystemExit(opened)\n"
    )
    ran = subprocess.run(
        ["/bin/sh", "-c", 'exec "$0" -c "$1" <&- >&- 2>&-', sys.executable, script],
        timeout=60,
        check=False,
    )
    assert ran.returncode == 3
