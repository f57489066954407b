"""What surrounds a command - streams, variables, arguments - as one object.

The only place of the command line that reads `os.environ`; everyone else gets a mapping.
"""

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, TextIO

_STDERR_FD: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Where a command reads from and writes to. Tests make their own."""

    argv: tuple[str, ...]
    environ: Mapping[str, str]
    cwd: Path
    stdout: TextIO
    stderr: TextIO
    started_s: float = field(default_factory=time.monotonic)
    """When the command began, by the monotonic clock."""

    @classmethod
    def of_this_process(cls) -> "Environment":
        """The real one; a stream that was closed before the start leads nowhere."""
        _open_closed_streams()
        return cls(
            argv=tuple(sys.argv[1:]),
            environ=dict(os.environ),
            cwd=_current_folder(),
            stdout=sys.stdout,
            stderr=sys.stderr,
        )

    @property
    def is_debug(self) -> bool:
        """Whether a bug shall print its traceback (`VCLI_DEBUG=1`)."""
        return self.environ.get("VCLI_DEBUG", "") not in ("", "0")

    def has_color(self, stream: TextIO) -> bool:
        """Whether `stream` is a terminal that may be coloured."""
        return (
            stream.isatty()
            and "NO_COLOR" not in self.environ
            and self.environ.get("TERM", "") != "dumb"
        )


def _open_closed_streams() -> None:
    """Let closed standard streams be /dev/null.

    Else the next socket or file gets their number, and what a child prints goes into it.
    """
    while True:
        descriptor = os.open(os.devnull, os.O_RDWR)
        if descriptor > _STDERR_FD:
            os.close(descriptor)
            break
        os.set_inheritable(descriptor, True)
    # Where a descriptor is closed at the start, the interpreter has no stream.
    if sys.stdin is None:
        sys.stdin = _stream(0, "r")
    if sys.stdout is None:
        sys.stdout = _stream(1, "w")
    if sys.stderr is None:
        sys.stderr = _stream(_STDERR_FD, "w")


def _stream(descriptor: int, mode: Literal["r", "w"]) -> TextIO:
    return open(descriptor, mode, encoding="utf-8", errors="replace", closefd=False)


def silence(stream: TextIO) -> None:
    """Let `stream` lead nowhere from now on.

    What waits in the buffer of a stream that cannot be written would be tried again at exit, and
    the interpreter would complain and change the exit status.
    """
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):  # a stream in memory, or one that is closed
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, descriptor)
    finally:
        os.close(nowhere)


def _current_folder() -> Path:
    try:
        return Path.cwd()
    except FileNotFoundError:  # the folder was removed under us
        return Path("/")
