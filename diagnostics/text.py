"""Numbers as people read them."""

from collections.abc import Sequence

GIB = 1024**3
MIB = 1024**2


def size_text(size_bytes: float) -> str:
    """`512 B`, `64.0 MiB`, `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size_bytes) < 1024:
            return f"{size_bytes:.0f} B" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"


def plural(count: int, noun: str) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def listing(words: Sequence[str], *, limit: int = 4) -> str:
    """`a, b, c and 3 more`."""
    if len(words) <= limit:
        return ", ".join(words)
    return f"{', '.join(words[:limit])} and {len(words) - limit} more"
