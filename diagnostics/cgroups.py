"""What the control groups of this process leave to it, in version 1 and 2.

A limit of any group above the own one binds too, so each question looks at all of them. Where
the own path is not visible (a container that shows the host's path), the root of the mount is
the container's own group.
"""

from collections.abc import Iterator

from vcli.diagnostics.files import HostFiles

_ROOT = "/sys/fs/cgroup"
#: Version 1 writes "no limit" as the largest multiple of a page.
_UNLIMITED = 2**62


class Cgroups:
    """The groups of this process, read through `files`."""

    def __init__(self, files: HostFiles) -> None:
        self._files = files

    def memory_left_bytes(self) -> int | None:
        """Bytes until the tightest memory limit; None without one.

        Page cache counts as used in the kernel's number; it is taken off, since it yields.
        """
        left: list[int] = []
        for folder, is_v2 in self._folders("memory"):
            limit = self._limit(f"{folder}/{'memory.max' if is_v2 else 'memory.limit_in_bytes'}")
            used = self._files.read_int(
                f"{folder}/{'memory.current' if is_v2 else 'memory.usage_in_bytes'}"
            )
            if limit is not None and used is not None:
                left.append(max(0, limit - max(0, used - self._cache_bytes(folder))))
        return min(left, default=None)

    def pids_left(self) -> int | None:
        """Tasks that may still be made under the tightest limit; None without one."""
        left: list[int] = []
        for folder, _ in self._folders("pids"):
            limit = self._limit(f"{folder}/pids.max")
            used = self._files.read_int(f"{folder}/pids.current")
            if limit is not None and used is not None:
                left.append(max(0, limit - used))
        return min(left, default=None)

    def cpu_quota(self) -> float | None:
        """CPUs that the tightest quota allows; None without one."""
        quotas: list[float] = []
        for folder, is_v2 in self._folders("cpu"):
            if is_v2:
                words = self._files.read_words(f"{folder}/cpu.max")
                quota = int(words[0]) if words and words[0].isdigit() else None
                period = int(words[1]) if len(words) > 1 else None
            else:
                quota = self._files.read_int(f"{folder}/cpu.cfs_quota_us")
                period = self._files.read_int(f"{folder}/cpu.cfs_period_us")
            if quota is not None and quota > 0 and period:
                quotas.append(quota / period)
        return min(quotas, default=None)

    def oom_kills(self) -> int | None:
        """Processes of the own group that the kernel killed for memory; None if not counted."""
        for folder, is_v2 in self._folders("memory"):
            name = "memory.events" if is_v2 else "memory.oom_control"
            for line in (self._files.read(f"{folder}/{name}") or "").splitlines():
                words = line.split()
                if len(words) == 2 and words[0] == "oom_kill":
                    return int(words[1])
        return None

    def _limit(self, name: str) -> int | None:
        limit = self._files.read_int(name)
        return limit if limit is not None and limit < _UNLIMITED else None

    def _cache_bytes(self, folder: str) -> int:
        for line in (self._files.read(f"{folder}/memory.stat") or "").splitlines():
            name, _, number = line.partition(" ")
            if name in ("inactive_file", "total_inactive_file") and number.isdigit():
                return int(number)
        return 0

    def _folders(self, controller: str) -> Iterator[tuple[str, bool]]:
        """Existing folders of the controller from the own group up to the root of the mount."""
        for line in (self._files.read("/proc/self/cgroup") or "0::/").splitlines():
            number, controllers, path = [*line.split(":", 2), "", ""][:3]
            if number == "0" and not controllers:
                base, is_v2 = _ROOT, True
            elif controller in controllers.split(","):
                base, is_v2 = f"{_ROOT}/{controller}", False
            else:
                continue
            parts = [part for part in path.split("/") if part and part != ".."]
            for depth in range(len(parts), -1, -1):
                folder = "/".join((base, *parts[:depth]))
                if self._files.exists(folder):
                    yield folder, is_v2
