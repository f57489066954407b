"""The doctor's report as text: a line for each green group, every finding with its remedy."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from itertools import groupby

from vcli.cli.views.text import bytes_text, columns, hanging, paste_lines
from vcli.diagnostics import Check, CheckContext, CheckResult, Report, Status
from vcli.diagnostics.registry import GROUPS

_MARKS = {
    Status.PASS: "✓",
    Status.WARN: "!",
    Status.FAIL: "✗",
    Status.SKIP: "–",  # noqa: RUF001 - a dash as wide as the other marks
    Status.UNKNOWN: "?",
}
_WORDS = {
    Status.PASS: "ok",
    Status.WARN: "warn",
    Status.FAIL: "FAIL",
    Status.SKIP: "skip",
    Status.UNKNOWN: "?",
}
_COLORS = {
    Status.PASS: "32",
    Status.WARN: "33",
    Status.FAIL: "1;31",
    Status.SKIP: "2",
    Status.UNKNOWN: "35",
}
_SEVERITY = (Status.FAIL, Status.WARN, Status.UNKNOWN, Status.PASS, Status.SKIP)
_NAME_WIDTH = 17


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportStyle:
    """What the terminal can show."""

    width: int
    has_color: bool = False
    has_marks: bool = True
    is_verbose: bool = False
    is_terminal: bool = False

    def mark(self, status: Status) -> str:
        """`[✓]`, or `[ok]   ` where the encoding has no such letters; coloured if possible."""
        text = f"[{_MARKS[status]}]" if self.has_marks else f"[{_WORDS[status]}]".ljust(6)
        return f"\x1b[{_COLORS[status]}m{text}\x1b[0m" if self.has_color else text

    @property
    def mark_width(self) -> int:
        """Columns that a mark takes."""
        return 3 if self.has_marks else 6


def can_show_marks(encoding: str | None) -> bool:
    """Whether a stream of this encoding has the letters of the marks."""
    try:
        "✓✗→".encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def report_view(report: Report, context: CheckContext, style: ReportStyle) -> str:
    """The whole report."""
    lines = [*_headline(report, context, style), ""]
    skipped: dict[str, str] = {}
    for group, grouped in groupby(report.results, key=lambda result: result.check.group):
        results = list(grouped)
        if not style.is_verbose and all(r.status is Status.SKIP for r in results):
            skipped[GROUPS[group]] = results[0].measured
        else:
            lines += _group_lines(group, results, style)
    lines += _skipped_lines(skipped, style)
    lines += ["", *hanging(closing_line(report), width=style.width, hang=2)]
    return "\n".join(lines)


def closing_line(report: Report) -> str:
    """`1 failed, 1 warning, 58 passed, 9 skipped, 0 unknown.   exit 1`."""
    counts = report.counts
    warnings = counts[Status.WARN]
    text = (
        f"{counts[Status.FAIL]} failed, {warnings} warning{'' if warnings == 1 else 's'}, "
        f"{counts[Status.PASS]} passed, {counts[Status.SKIP]} skipped, "
        f"{counts[Status.UNKNOWN]} unknown."
    )
    if report.is_interrupted:
        text += "   Interrupted: this is what is known so far."
    if report.refusals:
        text += "   A launch would be refused."
    return f"{text}   exit {int(report.exit_status)}"


def changes_view(changes: Sequence[Mapping[str, str]]) -> str:
    """What differs from the baseline, one line before and one after for each."""
    if not changes:
        return "\nnothing differs from the baseline"
    lines = ["", "differs from the baseline"]
    for change in changes:
        lines += [f"  {change['subject']}: was {change['before']}", f"    now {change['now']}"]
    return "\n".join(lines)


def list_view(checks: Sequence[Check]) -> str:
    """All checks in columns, under the headings of their groups."""
    lines: list[str] = []
    for group, listed in groupby(checks, key=lambda item: item.group):
        rows = [
            [item.id, item.level.value, item.title,
             f"needs {', '.join(item.requires)}" if item.requires else ""]
            for item in listed
        ]  # fmt: skip
        lines += ["", f"{GROUPS[group]} ({group})", *columns(rows, indent="  ")]
    return "\n".join(lines[1:])


def headline(report: Report, context: CheckContext) -> str:
    """Version, node, surroundings, devices, plan."""
    config = context.plan.config
    sizes = f"tp{config.tp} pp{config.pp} dp{config.dp}"
    ranks, nodes = context.plan.world_size_across_dp, config.num_hosts
    parts = [
        f"vcli doctor {_version()}",
        f"node{report.node_rank}",
        context.dialect.value,
        _devices(context),
        f"plan {sizes} ({ranks} rank{'s' * (ranks > 1)}, {nodes} node{'s' * (nodes > 1)})",
    ]
    return " · ".join(parts)


def _headline(report: Report, context: CheckContext, style: ReportStyle) -> list[str]:
    text, seconds = headline(report, context), f"{report.seconds:.1f} s"
    gap = style.width - len(text) - len(seconds)
    if gap < 2:
        return hanging(f"{text} · {seconds}", width=style.width, hang=2)
    return [f"{text}{' ' * gap}{seconds}"]


def _devices(context: CheckContext) -> str:
    gpus = context.host.gpus
    if not gpus:
        return "no GPU"
    names = {gpu.name for gpu in gpus}
    name = gpus[0].name.removeprefix("NVIDIA ") if len(names) == 1 else "mixed GPUs"
    memory = gpus[0].memory_total_bytes
    return f"{len(gpus)}× {name}" + (f" {bytes_text(memory)}" if memory else "")


def _version() -> str:
    try:
        return metadata.version("vcli-toolkit")
    except metadata.PackageNotFoundError:
        return "(not installed)"


def _group_lines(group: str, results: Sequence[CheckResult], style: ReportStyle) -> list[str]:
    worst = next(status for status in _SEVERITY if any(r.status is status for r in results))
    name = GROUPS[group].ljust(_NAME_WIDTH)
    lead = f"{style.mark(worst)} {name}"
    indent = " " * (style.mark_width + 1 + _NAME_WIDTH)
    room = max(30, style.width - len(indent))
    problems = [r for r in results if r.status in (Status.FAIL, Status.WARN, Status.UNKNOWN)]
    problems.sort(key=lambda result: _SEVERITY.index(result.status))
    lines: list[str] = []
    shown = problems if not style.is_verbose else results
    for result in shown:
        lines += _result_lines(result, style, room)
    if not shown:
        lines = _wrap(_summary(results), room)
    return [f"{lead}{lines[0]}", *(f"{indent}{line}" for line in lines[1:])]


def _skipped_lines(skipped: Mapping[str, str], style: ReportStyle) -> list[str]:
    """One entry for all groups that do not apply here, equal reasons together."""
    if not skipped:
        return []
    by_reason: dict[str, list[str]] = {}
    for name, reason in skipped.items():
        by_reason.setdefault(reason, []).append(name)
    text = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in by_reason.items())
    indent = " " * (style.mark_width + 1 + _NAME_WIDTH)
    first, *rest = _wrap(text, max(30, style.width - len(indent)))
    lead = f"{style.mark(Status.SKIP)} {'Not applicable'.ljust(_NAME_WIDTH)}"
    return [f"{lead}{first}", *(f"{indent}{line}" for line in rest)]


def _summary(results: Sequence[CheckResult]) -> str:
    """What a green group says in one line."""
    passes = [result for result in results if result.status is Status.PASS]
    headlines = [result.measured for result in passes if result.check.is_headline]
    return ", ".join(headlines) or f"{len(passes)} check{'s' * (len(passes) > 1)} passed"


def _result_lines(result: CheckResult, style: ReportStyle, room: int) -> list[str]:
    """One check: its measurement, and for a problem what is expected, why, and what to type."""
    head = f"{result.id} {result.measured}"
    if style.is_verbose:
        head = f"{style.mark(result.status)} {result.id} {result.check.title}: {result.measured}"
    lines = _wrap(head, room)
    if result.status in (Status.FAIL, Status.WARN):
        lines += [f"  {line}" for line in _wrap(_reason(result), room - 2)]
    if result.remedy:
        arrow = "→" if style.has_marks else "->"
        remedy = f"  {arrow} {result.remedy}"
        lines += paste_lines(remedy, width=room, hang=4) if style.is_terminal else [remedy]
    if result.trace and style.is_verbose:
        lines += [f"    {line}" for line in result.trace.rstrip().splitlines()]
    return lines


def _reason(result: CheckResult) -> str:
    return f"expected {result.expected}; {result.why}" if result.expected else result.why


def _wrap(text: str, room: int) -> list[str]:
    import textwrap

    return textwrap.wrap(text, max(20, room), break_long_words=False, break_on_hyphens=False) or [
        ""
    ]
