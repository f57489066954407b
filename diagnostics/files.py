"""The host's files under a root that tests replace by a tree of their own."""

import errno
import os
from pathlib import Path

from vcli.diagnostics.errors import CannotMeasureError

#: What the kernel says where a file or the device behind it does not exist.
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ENODEV, errno.ENXIO, errno.ESRCH, errno.EINVAL)


class HostFiles:
    """Reads files by their absolute names below `root`; absent is None, unreadable raises."""

    def __init__(self, root: Path = Path("/")) -> None:
        self.root = root

    def path(self, name: str | Path) -> Path:
        """Where the file of this name really lies."""
        return self.root / str(name).lstrip("/")

    def read(self, name: str) -> str | None:
        """The whole text, or None without such a file.

        Raises:
            CannotMeasureError: it is there and cannot be read.
        """
        try:
            return self.path(name).read_text(errors="replace")
        except OSError as error:
            if error.errno in _ABSENT:
                return None
            raise CannotMeasureError(f"{name} cannot be read: {error.strerror}") from error

    def read_words(self, name: str) -> list[str]:
        """The words of the text, none without such a file."""
        return (self.read(name) or "").split()

    def read_int(self, name: str) -> int | None:
        """The file's only number; None without one (`max`, an empty or absent file)."""
        words = self.read_words(name)
        try:
            return int(words[0]) if words else None
        except ValueError:
            return None

    def names(self, folder: str) -> tuple[str, ...]:
        """Names in the folder, sorted; none without such a folder.

        Raises:
            CannotMeasureError: it is there and cannot be listed.
        """
        try:
            return tuple(sorted(os.listdir(self.path(folder))))  # noqa: PTH208 - names, not paths
        except OSError as error:
            if error.errno in _ABSENT:
                return ()
            raise CannotMeasureError(f"{folder} cannot be listed: {error.strerror}") from error

    def exists(self, name: str) -> bool:
        """Whether there is such a file."""
        return self.path(name).exists()

    def target(self, name: str) -> str:
        """What a symbolic link says, empty if there is none or it may not be read."""
        try:
            return str(self.path(name).readlink())
        except OSError:
            return ""
