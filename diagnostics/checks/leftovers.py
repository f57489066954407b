"""HOST, LIM: what dead instances left behind. Nothing is removed here."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from vcli.diagnostics.check import Finding, Remedy, check, passed, warned
from vcli.diagnostics.context import CheckContext
from vcli.diagnostics.errors import CannotMeasureError
from vcli.diagnostics.files import HostFiles
from vcli.diagnostics.holders import age_of, age_text, command_of, running_pids
from vcli.diagnostics.text import listing, size_text

#: How processes of inference engines are called; their launcher starts them with another name.
_ENGINE_TITLE: Final = re.compile(r"^(?:vcli::|VLLM::|sglang::|ray::)")
#: Those that a service manager or a shell may well have started and left.
_LAUNCHER_TITLE: Final = re.compile(
    r"::(?:Api_?Server|Supervisor|Follower|Headless)", re.IGNORECASE
)
#: Time in which a process that has lost its parent may end by itself.
_ENDING_S: Final = 1.3
_SHM_NAME: Final = re.compile(r"^(?:psm_|vcli_|nccl-|torch_|sem\.mp-|sem\.loky)")
_OWN_SHM: Final = re.compile(r"^vcli_")


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """A process whose launcher is gone."""

    pid: int
    title: str
    age_s: float | None

    def describe(self) -> str:
        """`pid 812 'VLLM::Worker_TP0' (3 h 2 m)`."""
        age = f" ({age_text(self.age_s)})" if self.age_s is not None else ""
        return f"pid {self.pid} '{self.title}'{age}"


def find_leftover_processes(files: HostFiles) -> Iterator[Leftover]:
    """Processes of inference engines that were adopted by process 1 (or a subreaper's stead).

    In a container the launcher itself may be process 1; its children are none.
    """
    init_title = command_of(files, 1)
    for pid in running_pids(files):
        title = (files.read(f"/proc/{pid}/cmdline") or "").split("\0")[0].strip()
        if not _ENGINE_TITLE.match(title) or _LAUNCHER_TITLE.search(title):
            continue
        fields = (files.read(f"/proc/{pid}/stat") or "").rpartition(")")[2].split()
        if len(fields) < 2 or fields[0] in ("Z", "X") or fields[1] != "1":
            continue
        if re.search(r"vcli|vllm|sglang|ray|python", init_title, re.IGNORECASE):
            continue
        yield Leftover(pid=pid, title=title, age_s=age_of(files, pid))


@check(
    "HOST-09",
    "no left-over engine",
    why="a worker without a launcher keeps memory, GPUs and ports for ever",
    expected="no process of an engine whose launcher is gone",
    remedy=Remedy(
        bare_metal="kill {pids}   (then kill -9, if they stay)",
        docker="docker restart the container, or inside of it: kill {pids}",
        kubernetes="kubectl delete pod of the old engine, or inside of it: kill {pids}",
        slurm="scancel the old job, or on the node: kill {pids}",
    ),
    deadline_s=5.0,
)
def engines(context: CheckContext) -> Finding:
    """Looks through /proc for titles of vcli, vLLM, SGLang and Ray whose parent is process 1.

    What is found must still be there a moment later: vcli's own processes end within a second of
    their parent.
    """
    first = {item.pid for item in find_leftover_processes(context.files)}
    if not first:
        return passed("none")
    context.pause(_ENDING_S)
    found = [item for item in find_leftover_processes(context.files) if item.pid in first]
    if not found:
        return passed("none")
    return warned(
        listing([item.describe() for item in found]),
        values={"pids": " ".join(str(item.pid) for item in found)},
    )


def find_leftover_shm(files: HostFiles) -> dict[str, int]:
    """Name -> bytes of the files of engines in /dev/shm that no process maps or holds open.

    Only root looks at those of others, since nobody else sees who uses them.
    """
    sizes: dict[str, int] = {}
    for name in files.names("/dev/shm"):
        status = files.path(f"/dev/shm/{name}").lstat()
        if _SHM_NAME.match(name) and os.getuid() in (0, status.st_uid):
            sizes[name] = status.st_blocks * 512
    if not sizes:
        return {}
    for pid in running_pids(files):
        try:
            maps = files.read(f"/proc/{pid}/maps") or ""
            held = [files.target(f"/proc/{pid}/fd/{n}") for n in files.names(f"/proc/{pid}/fd")]
        except CannotMeasureError:
            continue  # another user's process, which cannot have opened a file of ours
        text = "\n".join((maps, *held))
        for name in list(sizes):
            if f"/dev/shm/{name}" in text:
                del sizes[name]
        if not sizes:
            break
    return sizes


def is_own_shm(name: str) -> bool:
    """Whether vcli made the file."""
    return bool(_OWN_SHM.match(name))


@check(
    "LIM-03",
    "nothing left over in /dev/shm",
    why="files of dead processes take memory until somebody removes them",
    expected="no file of an engine that no process uses",
    remedy=Remedy(bare_metal="rm {paths}   (vcli doctor --fix removes vcli's own)"),
    deadline_s=4.0,
)
def shm_files(context: CheckContext) -> Finding:
    """Looks for names of NCCL, torch, Python and vcli in /dev/shm that no process maps or holds."""
    sizes = find_leftover_shm(context.files)
    if not sizes:
        return passed("none")
    paths = [f"/dev/shm/{name}" for name in sizes]
    return warned(
        f"{listing(paths)}: {size_text(sum(sizes.values()))}",
        values={"paths": " ".join(paths)},
    )


CHECKS = (engines, shm_files)
