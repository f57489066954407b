"""A running instance as `doctor --instance` sees it: /proc, the pages of its processes, NCCL."""

import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from vcli.diagnostics.errors import CannotMeasureError
from vcli.diagnostics.files import HostFiles
from vcli.diagnostics.holders import find_holder
from vcli.diagnostics.instances import STATES, Instance, VcliProcess, read_process
from vcli.diagnostics.ras import ask_ras, ras_address
from vcli.diagnostics.stacks import NO_ANSWER, ThreadStack, dump_stacks
from vcli.runtime.process.live_page import (
    MEMFD_NAME,
    SIGNAL,
    TEXT_END,
    LiveFacts,
    read_live_page,
)
from vcli.runtime.worker.progress import (
    Absence,
    RankProgress,
    missing_from_collective,
    read_progress,
)

_BOARD = "vcli-progress"
_MAX_BOARD_BYTES = 1 << 24
_MAX_THREADS = 16
_CPU_SAMPLE_S = 0.5
#: A wait that is shorter is the pace of the work.
MIN_WAIT_S = 1.0
#: In a collective, or in a step, for longer than this somebody is probably stuck.
STALL_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankView:
    """One rank: the process that it lives in, and what is known of it; None if not known."""

    rank: int
    title: str
    pid: int
    state: str
    page: LiveFacts | None
    progress: RankProgress | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Something that is not as it should be, and the command that tells more or mends it."""

    text: str
    remedy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftovers:
    """What belongs to no living instance; each with the command that removes it."""

    orphans: tuple[VcliProcess, ...]
    shm_files: Mapping[str, int]
    memfd_holders: Mapping[int, tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceReport:
    """All of it. `stacks`: pid -> threads, or why there are none; `cpu_percent` by pid."""

    instance: Instance
    pages: Mapping[int, LiveFacts]
    ranks: tuple[RankView, ...]
    waits: tuple[str, ...]
    stacks: Mapping[int, tuple[ThreadStack, ...] | str]
    cpu_percent: Mapping[int, float]
    ras: str
    ras_skipped: str
    problems: tuple[Problem, ...] = field(default=())

    @property
    def owner_facts(self) -> Mapping[str, object]:
        """What the process told that the user started."""
        page = self.pages.get(self.instance.owner.pid)
        return page.told if page else {}


def read_pages(processes: Sequence[VcliProcess]) -> dict[int, LiveFacts]:
    """The pages that can be read, by pid."""
    pages = {}
    for process in processes:
        number = (process.memfds or {}).get(MEMFD_NAME)
        if number is None:
            continue
        try:
            file = os.open(f"/proc/{process.pid}/fd/{number}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue  # it ended meanwhile
        try:
            page = read_live_page(file)
        finally:
            os.close(file)
        if page is not None:
            pages[process.pid] = page
    return pages


def parents_of(pages: Mapping[int, LiveFacts]) -> dict[int, int]:
    """pid -> the process that wanted it, as the process itself says."""
    return {
        pid: parent
        for pid, page in pages.items()
        if isinstance(parent := page.told.get("parent_pid"), int)
    }


def examine(files: HostFiles, instance: Instance, pages: Mapping[int, LiveFacts]) -> InstanceReport:
    """Look at the instance; asks each process for its stacks, which takes seconds if one hangs."""
    ranks, waits = _look_at_ranks(instance, pages)
    stacks = _ask_for_stacks(files, instance, pages)
    ras, ras_skipped = _look_at_ras(files, instance)
    return InstanceReport(
        instance=instance,
        pages=pages,
        ranks=ranks,
        waits=waits,
        stacks=stacks,
        cpu_percent=_cpu_percent(files, instance),
        ras=ras,
        ras_skipped=ras_skipped,
        problems=tuple(_problems(instance, ranks, waits, pages, stacks)),
    )


def _look_at_ranks(
    instance: Instance, pages: Mapping[int, LiveFacts]
) -> tuple[tuple[RankView, ...], tuple[str, ...]]:
    ranks: list[RankView] = []
    waits: list[str] = []
    cores = [process for process in instance.processes if process.name.startswith("EngineCore")]
    for core in cores or [instance.owner]:
        told = pages[core.pid].told if core.pid in pages else {}
        own = [p for p in instance.processes if _wanted_by(p, pages) == core.pid]
        board = _read_board((core, *own))
        found = _ranks_of(core, own, board, pages)
        ranks += found
        # A rank of another host writes its line there: here it has no process and an empty line.
        here = {view.rank for view in found if view.pid != core.pid}
        known = [line if line.num_entered or line.rank in here else None for line in board]
        waits += _who_waits(known, told.get("groups"), {view.rank: view.title for view in found})
    return tuple(ranks), tuple(waits)


def _ranks_of(
    core: VcliProcess,
    own: Sequence[VcliProcess],
    board: Sequence[RankProgress],
    pages: Mapping[int, LiveFacts],
) -> list[RankView]:
    """The ranks of one engine core, in processes of their own or in the core's."""
    by_rank = {
        rank: process
        for process in own
        if process.pid in pages and isinstance(rank := pages[process.pid].told.get("rank"), int)
    }
    numbers = {*by_rank, *(int(rank) for rank in _states_of(core.pid, pages) if rank.isdigit())}
    found = []
    for rank in sorted(numbers):
        process = by_rank.get(rank, core)
        page = pages.get(process.pid)
        is_ready = page is not None and page.told.get("state") == "ready"
        state = "ready" if is_ready else _states_of(process.pid, pages).get(str(rank), "unknown")
        found.append(
            RankView(
                rank=rank,
                title=process.name,
                pid=process.pid,
                state=state,
                page=page,
                progress=board[rank] if rank < len(board) else None,
            )
        )
    return found


