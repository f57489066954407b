"""Shared memory without a name: a memfd, fully allocated and sealed before anyone uses it.

Nothing stands in /dev/shm, so its size does not matter and nothing is left when every holder is
killed. A shortage of memory is no error on Linux (the process is killed on the first touch, or by
the memory cgroup), so the size is checked against what is free before it is allocated.
"""

import errno
import fcntl
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

from vcli.topology.errors import UnfitError

_RESERVE_BYTES = 32 << 20
"""Left to everyone else, so that a segment does not take the last page."""
_MFD_NOEXEC_SEAL = 8
_UNLIMITED_BYTES = 1 << 60
"""A cgroup v1 without a limit shows a number close to 2**63."""
_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """Memory that something still grants: the machine, or one memory cgroup."""

    source: str
    limit_bytes: int
    available_bytes: int


class SharedSegment:
    """One mapping of a memfd. The object owns `fd` and closes it.

    Views of `buffer` must be released before `close()` can unmap; a view that is still held keeps
    the memory mapped until it is dropped.
    """

    def __init__(self, fd: int, size_bytes: int) -> None:
        # Page tables now: a fault per page on the first lap costs more than the copy into it.
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        self._mapping = mmap.mmap(fd, size_bytes, flags)
        self._buffer: memoryview | None = memoryview(self._mapping)
        self.fd = fd
        self.size_bytes = size_bytes

    @classmethod
    def create(cls, size_bytes: int, name: str) -> "SharedSegment":
        """A new zeroed segment; `name` is what /proc/PID/fd shows.

        Raises:
            UnfitError: not enough memory for it on the machine or in the cgroup.
        """
        _refuse_if_too_large(size_bytes, name, memory_budgets())
        fd = _memfd(name)
        try:
            # Allocate every page now: a lazily allocated one could fail later, as SIGBUS.
            os.posix_fallocate(fd, 0, size_bytes)
            # No holder can shrink it, which would be SIGBUS for the others.
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
            return cls(fd, size_bytes)
        except OSError as error:
            os.close(fd)
            raise UnfitError(
                f"cannot allocate the {size_bytes / _MIB:.1f} MiB segment {name!r}: "
                f"{error.strerror}",
                hint="see `ulimit -f` and the memory limit of the container",
            ) from error

    @classmethod
    def attach(cls, fd: int) -> "SharedSegment":
        """Map a segment whose descriptor was inherited; takes over the descriptor."""
        return cls(fd, os.fstat(fd).st_size)

    @property
    def buffer(self) -> memoryview:
        """All bytes, writable."""
        if self._buffer is None:
            raise ValueError("the segment is closed")
        return self._buffer

    def close(self) -> None:
        """Unmap and close; may be called again."""
        if self._buffer is None:
            return
        self._buffer.release()
        self._buffer = None
        try:
            self._mapping.close()
        except BufferError:
            # Someone holds a view: the mapping goes when the last view does.
            del self._mapping
        os.close(self.fd)


def memory_budgets(
    proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")
) -> list[MemoryBudget]:
    """What the machine and each memory cgroup of this process still grant."""
    budgets = []
    meminfo = _numbers(proc / "meminfo")
    if "MemAvailable:" in meminfo:
        budgets.append(
            MemoryBudget(
                source="this machine",
                limit_bytes=meminfo.get("MemTotal:", 0) * 1024,
                available_bytes=meminfo["MemAvailable:"] * 1024,
            )
        )
    for line in _text(proc / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            for root in (cgroups, cgroups / "unified"):
                budgets += _cgroup_budgets(root, path, "memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            budgets += _cgroup_budgets(
                cgroups / "memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"
            )
    return budgets


def _cgroup_budgets(
    root: Path, path: str, limit_file: str, usage_file: str, prefix: str
) -> list[MemoryBudget]:
    """Budgets of the group `path` and all above it: the tightest one counts, wherever it stands.

    In a container the path may be the host's while `root` shows only the container's own part;
    folders that are missing are passed over, and `root` itself is always looked at.
    """
    folder = root / path.lstrip("/")
    budgets = []
    for group in (folder, *folder.parents):
        if not group.is_relative_to(root):
            break
        limit, usage = _text(group / limit_file).strip(), _text(group / usage_file).strip()
        if not (limit.isdigit() and usage.isdigit()) or int(limit) >= _UNLIMITED_BYTES:
            continue
        # Cold file cache counts as usage, but the kernel drops it before it kills anyone.
        reclaimable = _numbers(group / "memory.stat").get(f"{prefix}inactive_file", 0)
        budgets.append(
            MemoryBudget(
                source=f"memory cgroup {group}",
                limit_bytes=int(limit),
                available_bytes=int(limit) - int(usage) + reclaimable,
            )
        )
    return budgets


def _refuse_if_too_large(size_bytes: int, name: str, budgets: list[MemoryBudget]) -> None:
    for budget in budgets:
        if size_bytes + _RESERVE_BYTES > budget.available_bytes:
            raise UnfitError(
                f"the shared segment {name!r} needs {size_bytes / _MIB:.1f} MiB "
                f"(and leaves {_RESERVE_BYTES // _MIB} MiB), {budget.source} has "
                f"{budget.available_bytes / _MIB:.1f} MiB free of {budget.limit_bytes / _MIB:.1f}",
                hint="raise the memory limit of the container, stop other programs, "
                "or start fewer ranks on this machine",
            )


def _memfd(name: str) -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(name, flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.memfd_create(name, flags)  # Linux before 6.3 does not know the flag


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""  # this kernel or container does not have the file: no limit from there


def _numbers(path: Path) -> dict[str, int]:
    """Files of lines `name number [unit]`."""
    fields = (line.split() for line in _text(path).splitlines())
    return {words[0]: int(words[1]) for words in fields if len(words) >= 2 and words[1].isdigit()}
