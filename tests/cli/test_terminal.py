"""What a terminal of 80 columns shows: no word is cut, and what is copied stays whole."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from tests.support.topo_runs import SMOLLM2, model_folder
from vcli.cli.views.startup import _first_request
from vcli.cli.views.text import hanging, paste_lines


def shown(arguments: list[str], folder: Path, *, columns: int = 80) -> list[str]:
    """The lines that the command writes to a terminal, stdout and stderr together."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    environ = {name: text for name, text in os.environ.items() if name != "COLUMNS"}
    with subprocess.Popen(
        [sys.executable, "-m", "vcli.cli", *arguments],
        stdout=follower,
        stderr=follower,
        stdin=subprocess.DEVNULL,
        cwd=folder,
        env={**environ, "TERM": "dumb", "PYTHONIOENCODING": "utf-8", "VCLI_HOME": str(folder)},
    ) as child:
        os.close(follower)
        parts: list[bytes] = []
        try:
            while part := os.read(leader, 1 << 16):
                parts.append(part)
        except OSError:  # the last writer has gone
            pass
        child.wait(60)
    os.close(leader)
    return b"".join(parts).decode().replace("\r\n", "\n").splitlines()


@pytest.mark.process
@pytest.mark.parametrize(
    "arguments",
    [
        ["topo", "-tp", "2", "-pp", "4"],
        ["topo", "m", "--gpus", "8", "-tp", "2", "-pp", "2"],
        ["topo", "m", "--gpus", "8", "-n", "2", "--suggest"],
        ["doctor", "host", "net", "fit", "py", "--model", "m", "-tp", "8"],
        ["launch", "-n", "2", "-r", "0", "--dry-run", "m", "-tp", "7", "--load-format", "dummy"],
        ["serve", "./no-such-folder-that-somebody-could-have-typed-by-mistake"],
        ["serve", "m", "--dry-run", "-tp", "2", "--load-format", "dummy"],
        ["--help"],
        *([command, "--help"] for command in ("serve", "launch", "topo", "doctor", "explain")),
    ],
    ids=" ".join,
)
def test_no_line_is_wider_than_the_terminal(arguments: list[str], tmp_path: Path) -> None:
    model_folder(tmp_path / "m", SMOLLM2)
    lines = shown(arguments, tmp_path)

    assert lines
    # A path is one word, however long.
    assert [line for line in lines if len(line) > 80 and len(line.split()) > 1] == []
    assert not any("Traceback" in line for line in lines)


@pytest.mark.process
def test_help_cuts_no_flag_and_keeps_examples_on_their_lines(tmp_path: Path) -> None:
    lines = shown(["launch", "--help"], tmp_path)

    assert "  --distributed-executor-backend NAME" in lines
    assert "  --enable-chunked-prefill / --no-enable-chunked-prefill" in lines
    assert (
        "  Example:  vcli launch -n 2 -r 0 --master-addr 10.0.0.1 -tp 8 -pp 2 ./Qwen3-32B" in lines
    )
    assert not any("…" in line for line in lines)


def test_words_stay_whole_and_what_goes_on_hangs() -> None:
    assert hanging("short", width=20, hang=4) == ["short"]
    assert hanging("   1.5 s  one two three four", width=20, hang=10) == [
        "   1.5 s  one two",
        "          three four",
    ]
    assert hanging("x" * 30 + " y", width=20, hang=2) == ["x" * 30, "  y"]
    assert hanging("a\nb c", width=3, hang=2) == ["a", "b c"]


def test_a_remedy_breaks_only_where_a_shell_goes_on() -> None:
    text = "  → sudo modprobe nvidia-peermem; echo nvidia-peermem | sudo tee /etc/x.conf   (or so)"
    assert paste_lines(text, width=40, hang=4) == [
        "  → sudo modprobe nvidia-peermem;",
        "    echo nvidia-peermem |",
        "    sudo tee /etc/x.conf (or so)",
    ]
    command = "  → docker run --cap-add SYS_PTRACE --shm-size 16g --gpus all image"
    assert paste_lines(command, width=40, hang=4) == [command]
    assert hanging(command, width=40, hang=2) == [command]
    assert paste_lines("  → a; b 'c; d, e' && f \"g | h\" \\; i, then", width=1, hang=2) == [
        "  → a;",
        "  b 'c; d, e' &&",
        '  f "g | h" \\; i, then',
    ]


def test_the_first_request_fits_and_is_what_a_shell_takes() -> None:
    text = _first_request("http://127.0.0.1:65535", "SmolLM2-135M-Instruct")
    words = subprocess.run(
        ["sh", "-c", text.replace("curl", "printf '%s\\n'", 1)],
        capture_output=True,
        text=True,
        check=True,
        timeout=20,
    ).stdout.splitlines()

    assert max(map(len, text.splitlines())) <= 80
    assert words[:3] == [
        "http://127.0.0.1:65535/v1/chat/completions",
        "-H",
        "content-type: application/json",
    ]
    assert words[3] == "-d"
