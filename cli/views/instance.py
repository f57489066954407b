"""A running instance as text and as values: processes, ranks, who waits, stacks, left-overs."""

import textwrap
from collections.abc import Sequence
from typing import Any

from vcli.cli.doctor_instance_facts import InstanceReport, Leftovers, RankView
from vcli.cli.views.report import ReportStyle
from vcli.cli.views.text import bytes_text, columns
from vcli.diagnostics import Status
from vcli.diagnostics.holders import age_text
from vcli.diagnostics.instances import VcliProcess
from vcli.diagnostics.stacks import ThreadStack

_SHORT_FRAMES = 6
#: In these stands what a rank does, whichever thread it runs in.
_RANK_CODE = ("runtime/worker/", "runtime/models/", "runtime/distributed/", "executor/local_rank")


def instance_view(
    report: InstanceReport, leftovers: Leftovers, style: ReportStyle, *, seconds: float
) -> str:
    """The whole page."""
    lines = [_headline(report, style, seconds), ""]
    lines += _process_lines(report)
    lines += ["", *_rank_lines(report.ranks)]
    lines += ["", "waiting", *_waits(report, style)]
    lines += ["", *_stack_lines(report, style)]
    lines += ["", *_ras_lines(report, style)]
    problems = [
        line
        for problem in report.problems
        for line in _marked(style, Status.FAIL, problem.text, problem.remedy)
    ]
    lines += ["", *problems] if problems else []
    found = leftover_lines(leftovers)
    lines += (
        ["", "left over from dead instances", *(f"  {line}" for line in found)] if found else []
    )
    return "\n".join(lines)


def leftover_lines(leftovers: Leftovers) -> list[str]:
    """A line for each thing, with the command that removes it."""
    lines = [
        f"{process.name} (pid {process.pid}, {bytes_text(process.rss_bytes)}, "
        f"{age_text(process.age_s)}): kill {process.pid}"
        for process in leftovers.orphans
    ]
    lines += [
        f"/dev/shm/{name} ({bytes_text(size)}): rm /dev/shm/{name}"
        for name, size in leftovers.shm_files.items()
    ]
    lines += [
        f"pid {pid} keeps memory of vcli ({', '.join(names)}): kill {pid}"
        for pid, names in leftovers.memfd_holders.items()
    ]
    return lines


def leftovers_json(leftovers: Leftovers) -> list[dict[str, Any]]:
    """The same as values."""
    return [
        *({"kind": "process", "pid": p.pid, "title": p.title, "remedy": f"kill {p.pid}"}
          for p in leftovers.orphans),
        *({"kind": "shm", "path": f"/dev/shm/{name}", "bytes": size,
           "remedy": f"rm /dev/shm/{name}"} for name, size in leftovers.shm_files.items()),
        *({"kind": "memfd", "pid": pid, "names": list(names), "remedy": f"kill {pid}"}
          for pid, names in leftovers.memfd_holders.items()),
    ]  # fmt: skip


def instance_json(report: InstanceReport) -> dict[str, Any]:
    """The content of the document vcli.instance/1."""
    return {
        "pid": report.instance.owner.pid,
        "model": report.owner_facts.get("model"),
        "url": report.owner_facts.get("url"),
        "processes": [_process_json(report, process) for process in report.instance.everybody],
        "ranks": [_rank_json(rank) for rank in report.ranks],
        "waits": list(report.waits),
        "nccl_ras": {"status": report.ras, "skipped": report.ras_skipped},
        "problems": [{"text": p.text, "remedy": p.remedy} for p in report.problems],
    }


def _headline(report: InstanceReport, style: ReportStyle, seconds: float) -> str:
    owner, facts = report.instance.owner, report.owner_facts
    told = [str(facts[key]) for key in ("model", "url") if facts.get(key)]
    age = f"up {age_text(owner.age_s)}"
    parts = [f"instance {owner.pid}", *told, f"user {owner.user}", age]
    text, took = " · ".join(parts), f"{seconds:.1f} s"
    return f"{text}{' ' * max(2, style.width - len(text) - len(took))}{took}"


def _process_lines(report: InstanceReport) -> list[str]:
    rows = [["process", "pid", "parent", "state", "threads", "memory", "cpu", "up"]]
    for process in report.instance.everybody:
        is_owner = process is report.instance.owner
        percent = report.cpu_percent.get(process.pid)
        rows.append(
            [
                _short_name(process) if is_owner else f"  {process.name}",
                str(process.pid),
                str(_parent_of(report, process)),
                process.state,
                str(process.num_threads),
                bytes_text(process.rss_bytes),
                "gone" if percent is None else f"{percent:.0f} %",
                age_text(process.age_s),
            ]
        )
    return columns(rows)


def _short_name(process: VcliProcess) -> str:
    """The first two words behind the interpreter: `vcli serve`."""
    words = process.title.split()
    while len(words) > 1 and (words[0].startswith("python") or words[0] == "-m"):
        del words[0]
    return " ".join(words[:2])


def _parent_of(report: InstanceReport, process: VcliProcess) -> int:
    page = report.pages.get(process.pid)
    told = page.told.get("parent_pid") if page else None
    return told if isinstance(told, int) else process.parent_pid


