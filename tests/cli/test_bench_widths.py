"""Tables of `vcli bench` on a terminal of 80 columns: no line is longer, no word is broken."""

import os
import pty
import struct
import subprocess
import sys
import termios
from fcntl import ioctl
from pathlib import Path

import pytest

from tests.support.bench_command import write_config
from vcli.cli.views.tables import fitted


def shown_on_terminal(*arguments: str, columns: int) -> list[str]:
    """The lines of stdout of `vcli bench` in a terminal."""
    own, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with subprocess.Popen(
        [sys.executable, "-m", "vcli.cli", "bench", *arguments],
        stdout=theirs,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as child:
        os.close(theirs)
        shown = b""
        try:
            while piece := os.read(own, 65536):
                shown += piece
        except OSError:  # how a terminal ends
            pass
        os.close(own)
        err = child.stderr.read().decode()
    assert child.returncode == 0, err
    return shown.decode().replace("\r", "").splitlines()


@pytest.mark.process
def test_ipc_fits_and_every_column_is_there() -> None:
    lines = shown_on_terminal(
        "ipc", "--readers", "1", "--payload", "1M", "--seconds", "0.02", "--kills", "1", columns=80
    )
    assert max(map(len, lines)) <= 80
    for title in ("round trip µs", "messages/s", "idle CPU", "median"):
        assert any(title in line for line in lines)
    assert [line.split()[0] for line in lines if line.startswith("readers")] == ["readers"] * 2


@pytest.mark.process
def test_offline_fits_and_every_column_is_there(tmp_path: Path) -> None:
    model = write_config(tmp_path / "tiny")
    lines = shown_on_terminal(
        "offline", str(model), "--load-format", "dummy", "--kv-cache-memory", "4M",
        "--num-prompts", "2", "--input-len", "8", "--output-len", "4", "--repeat", "2",
        columns=80,
    )  # fmt: skip
    assert max(map(len, lines)) <= 80
    for title in ("tokens in/out", "TTFT ms p50/p99", "of floor"):
        assert any(title in line for line in lines)
    assert all(line.startswith(("workload", "2x8+4")) for line in lines if "/" in line[20:60])


def test_a_table_that_fits_stays_one_and_a_wide_one_repeats_its_first_column() -> None:
    rows = [("name", "one", "two"), ("x", "1111", "2222")]
    assert fitted(rows, width=16) == ["name  one   two", "x     1111  2222"]
    assert fitted(rows, width=15) == [
        *("name  one", "x     1111", ""),
        *("name  two", "x     2222"),
    ]
    assert fitted(rows, width=1) == fitted(rows, width=15)
    assert fitted([], width=80) == []
