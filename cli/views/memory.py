"""Where the memory of the ranks goes: lines before a start, and what was measured beside them."""

from collections.abc import Iterator, Mapping, Sequence

from vcli.cli.views.text import bytes_text, fill, rank_list
from vcli.runtime.messages import MemoryReport
from vcli.topology.rank_memory import (
    ITEM_NAMES,
    MemoryItems,
    RankMemoryPlan,
    differences,
    known_items,
)


def planned_lines(plans: Sequence[RankMemoryPlan], *, width: int) -> list[str]:
    """`memory rank 0: weights 15.0 GiB · ... · KV cache 90.1 GiB = 738,304 tokens`, as planned.

    Ranks that take equally much share a line.
    """
    alike: dict[MemoryItems, list[int]] = {}
    for plan in plans:
        alike.setdefault(plan.items, []).append(plan.rank)
    lines: list[str] = []
    for items, ranks in alike.items():
        text = f"memory {_who(ranks)} (planned): {_items_text(known_items(items))}"
        filled = fill(text.split(" "), width=width, indent="  ")
        lines += [filled[0].strip(), *filled[1:]]
    return lines


def measured_lines(reports: Sequence[MemoryReport]) -> Iterator[str]:
    """A line for ranks that are alike, each value with the planned one; then what is far off.

    On a CPU nothing is called far off: how much is free changes by the minute there.
    """
    alike: dict[str, list[int]] = {}
    warned: dict[str, list[int]] = {}
    for report in reports:
        text = _items_text(report.measured, report.planned)
        alike.setdefault(text, []).append(report.rank)
        if report.device == "cpu":
            continue
        for _, sentence in differences(_items(report.planned), _items(report.measured)):
            warned.setdefault(sentence, []).append(report.rank)
    for text, ranks in alike.items():
        if text:
            yield f"memory {_who(ranks)}: {text}"
    for sentence, ranks in warned.items():
        yield f"! memory {_who(ranks)}: {sentence}"


def _items_text(values: Mapping[str, int], planned: Mapping[str, int] | None = None) -> str:
    parts = []
    for name, title in ITEM_NAMES.items():
        if name not in values:
            continue
        part = f"{title} {bytes_text(values[name])}"
        if name == "kv_bytes" and "kv_tokens" in values:
            part += f" = {values['kv_tokens']:,} tokens"
        if planned is not None and name in planned:
            part += f" (planned {bytes_text(planned[name])})"
        parts.append(part)
    return " · ".join(parts)


def _items(values: Mapping[str, int]) -> MemoryItems:
    return MemoryItems(**values)


def _who(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {rank_list(ranks)}"