def _rank_lines(ranks: Sequence[RankView]) -> list[str]:
    if not ranks:
        return ["ranks", "  none has started yet, or they live on other nodes"]
    rows = [
        [
            str(view.rank),
            view.title,
            view.state,
            str(view.page.steps_begun) if view.page else "?",
            _last_step(view),
            view.progress.describe() if view.progress else "none: a rank alone",
        ]
        for view in ranks
    ]
    return columns([["rank", "process", "state", "steps", "last step", "collective"], *rows])


def _last_step(view: RankView) -> str:
    page = view.page
    if page is None:
        return "?"
    if not page.steps_begun:
        return "none yet"
    word = "runs for" if page.is_in_step else "ended"
    return f"{word} {page.last_seconds:.1f} s" + ("" if page.is_in_step else " ago")


def _waits(report: InstanceReport, style: ReportStyle) -> list[str]:
    if not report.waits:
        return ["  nobody waits for a rank that has not come to a collective"]
    return [
        line
        for text in report.waits
        for line in textwrap.wrap(text, style.width, initial_indent="  ", subsequent_indent="    ")
    ]


def _stack_lines(report: InstanceReport, style: ReportStyle) -> list[str]:
    more = "" if style.is_verbose else " (main threads, and what ranks run; all of them: -v)"
    lines = [f"stacks{more}"]
    for process in report.instance.everybody:
        answer = report.stacks.get(process.pid)
        if answer is None:
            continue
        name = _short_name(process) if process.is_front else process.name
        if isinstance(answer, str):
            lines.append(f"  {name} ({process.pid}): {answer}")
            continue
        shown = [t for t in answer if style.is_verbose or _is_telling(t)]
        hidden = len(answer) - len(shown)
        others = f", {hidden} more thread{'s' * (hidden > 1)}" if hidden else ""
        lines.append(f"  {name} ({process.pid}){others}")
        for thread in shown:
            lines += _thread_lines(thread, style)
    return lines


def _is_telling(thread: ThreadStack) -> bool:
    return thread.is_main or (
        any(part in frame.path for frame in thread.frames for part in _RANK_CODE[:3])
        and not any("watchdog" in frame.path for frame in thread.frames)
    )


def _thread_lines(thread: ThreadStack, style: ReportStyle) -> list[str]:
    frames = thread.frames if style.is_verbose else thread.frames[:_SHORT_FRAMES]
    name = "main thread" if thread.is_main else f"thread {thread.thread}"
    lines = [f"    {name}", *(f"      {frame.short}"[: style.width] for frame in frames)]
    left = len(thread.frames) - len(frames)
    return lines + ([f"      … {left} more"] if left else [])


def _ras_lines(report: InstanceReport, style: ReportStyle) -> list[str]:
    if report.ras_skipped:
        text = f"nccl   skipped: {report.ras_skipped}"
        return textwrap.wrap(text, style.width, subsequent_indent="       ")
    return ["nccl", *(f"  {line}" for line in report.ras.splitlines())]


def _marked(style: ReportStyle, status: Status, text: str, remedy: str) -> list[str]:
    first, *rest = textwrap.wrap(text, style.width - style.mark_width - 1)
    indent = " " * (style.mark_width + 1)
    arrow = "→" if style.has_marks else "->"
    lines = [f"{style.mark(status)} {first}", *(f"{indent}{line}" for line in rest)]
    return lines + ([f"{indent}{arrow} {remedy}"] if remedy else [])


def _process_json(report: InstanceReport, process: VcliProcess) -> dict[str, Any]:
    answer = report.stacks.get(process.pid, "not asked: it runs no code of the engine")
    percent = report.cpu_percent.get(process.pid)
    return {
        "pid": process.pid,
        "parent_pid": _parent_of(report, process),
        "title": process.title,
        "user": process.user,
        "state": process.state,
        "threads": process.num_threads,
        "rss_bytes": process.rss_bytes,
        "cpu_seconds": process.cpu_seconds,
        "cpu_percent": None if percent is None else round(percent, 1),
        "age_s": round(process.age_s, 2),
        "stacks": [] if isinstance(answer, str) else [_thread_json(thread) for thread in answer],
        "no_stacks_because": answer if isinstance(answer, str) else "",
    }


def _thread_json(thread: ThreadStack) -> dict[str, Any]:
    return {
        "thread": thread.thread,
        "is_main": thread.is_main,
        "frames": [
            {"path": frame.path, "line": frame.line, "function": frame.function}
            for frame in thread.frames
        ],
    }


def _rank_json(view: RankView) -> dict[str, Any]:
    page, progress = view.page, view.progress
    return {
        "rank": view.rank,
        "title": view.title,
        "pid": view.pid,
        "state": view.state,
        "steps_begun": page.steps_begun if page else None,
        "steps_ended": page.steps_ended if page else None,
        "last_step_seconds": round(page.last_seconds, 3) if page else None,
        "collectives_entered": progress.num_entered if progress else None,
        "collective": f"{progress.operation} of {progress.kind}"
        if progress and progress.is_waiting
        else None,
        "collective_seconds": round(progress.seconds, 3) if progress else None,
    }
