"""What surrounds a command - streams, variables, arguments - as one object.

The only place of the command line that reads `os.environ`; everyone else gets a mapping.
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Where a command reads from and writes to. Tests make their own."""

    argv: tuple[str, ...]
    environ: Mapping[str, str]
    cwd: Path
    stdout: TextIO
    stderr: TextIO

    @classmethod
    def of_this_process(cls) -> "Environment":
        """The real one."""
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


def _current_folder() -> Path:
    try:
        return Path.cwd()
    except FileNotFoundError:  # the folder was removed under us
        return Path("/")
