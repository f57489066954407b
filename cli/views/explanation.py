"""What `vcli explain` prints: a check, or the cause that a log gives away."""

import textwrap
from collections.abc import Collection, Sequence

from vcli.cli.views.check_page import remedy_text
from vcli.diagnostics import Check, Dialect
from vcli.diagnostics.explain import Evidence, Explanation, Match
from vcli.diagnostics.registry import GROUPS
from vcli.diagnostics.symptoms import SYMPTOMS, Role

_LABEL_WIDTH = 11


def check_view(check: Check, dialect: Dialect, *, width: int) -> str:
    """What it looks at, why, and what to type, first for the surroundings that vcli runs in."""
    texts = {dialect: remedy_text(check.remedy.template(dialect))}
    for other in Dialect:
        text = remedy_text(check.remedy.template(other))
        if text not in texts.values():
            texts[other] = text
    rows = [
        ("group", f"{GROUPS[check.group]} (vcli doctor {check.group})"),
        ("level", check.level.value + (", part of every start" if check.is_preflight else "")),
        ("looks at", " ".join(check.explanation.split())),
        ("expects", check.expected),
        ("why", check.why),
        *((_remedy_label(key, texts), text) for key, text in texts.items()),
        ("needs", ", ".join(check.requires)),
        ("in logs", "; ".join(item.title for item in SYMPTOMS if item.check == check.id)),
        ("run it", f"vcli doctor {check.id.lower()} -v"),
    ]
    lines = [f"{check.id}  {check.title}"]
    for label, text in rows:
        lines += _row(label, text, width=width) if text else []
    return "\n".join(lines)


def explanation_view(
    explained: Explanation, name: str, *, known: Collection[str], width: int
) -> str:
    """The first cause with its lines and remedy; the rest in a line each.

    `known` are the ids of checks that `vcli doctor` has.
    """
    if not explained.matches:
        return _unknown_view(explained, name, width=width)
    match = explained.matches[0]
    check = match.symptom.check
    lines = [f"{name}:{match.line}: {match.symptom.title}" + (f"  [{check}]" if check else "")]
    if match.symptom.role is Role.CONSEQUENCE:
        lines += _row("note", "a consequence: no cause is known in this log", width=width)
        lines += _first_failure_rows(explained, before=match.line, width=width)
    lines += _row("cause", match.cause, width=width)
    for item in sorted(match.evidence, key=lambda item: item.line):
        lines += _row(f"line {item.line}", item.text, width=width)
    lines += _row("remedy", match.remedy, width=width)
    if check in known:
        text = f"vcli doctor {str(check).lower()} tells it before the start"
        lines += _row("check", text, width=width)
    lines += _others("also", explained.matches[1:], width=width)
    lines += _others("follows", explained.followers, width=width)
    return "\n".join(lines)


def _unknown_view(explained: Explanation, name: str, *, width: int) -> str:
    lines = [f"{name}: no known failure in {explained.num_lines:,} lines"]
    rows = _first_failure_rows(explained, before=None, width=width)
    if rows:
        lines += rows
        lines += _row("next", "vcli doctor judges this machine", width=width)
    return "\n".join(lines)


def _first_failure_rows(explained: Explanation, *, before: int | None, width: int) -> list[str]:
    first = explained.first_failure
    if first is None or (before is not None and first.line >= before):
        return []
    who = f"{first.speaker}: " if first.speaker else ""
    text = f"{who}the first line that looks like an error"
    return [*_row("first", text, width=width), *_row(f"line {first.line}", first.text, width=width)]


def _others(label: str, matches: Sequence[Match], *, width: int) -> list[str]:
    lines: list[str] = []
    for match in matches:
        numbers = ", ".join(str(item.line) for item in _sorted(match.evidence))
        text = f"{match.symptom.title} (line {numbers})"
        lines += _row(label, text, width=width)
    return lines


def _sorted(evidence: Sequence[Evidence]) -> list[Evidence]:
    return sorted(evidence, key=lambda item: item.line)


def _remedy_label(dialect: Dialect, texts: dict[Dialect, str]) -> str:
    return "remedy" if dialect is next(iter(texts)) else dialect.value


def _row(label: str, text: str, *, width: int) -> list[str]:
    """`label   text`, the text filled to the width."""
    indent = " " * (_LABEL_WIDTH + 2)
    filled = textwrap.wrap(
        text,
        width=max(width, 40),
        initial_indent=f"  {label.ljust(_LABEL_WIDTH - 1)} ",
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return filled or [f"  {label}"]
