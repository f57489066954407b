"""Running processes of vcli, found by their titles in /proc, and which belong together.

Nothing is written anywhere for this, so nothing can be out of date after a SIGKILL.
"""

import os
import pwd
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from vcli.diagnostics.errors import CannotMeasureError
from vcli.diagnostics.files import HostFiles
from vcli.diagnostics.holders import age_of, command_of, running_pids
from vcli.topology.names import TITLE_PREFIX

_TICKS_PER_SECOND: Final = 100
_COMMANDS: Final = ("serve", "launch")
_MEMFD: Final = re.compile(r"^/memfd:(vcli-\S+)")
STATES: Final = {
    "R": "running",
    "S": "sleeping",
    "D": "in the kernel (D)",
    "T": "stopped",
    "t": "traced",
    "Z": "zombie",
    "X": "dead",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class VcliProcess:
    """One process. `memfds`: name of an open memory file -> its descriptor; None if not shown.

    `start_ticks` tells it from a later process with the same pid.
    """

    pid: int
    parent_pid: int
    title: str
    user: str
    state: str
    num_threads: int
    rss_bytes: int
    cpu_seconds: float
    age_s: float
    start_ticks: int
    memfds: Mapping[str, int] | None

    @property
    def is_front(self) -> bool:
        """Whether a user started it: it has no title of ours."""
        return not self.title.startswith(TITLE_PREFIX)

    @property
    def name(self) -> str:
        """The title without prefix."""
        return self.title.removeprefix(TITLE_PREFIX)


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """A running instance: the process that owns it, then the others in the order of their start."""

    owner: VcliProcess
    processes: tuple[VcliProcess, ...]

    @property
    def everybody(self) -> tuple[VcliProcess, ...]:
        """The owner and the others."""
        return (self.owner, *self.processes)


def is_front_command(argv: Sequence[str]) -> bool:
    """Whether these are the words of `vcli serve` or `launch`, with the interpreter or without.

    Not those of a shell, or of `timeout`, around it.
    """
    words = list(argv)
    if words and Path(words[0]).name.startswith("python"):
        del words[0]
        while words and words[0].startswith("-") and words[0] != "-m":
            del words[0]
        if words[:2] == ["-m", "vcli.cli"]:
            words[:2] = ["vcli"]
    return len(words) > 1 and Path(words[0]).name == "vcli" and words[1] in _COMMANDS


def find_processes(files: HostFiles) -> tuple[VcliProcess, ...]:
    """Every process with a title of vcli, and those that users started; the oldest first."""
    found = []
    for pid in running_pids(files):
        argv = (files.read(f"/proc/{pid}/cmdline") or "").split("\0")
        if argv[0].startswith(TITLE_PREFIX) or is_front_command(argv):
            process = read_process(files, pid)
            if process is not None:
                found.append(process)
    return tuple(sorted(found, key=lambda process: (process.start_ticks, process.pid)))


def read_process(files: HostFiles, pid: int) -> VcliProcess | None:
    """What /proc shows of a process; None if it is gone, or only its exit status is left."""
    fields = (files.read(f"/proc/{pid}/stat") or "").rpartition(")")[2].split()
    if len(fields) < 22 or fields[0] in "ZX":
        return None
    status = _status(files, pid)
    uid = (status.get("Uid") or "0").split()[0]
    return VcliProcess(
        pid=pid,
        parent_pid=int(fields[1]),
        title=_title(files, pid),
        user=_user_name(int(uid)),
        state=STATES.get(fields[0], fields[0]),
        num_threads=int(fields[17]),
        rss_bytes=int((status.get("VmRSS") or "0").split()[0]) * 1024,
        cpu_seconds=(int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND,
        age_s=age_of(files, pid) or 0.0,
        start_ticks=int(fields[19]),
        memfds=_memfds(files, pid),
    )


def group_instances(
    processes: Sequence[VcliProcess],
    files: HostFiles,
    parents: Mapping[int, int] | None = None,
) -> tuple[tuple[Instance, ...], tuple[VcliProcess, ...]]:
    """The instances, the newest last, and the processes whose owner is gone.

    Programs that use vcli as a library come before those that were started by its command.

    `parents`: pid -> the process that wanted it, where that is known better than by /proc (the
    fork server is the parent of processes that others wanted). An owner that has another title
    is a program that uses vcli as a library.
    """
    by_pid = {process.pid: process for process in processes}
    members: dict[int, list[VcliProcess]] = {}
    orphans = []
    for process in processes:
        owner_pid = _owner_of(process, by_pid, parents or {})
        if process.pid == owner_pid:
            members.setdefault(owner_pid, [])
        elif _is_nobody(files, owner_pid):
            orphans.append(process)
        else:
            members.setdefault(owner_pid, []).append(process)
    instances = []
    for pid, children in members.items():
        owner = by_pid.get(pid) or read_process(files, pid)
        if owner is None:
            orphans += children
        else:
            instances.append(Instance(owner=owner, processes=tuple(children)))
    instances.sort(
        key=lambda item: (is_front_command(item.owner.title.split()), item.owner.start_ticks)
    )
    return tuple(instances), tuple(orphans)


def find_memfd_holders(files: HostFiles, known: Collection[int]) -> dict[int, tuple[str, ...]]:
    """Processes beside the `known` ones that keep memory of vcli though their parent is gone.

    pid -> names of memory files. A program with a parent uses vcli as a library.
    """
    found = {}
    for pid in running_pids(files):
        names = () if pid in known else tuple(_memfds(files, pid) or ())
        fields = (files.read(f"/proc/{pid}/stat") or "").rpartition(")")[2].split()
        if names and len(fields) > 1 and _is_nobody(files, int(fields[1])):
            found[pid] = names
    return found


def _owner_of(
    process: VcliProcess, by_pid: Mapping[int, VcliProcess], parents: Mapping[int, int]
) -> int:
    """The first ancestor without a title of ours; a pid that does not exist for an orphan."""
    seen = set()
    while not process.is_front and process.pid not in seen:
        seen.add(process.pid)
        parent_pid = parents.get(process.pid, process.parent_pid)
        if parent_pid not in by_pid:
            return parent_pid
        process = by_pid[parent_pid]
    return process.pid


def _is_nobody(files: HostFiles, pid: int) -> bool:
    """Whether this is no owner: gone, or process 1, which adopts; unless it is a program of ours.

    In a container the server itself may be process 1.
    """
    if pid == 1:
        return not re.search(r"vcli|python|pytest", command_of(files, 1), re.IGNORECASE)
    return not files.exists(f"/proc/{pid}")


def _title(files: HostFiles, pid: int) -> str:
    text = (files.read(f"/proc/{pid}/cmdline") or "").replace("\0", " ").strip()
    return text if text.startswith(TITLE_PREFIX) else command_of(files, pid)


def _status(files: HostFiles, pid: int) -> dict[str, str]:
    lines = (files.read(f"/proc/{pid}/status") or "").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _memfds(files: HostFiles, pid: int) -> dict[str, int] | None:
    try:
        return dict(_open_memfds(files, pid))
    except CannotMeasureError:
        return None


def _open_memfds(files: HostFiles, pid: int) -> Iterator[tuple[str, int]]:
    folder = f"/proc/{pid}/fd"
    if not os.access(files.path(folder), os.R_OK | os.X_OK) and files.exists(folder):
        raise CannotMeasureError(f"{folder} is not for this user")
    for number in files.names(folder):
        match = _MEMFD.match(files.target(f"{folder}/{number}"))
        if match:
            yield match[1], int(number)
