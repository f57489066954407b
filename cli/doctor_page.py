"""Where `doctor --html` goes: looked at before anything is run, written in one piece."""

import contextlib
import errno
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from vcli.topology import ConfigError, UnfitError

_NO_SPACE: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_HINT: Final = "name a file in a folder of yours: --html report.html"


@dataclass(frozen=True, slots=True)
class PageFile:
    """The file of a page; it holds the old page or the new one, never half of one."""

    path: Path

    @classmethod
    def at(cls, typed: str, cwd: Path) -> "PageFile":
        """The file that was named, links followed.

        Raises:
            ConfigError: nothing can be written there.
        """
        path = Path(os.path.realpath(Path(cwd, typed)))
        if path.is_dir():
            raise ConfigError(f"{path} is a folder", hint=f"--html {path / 'report.html'}")
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path} is no ordinary file and would be replaced", hint=_HINT)
        if not path.parent.is_dir():
            raise ConfigError(
                f"there is no folder {path.parent}", hint=f"mkdir -p {path.parent}, or {_HINT}"
            )
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise ConfigError(f"{path.parent} cannot be written by this user", hint=_HINT)
        return cls(path)

    def write(self, text: str) -> None:
        """Put the text in the place of what is there.

        Raises:
            UnfitError: the disk is full.
            ConfigError: it cannot be written for another reason.
        """
        temporary = None
        try:
            with tempfile.NamedTemporaryFile(
                "w", encoding="utf-8", errors="replace", dir=self.path.parent,
                prefix=f".{self.path.name[:100]}-", delete=False,
            ) as file:  # fmt: skip
                temporary = Path(file.name)
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            temporary.chmod(0o666 & ~_umask())
            temporary.replace(self.path)
        except OSError as error:
            if temporary is not None:
                with contextlib.suppress(OSError):
                    temporary.unlink()
            message = f"{self.path} cannot be written: {error.strerror}"
            if error.errno in _NO_SPACE:
                raise UnfitError(message, hint=f"free some space, or {_HINT}") from error
            raise ConfigError(message, hint=_HINT) from error


def _umask() -> int:
    """What this process takes from the rights of a new file; it can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
