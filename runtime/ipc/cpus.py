"""How many CPUs this process may use at a time: its affinity, cut to the quotas of its cgroups."""

import os
from pathlib import Path


def usable_cpus(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """At least 1; a file that can't be read sets no limit."""
    limits = [float(len(os.sched_getaffinity(0)))]
    for line in _text(proc / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            limits += _quotas(cgroups, path)
        elif "cpu" in controllers.split(","):
            limits += _quotas(cgroups / "cpu", path)
    return max(1, int(min(limits)))


def _quotas(root: Path, path: str) -> list[float]:
    """CPUs of each group from the process' own up to `root`, which a container sees as its own."""
    folder = root / path.lstrip("/")
    quotas = []
    for group in (folder, *folder.parents):
        if not group.is_relative_to(root):
            break
        words = _text(group / "cpu.max").split() or [
            _text(group / "cpu.cfs_quota_us").strip(),
            _text(group / "cpu.cfs_period_us").strip(),
        ]
        if len(words) == 2 and all(word.isdigit() and int(word) for word in words):
            quotas.append(int(words[0]) / int(words[1]))
    return quotas


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
