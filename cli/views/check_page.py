"""The documentation of a check, made from its code: one Markdown page each, and their index."""

import inspect
import re
from collections.abc import Sequence
from itertools import groupby

from vcli.diagnostics import Check, Dialect
from vcli.diagnostics.registry import GROUPS

_LEVELS = {
    "L0": "files and sockets of this host, without torch, CUDA or other nodes",
    "L1": "NVML, headers of the model's files, or small child processes",
    "L3": "child processes that use torch or CUDA; not with `--fast`, nor in a preflight",
}


def page_name(check: Check) -> str:
    """`NET-01.md`."""
    return f"{check.id}.md"


def check_page(check: Check) -> str:
    """The page: what is measured, what is expected and why, and what to type."""
    remedies = _remedies(check)
    needs = ", ".join(f"[{need}]({need}.md)" for need in check.requires)
    lines = [
        f"# {check.id}: {check.title}",
        "",
        f"- Group: {GROUPS[check.group]} (`vcli doctor {check.group}`)",
        f"- Level: {check.level.value}, {_LEVELS[check.level.value]}",
        *([f"- Runs only after: {needs}"] if needs else []),
        *(["- Part of the preflight of `vcli serve`"] if check.is_preflight else []),
        "",
        "## What it looks at",
        "",
        inspect.cleandoc(check.explanation),
        "",
        "## What is expected",
        "",
        f"{_sentence(check.expected)} Otherwise: {check.why}.",
        "",
        "## What to do",
        "",
        *remedies,
        "",
        f"Run it alone: `vcli doctor {check.id.lower()} -v`. Leave it out: "
        f"`vcli doctor --skip {check.id.lower()}`.",
    ]
    return "\n".join(lines) + "\n"


def index_page(checks: Sequence[Check]) -> str:
    """The table of all checks."""
    lines = ["# Checks of `vcli doctor`", "", "Made by `scripts/make-check-pages` from the code."]
    for group, listed in groupby(checks, key=lambda item: item.group):
        lines += ["", f"## {GROUPS[group]}", "", "| id | level | looks at | expected |",
                  "|---|---|---|---|"]  # fmt: skip
        lines += [
            f"| [{check.id}]({page_name(check)}) | {check.level.value} | {check.title} | "
            f"{_cell(check.expected)} |"
            for check in listed
        ]
    return "\n".join(lines) + "\n"


def _remedies(check: Check) -> list[str]:
    """A block for each text, headed by the surroundings that it is for."""
    by_text: dict[str, list[str]] = {}
    for dialect in Dialect:
        text = remedy_text(check.remedy.template(dialect))
        by_text.setdefault(text, []).append(dialect.value)
    if len(by_text) == 1:
        return ["```", next(iter(by_text)), "```"]
    lines: list[str] = []
    for text, dialects in by_text.items():
        name = ", ".join(dialects)
        lines += [f"{name[0].upper()}{name[1:]}:", "", "```", text, "```", ""]
    return lines[:-1]


def remedy_text(template: str) -> str:
    """`{size}` as `SIZE`; a remedy that is wholly computed is told as such."""
    if re.fullmatch(r"\{\w+\}", template):
        return "(the report has the flags or the command, made from what was measured)"
    text = re.sub(r"(?<!\{)\{(\w+)\}(?!\})", lambda match: match[1].upper(), template)
    return text.replace("{{", "{").replace("}}", "}")


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
