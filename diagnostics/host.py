"""What this host gives to this process: CPUs, memory, limits; read from /proc and /sys.

Nothing here raises for what a machine lacks: an unknown fact is None.
"""

import os
import platform
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from vcli.diagnostics.cgroups import Cgroups
from vcli.diagnostics.dialect import is_container
from vcli.diagnostics.errors import CannotMeasureError
from vcli.diagnostics.files import HostFiles
from vcli.topology import HostFacts

Fact = TypeVar("Fact")


def collect_host_facts(root: Path = Path("/")) -> HostFacts:
    """Observe this machine; `root` is the root of the file system that is read (for tests)."""
    memory = _meminfo(root)
    shm_total, shm_free = _shm(root)
    return HostFacts(
        hostname=socket.gethostname(),
        platform=platform.system().lower(),
        machine=platform.machine(),
        kernel=platform.release(),
        python=platform.python_version(),
        is_wsl="microsoft" in platform.release().lower(),
        is_container=is_container(root),
        cpu_count=usable_cpus(root),
        memory_total_bytes=memory.get("MemTotal"),
        memory_available_bytes=memory.get("MemAvailable"),
        memory_limit_bytes=_known(Cgroups(HostFiles(root)).memory_left_bytes),
        shm_total_bytes=shm_total,
        shm_free_bytes=shm_free,
    )


def usable_cpus(root: Path = Path("/")) -> int:
    """CPUs that this process may run on: its affinity, cut to the cgroup's quota."""
    allowed = len(os.sched_getaffinity(0))
    quota = _known(Cgroups(HostFiles(root)).cpu_quota)
    return allowed if quota is None else min(allowed, max(1, int(quota)))


def collect_numa_cpus(root: Path = Path("/")) -> tuple[tuple[int, ...], ...]:
    """The CPUs of each NUMA node; empty where the kernel does not say."""
    folder = root / "sys/devices/system/node"
    try:
        found = [entry for entry in folder.iterdir() if re.fullmatch(r"node\d+", entry.name)]
    except OSError:
        return ()
    found.sort(key=lambda entry: int(entry.name.removeprefix("node")))
    return tuple(parse_cpu_list(_read(entry / "cpulist")) for entry in found)


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """`0-3,8` as numbers; what is no number is left out."""
    cpus: list[int] = []
    for part in text.strip().split(","):
        first, separator, last = part.partition("-")
        if first.isdigit() and (not separator or last.isdigit()):
            cpus += range(int(first), int(last if separator else first) + 1)
    return tuple(cpus)


def has_nvidia_gpu(root: Path = Path("/")) -> bool:
    """Whether the NVIDIA driver shows at least one GPU to this process; loads no library."""
    return (root / "dev/nvidiactl").exists() and any((root / "dev").glob("nvidia[0-9]*"))


def _known(read: Callable[[], Fact | None]) -> Fact | None:
    """What `read` gives; None where the host does not let itself be read."""
    try:
        return read()
    except CannotMeasureError:
        return None


def _meminfo(root: Path) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for line in _read(root / "proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            sizes[name] = int(words[0]) * 1024
    return sizes


def _shm(root: Path) -> tuple[int | None, int | None]:
    try:
        usage = shutil.disk_usage(root / "dev/shm")
    except OSError:
        return None, None
    return usage.total, usage.free


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
