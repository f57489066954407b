"""Who listens on a port of this host, as far as /proc shows it."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vcli.diagnostics.errors import CannotMeasureError
from vcli.diagnostics.files import HostFiles

_LISTEN = "0A"
_TICKS_PER_SECOND = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class PortHolder:
    """A process that listens; `age_s` is None where it cannot be told."""

    pid: int
    command: str
    age_s: float | None

    def describe(self) -> str:
        """`pid 812 (python server.py, for 3 h 12 m)`."""
        age = f", for {age_text(self.age_s)}" if self.age_s is not None else ""
        return f"pid {self.pid} ({self.command}{age})"


def listening_inodes(files: HostFiles, port: int) -> frozenset[str]:
    """Inodes of the sockets that listen on `port`."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in (files.read(table) or "").splitlines()[1:]:
            fields = line.split()
            if (
                len(fields) > 9
                and fields[3] == _LISTEN
                and int(fields[1].rsplit(":", 1)[1], 16) == port
            ):
                found.add(fields[9])
    return frozenset(found)


def find_holder(files: HostFiles, port: int) -> PortHolder | None:
    """The process that listens on `port`; None if nobody does or it is another user's."""
    inodes = listening_inodes(files, port)
    if not inodes:
        return None
    wanted = {f"socket:[{inode}]" for inode in inodes}
    for pid in running_pids(files):
        try:
            descriptors = files.names(f"/proc/{pid}/fd")
        except CannotMeasureError:
            continue  # another user's process
        if any(files.target(f"/proc/{pid}/fd/{number}") in wanted for number in descriptors):
            return PortHolder(pid=pid, command=command_of(files, pid), age_s=age_of(files, pid))
    return None


def running_pids(files: HostFiles) -> Iterator[int]:
    """Ids of all processes that /proc shows."""
    for name in files.names("/proc"):
        if name.isdigit():
            yield int(name)


def command_of(files: HostFiles, pid: int) -> str:
    """The first words of a process's command line, or its name."""
    words = [word for word in (files.read(f"/proc/{pid}/cmdline") or "").split("\0") if word]
    if not words:
        return (files.read(f"/proc/{pid}/comm") or "gone meanwhile").strip()
    if len(words) == 1:
        return words[0]
    return " ".join(Path(word).name or word for word in words[:3])


def age_of(files: HostFiles, pid: int) -> float | None:
    """Seconds since the process was started."""
    uptime = files.read_words("/proc/uptime")
    fields = (files.read(f"/proc/{pid}/stat") or "").rpartition(")")[2].split()
    if not uptime or len(fields) < 20:
        return None
    return max(0.0, float(uptime[0]) - int(fields[19]) / _TICKS_PER_SECOND)


def age_text(seconds: float) -> str:
    """`42 s`, `3 h 12 m`, `5 d 2 h`."""
    minutes, hours, days = int(seconds // 60), int(seconds // 3600), int(seconds // 86400)
    if minutes < 1:
        return f"{seconds:.0f} s"
    if hours < 1:
        return f"{minutes} m"
    if days < 1:
        return f"{hours} h {minutes % 60} m"
    return f"{days} d {hours % 24} h"
