"""Where `doctor --html` and `bench serve --save` go: looked at before anything is run."""

import contextlib
import errno
import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from vcli.topology import ConfigError, UnfitError, VcliError

_NO_SPACE: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_HTML: Final = "--html report.html"


@dataclass(frozen=True, slots=True)
class PageFile:
    """A file that holds the old text or the new one, never half of one.

    usual: a flag and a name that can be typed instead.
    """

    path: Path
    usual: str = _HTML

    @classmethod
    def at(cls, typed: str, cwd: Path, usual: str = _HTML) -> "PageFile":
        """The file that was named, links followed.

        Raises:
            ConfigError: nothing can be written there.
            UnfitError: the disk is full.
        """
        file = cls(Path(os.path.realpath(Path(cwd, typed))), usual)
        path, folder, hint = file.path, file.path.parent, file._hint
        flag, _, name = usual.partition(" ")
        try:
            mode = path.stat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            mode = stat.S_IFREG
        except OSError as error:
            raise file._refusal(error) from error
        if stat.S_ISDIR(mode):
            raise ConfigError(f"{path} is a folder", hint=f"{flag} {path / name}")
        if not stat.S_ISREG(mode):
            raise ConfigError(f"{path} is no ordinary file and would be replaced", hint=hint)
        if not folder.is_dir():
            raise ConfigError(f"there is no folder {folder}", hint=f"mkdir -p {folder}, or {hint}")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise ConfigError(f"{folder} cannot be written by this user", hint=hint)
        try:
            # /proc lets root through the question above and makes no file.
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            raise file._refusal(error) from error
        return file

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
            raise self._refusal(error) from error

    @property
    def _hint(self) -> str:
        return f"name a file in a folder of yours: {self.usual}"

    def _refusal(self, error: OSError) -> VcliError:
        message = f"{self.path} cannot be written: {error.strerror}"
        if error.errno in _NO_SPACE:
            return UnfitError(message, hint=f"free some space, or {self._hint}")
        return ConfigError(message, hint=self._hint)


def _umask() -> int:
    """What this process takes from the rights of a new file; it can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
