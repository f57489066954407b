"""`--explain KIND`: the grid of ranks, turned and cut, with the user's own numbers."""

from collections.abc import Sequence
from typing import Any

from vcli.cli.views.text import columns, fill, group_text
from vcli.topology.explain import GroupExplanation

_MAX_RANKS = 64
_MAX_GROUPS = 16


def explain_view(explained: GroupExplanation, *, width: int) -> str:
    """Four steps: the grid, the turn, the cut, the groups."""
    kind, size = explained.kind.value, explained.group_size
    total = len(explained.row)
    lines = fill(f"{kind} groups: ranks that {explained.meaning}".split(), width=width, indent="")
    if explained.note:
        lines += fill(f"({explained.note})".split(), width=width, indent="")
    lines += ["", f"1. {total} ranks in a row, laid out as a grid, the last axis fastest"]
    lines += columns(
        [[name for name, _ in explained.shape], [str(count) for _, count in explained.shape]],
        indent="     ",
    )
    lines += ["", "2. " + _turn(explained)]
    if explained.swaps:
        lines += columns(
            [[name for name, _ in explained.order], [str(count) for _, count in explained.order]],
            indent="     ",
        )
        lines.append("   the ranks now read")
    else:
        lines.append("   the ranks read")
    lines += _row(explained.row, width=width)
    lines += ["", f"3. cut into slices of {size}: reshape(-1, {size})"]
    words = [f"[{group_text(group)}]" for group in explained.groups[:_MAX_GROUPS]]
    if len(explained.groups) > _MAX_GROUPS:
        words += ["…", f"[{group_text(explained.groups[-1])}]"]
    lines += fill(words, width=width, indent="     ")
    lines += ["", "The same in torch:"]
    lines += fill(_breakable(explained.code), width=width, indent="     ")
    return "\n".join(lines)


def explanation_to_json(explained: GroupExplanation) -> dict[str, Any]:
    """The steps as values."""
    return {
        "kind": explained.kind.value,
        "meaning": explained.meaning,
        "note": explained.note,
        "shape": dict(explained.shape),
        "swaps": list(explained.swaps),
        "order": [name for name, _ in explained.order],
        "row": list(explained.row),
        "group_size": explained.group_size,
        "groups": [list(group) for group in explained.groups],
        "code": explained.code,
    }


def _turn(explained: GroupExplanation) -> str:
    if not explained.swaps:
        return "nothing to turn: the axes that a group spans stand last already"
    return f"turn it so that those axes stand last: {', '.join(explained.swaps)}"


def _row(row: Sequence[int], *, width: int) -> list[str]:
    words = [str(rank) for rank in row[:_MAX_RANKS]]
    if len(row) > _MAX_RANKS:
        words += ["…", str(row[-1])]
    return fill(words, width=width, indent="     ")


def _breakable(code: str) -> list[str]:
    """The code in pieces that may stand on lines of their own."""
    return code.split(" ")
