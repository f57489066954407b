"""Tables that fit the width they are given."""

from collections.abc import Sequence

from vcli.cli.views.text import columns


def fitted(rows: Sequence[Sequence[str]], *, width: int) -> list[str]:
    """The table, or where it is wider than `width` several below each other.

    Each has the first column, and no cell is cut.
    """
    if not rows:
        return []
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    parts: list[list[int]] = [[0]]
    room = width - widths[0]
    for place in range(1, len(widths)):
        room -= 2 + widths[place]
        if room < 0 and len(parts[-1]) > 1:
            parts.append([0])
            room = width - widths[0] - 2 - widths[place]
        parts[-1].append(place)
    lines: list[str] = []
    for number, part in enumerate(parts):
        lines += [""] * (number > 0) + columns([[row[place] for place in part] for row in rows])
    return lines
