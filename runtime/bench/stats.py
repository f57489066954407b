"""What a benchmark reports: percentiles of samples, and the machine they hold for."""

import os
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

_LIBRARIES = ("vcli-toolkit", "msgspec")


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Samples in one line; each value is one of the samples, in their unit."""

    count: int
    min: float
    p50: float
    p99: float
    max: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Summary":
        """The summary of at least one sample."""
        ordered = sorted(samples)
        if not ordered:
            raise ValueError("no samples to sum up")
        last = len(ordered) - 1
        return cls(
            count=len(ordered),
            min=ordered[0],
            p50=ordered[last // 2],
            p99=ordered[round(last * 0.99)],
            max=ordered[last],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Samples in one line, in their unit; percentiles lie between two samples where need be."""

    count: int
    mean: float
    median: float
    p90: float
    p99: float
    min: float
    max: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Distribution | None":
        """The distribution; None of nothing."""
        if not samples:
            return None
        ordered = sorted(samples)
        return cls(
            count=len(ordered),
            mean=sum(ordered) / len(ordered),
            median=_percentile(ordered, 0.5),
            p90=_percentile(ordered, 0.9),
            p99=_percentile(ordered, 0.99),
            min=ordered[0],
            max=ordered[-1],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """Where and when figures were measured. `load` is the load average before, over a minute."""

    cpu: str
    num_cpus: int
    kernel: str
    machine: str
    load: float
    python: str
    versions: dict[str, str]
    date: str


def host_facts() -> HostFacts:
    """This machine, now."""
    return HostFacts(
        cpu=_cpu_name(Path("/proc/cpuinfo")),
        num_cpus=len(os.sched_getaffinity(0)),
        kernel=platform.release(),
        machine=platform.machine(),
        load=round(os.getloadavg()[0], 2),
        python=platform.python_version(),
        versions={name: version for name in _LIBRARIES if (version := _version(name))},
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def cpu_seconds(pid: int) -> float:
    """CPU time that a living process has used, user and system, from its clock in the kernel."""
    return time.clock_gettime(~pid << 3 | 2)


def process_age_s() -> float:
    """Seconds since this process was started, interpreter included; good to a hundredth."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s


def _percentile(ordered: Sequence[float], part: float) -> float:
    place = part * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def _cpu_name(cpuinfo: Path) -> str:
    for line in cpuinfo.read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model", "cpu model"):
            return value.strip()
    return platform.processor() or "unknown"


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""
