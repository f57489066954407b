"""Small pieces of text that several views share."""

from collections.abc import Iterable, Sequence


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


def _run_text(run: Sequence[int]) -> str:
    return str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}"