def _states_of(pid: int, pages: Mapping[int, LiveFacts]) -> Mapping[str, str]:
    states = pages[pid].told.get("ranks") if pid in pages else None
    return states if isinstance(states, dict) else {}


def _wanted_by(process: VcliProcess, pages: Mapping[int, LiveFacts]) -> int:
    parent = pages[process.pid].told.get("parent_pid") if process.pid in pages else None
    return parent if isinstance(parent, int) else process.parent_pid


def _read_board(processes: Sequence[VcliProcess]) -> list[RankProgress]:
    for process in processes:
        number = (process.memfds or {}).get(_BOARD)
        if number is None:
            continue
        try:
            file = os.open(f"/proc/{process.pid}/fd/{number}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            return read_progress(os.pread(file, _MAX_BOARD_BYTES, 0))
        finally:
            os.close(file)
    return []


def _who_waits(
    board: Sequence[RankProgress | None], groups: object, titles: Mapping[int, str]
) -> list[str]:
    """A sentence for each rank that others wait for."""
    if not board or not isinstance(groups, dict):
        return []
    group_of: list[dict[str, tuple[int, ...]]] = [{} for _ in board]
    for kind, listed in groups.items():
        for group in listed:
            if all(rank < len(board) for rank in group):
                for rank in group:
                    group_of[rank][kind] = tuple(group)
    longest = max((line.seconds for line in board if line and line.is_waiting), default=0.0)
    if longest < MIN_WAIT_S:
        return []
    return [
        _absence_text(
            absence, f"{absence.collective}, where others wait for {longest:.1f} s", titles
        )
        for absence in missing_from_collective(board, group_of)
    ]


def _absence_text(absence: Absence, collective: str, titles: Mapping[int, str]) -> str:
    if absence.progress is None:
        return (
            f"it is not known here whether rank {absence.rank} has come to the {collective}: "
            "nothing of it is seen on this host"
        )
    name = f"rank {absence.rank} ({titles.get(absence.rank, '?')})"
    return f"{name} has not come to the {collective}; it is {absence.progress.describe()}"


def _ask_for_stacks(
    files: HostFiles, instance: Instance, pages: Mapping[int, LiveFacts]
) -> dict[int, tuple[ThreadStack, ...] | str]:
    def ask(process: VcliProcess) -> tuple[ThreadStack, ...] | str:
        number = (process.memfds or {}).get(MEMFD_NAME)
        if number is None:
            return "it has no page to write them to"
        try:
            return dump_stacks(files, process, number, signum=SIGNAL, begin=TEXT_END)
        except CannotMeasureError as reason:
            return str(reason)

    # The fork server has no page: it runs no code but its own loop.
    asked = [p for p in instance.everybody if p.pid in pages or not p.name.startswith("ForkServer")]
    with ThreadPoolExecutor(min(_MAX_THREADS, len(asked) or 1), "ask-stacks") as pool:
        return dict(zip((p.pid for p in asked), pool.map(ask, asked), strict=True))


def _look_at_ras(files: HostFiles, instance: Instance) -> tuple[str, str]:
    """NCCL's own report, or why there is none."""
    pids = {process.pid for process in instance.everybody}
    if not any(_uses_gpu(files, pid) for pid in pids):
        return "", "no process of it has a GPU open"
    try:
        address = ras_address(_environ_of(files, max(pids)))
        if address is None:
            return "", "switched off by NCCL_RAS_ENABLE=0"
        holder = find_holder(files, address[1])
        if holder is not None and holder.pid not in pids:
            return "", f"port {address[1]} is another job's: {holder.describe()}"
        return ask_ras(*address), ""
    except CannotMeasureError as reason:
        return "", f"{reason} (NCCL has it since 2.24, once a communicator is made)"


def _uses_gpu(files: HostFiles, pid: int) -> bool:
    try:
        names = files.names(f"/proc/{pid}/fd")
    except CannotMeasureError:
        return False
    return any(files.target(f"/proc/{pid}/fd/{name}").startswith("/dev/nvidia") for name in names)


def _environ_of(files: HostFiles, pid: int) -> dict[str, str]:
    words = (files.read(f"/proc/{pid}/environ") or "").split("\0")
    return dict(word.split("=", 1) for word in words if "=" in word)


def _cpu_percent(files: HostFiles, instance: Instance) -> dict[int, float]:
    """CPU since the instance was read, for half a second at least."""
    found = {}
    time.sleep(_CPU_SAMPLE_S)
    for before in instance.everybody:
        now = read_process(files, before.pid)
        if now is not None and now.start_ticks == before.start_ticks:
            seconds = max(_CPU_SAMPLE_S, now.age_s - before.age_s)
            found[before.pid] = 100 * (now.cpu_seconds - before.cpu_seconds) / seconds
    return found


def _problems(
    instance: Instance,
    ranks: Sequence[RankView],
    waits: Sequence[str],
    pages: Mapping[int, LiveFacts],
    stacks: Mapping[int, tuple[ThreadStack, ...] | str],
) -> list[Problem]:
    end = f"kill {instance.owner.pid}   (ends the instance; its log has more)"
    found = []
    for process in instance.everybody:
        who, answer = f"{process.name} (pid {process.pid})", stacks.get(process.pid)
        if process.state == STATES["T"]:
            found.append(Problem(text=f"{who} is stopped", remedy=f"kill -CONT {process.pid}"))
        elif isinstance(answer, str) and answer.startswith(NO_ANSWER):
            found.append(Problem(text=f"{who} gives no stacks: {answer}", remedy=end))
    stall_s = max((view.progress.seconds for view in ranks if view.progress), default=0.0)
    if stall_s > STALL_S:
        found += [Problem(text=text, remedy=end) for text in waits]
    if found:  # a step that does not end is a consequence
        return found
    return [
        Problem(
            text=f"{process.name} (pid {process.pid}) is in step {page.steps_begun} "
            f"for {page.last_seconds:.0f} s",
            remedy=end,
        )
        for process in instance.everybody
        if (page := pages.get(process.pid)) and page.is_in_step and page.last_seconds > STALL_S
    ]
