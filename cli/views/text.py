"""Small pieces of text that several views share."""

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final

#: What may hold a break that is none, then where a line to be copied may end: after `;`, `|`, `&`
#: and `&&` a shell goes on, and a remark in brackets is not for it.
_PASTE_BREAK: Final = re.compile(
    r"""\\.|'[^']*'|"(?:\\.|[^"\\])*"|[;|&](?P<after> +)|(?P<before> +)(?=\()"""
)


def rank_list(ranks: Iterable[int]) -> str:
    """`0-3,8` for [0, 1, 2, 3, 8]."""
    parts: list[str] = []
    run: list[int] = []
    for rank in sorted(ranks):
        if run and rank != run[-1] + 1:
            parts.append(_run_text(run))
            run = []
        run.append(rank)
    if run:
        parts.append(_run_text(run))
    return ",".join(parts)


def bytes_text(size: float) -> str:
    """`512 B`, `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def short_list(numbers: Sequence[int], *, max_parts: int = 3) -> str:
    """`0-7`, `0,4,…,124` for equal steps, `0-7,32-39,…,96-103` where there are more parts."""
    ordered = sorted(set(numbers))
    if len(ordered) > 4:
        step = ordered[1] - ordered[0]
        if step > 1 and all(b - a == step for a, b in pairwise(ordered)):
            return f"{ordered[0]},{ordered[1]},…,{ordered[-1]}"
    parts = rank_list(ordered).split(",")
    if len(parts) <= max_parts + 1:
        return ",".join(parts)
    return ",".join((*parts[: max_parts - 1], "…", parts[-1]))


def group_text(ranks: Sequence[int]) -> str:
    """The members of a group in their order: all up to eight, else runs or equal steps."""
    if len(ranks) <= 8 or list(ranks) != sorted(ranks):
        shown = [str(rank) for rank in ranks]
        return ",".join(shown if len(shown) <= 8 else (*shown[:4], "…", shown[-1]))
    return short_list(ranks)


def seconds_text(seconds: float | None) -> str:
    """`12 µs`, `3.41 ms`, `1.20 s`; `?` where it is not known."""
    if seconds is None:
        return "?"
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"


def plural(count: int, word: str) -> str:
    """`1 node`, `2 nodes`."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def columns(rows: Sequence[Sequence[str]], *, indent: str = "") -> list[str]:
    """Left-aligned columns, two blanks apart, as wide as their widest cell."""
    if not rows:
        return []
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(len(rows[0]))]
    return [
        indent
        + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip()
        for row in rows
    ]


def fill(words: Sequence[str], *, width: int, indent: str) -> list[str]:
    """The words on lines of at most `width`, each line behind `indent`."""
    lines: list[str] = []
    line = ""
    for word in words:
        candidate = f"{line} {word}" if line else word
        if line and len(indent) + len(candidate) > width:
            lines.append(indent + line)
            candidate = word
        line = candidate
    if line:
        lines.append(indent + line)
    return lines


def hanging(text: str, *, width: int, hang: int) -> list[str]:
    """Lines broken between words; what goes on stands `hang` columns in.

    A line that fits stays as it is. One that begins with an arrow is there to be copied.
    """
    lines: list[str] = []
    for line in text.split("\n"):
        is_remedy = line.lstrip().startswith("→ ")
        lines += (paste_lines if is_remedy else _word_lines)(line, width=width, hang=hang)
    return lines


def paste_lines(text: str, *, width: int, hang: int) -> list[str]:
    """A remedy on lines that a shell takes as they are: no command is broken, however long."""
    parts, begin = [], 0
    for match in _PASTE_BREAK.finditer(text):
        if match.lastgroup is not None:
            end, next_begin = match.span(match.lastgroup)
            parts.append(text[begin:end])
            begin = next_begin
    return _broken([*parts, text[begin:]], width=width, hang=hang, whole=text)


def _word_lines(text: str, *, width: int, hang: int) -> list[str]:
    return _broken(text.rstrip().split(" "), width=width, hang=hang, whole=text)


def _broken(words: Sequence[str], *, width: int, hang: int, whole: str) -> list[str]:
    """`whole` where it fits, else its words on several lines."""
    if len(whole) <= width:
        return [whole]
    lines: list[str] = []
    line = ""
    for number, word in enumerate(words):
        candidate = f"{line} {word}" if number else word
        if line.strip() and len(candidate) > width:
            lines.append(line)
            candidate = " " * hang + word
        line = candidate
    return [*lines, line]


def _run_text(run: Sequence[int]) -> str:
    return str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}"
