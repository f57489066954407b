"""Only regular files are read: opening a named pipe waits for a writer, a device may never end."""

import stat
from pathlib import Path

from vcli.topology.errors import ConfigError


def check_regular(path: Path, *, hint: str = "") -> None:
    """Whether `path` is a file with an end, behind links too; a folder is left to who opens it.

    Raises:
        ConfigError: it is a pipe, a socket or a device.
        OSError: it cannot be looked at; a missing file is one case.
    """
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise ConfigError(
            f"{path} is {_kind(mode)}, not a file", hint=hint or f"name a file: {path.name}"
        )


def _kind(mode: int) -> str:
    if stat.S_ISFIFO(mode):
        return "a named pipe"
    return "a socket" if stat.S_ISSOCK(mode) else "a device"
