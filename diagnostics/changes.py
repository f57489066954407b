"""What differs between two reports of the same machine, for whoever watches it."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from vcli.diagnostics.check import CheckResult, Status

#: Commas are in a number, or between those of a list; dots may be those of a version.
_NUMBER: Final = re.compile(
    r"(?P<number>(?<![\d,])[1-9]\d{0,2}(?:,\d{3})+(?!,?\d)|\d+(?:\.\d+)*)"
    r"(?: ?(?P<unit>(?:[KMGT]?i?B|µs|ms|s|min|h)\b|×)?(?P<rate>/s\b)?)?"
)
_TIMES: Final = ("µs", "ms", "s", "min", "h")
_SCALES: Final = {
    "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
}  # fmt: skip
#: Free memory and the like are never twice the same.
_STEADY_PART: Final = 0.1
_SEVERITY: Final = {
    Status.PASS: 0, Status.SKIP: 0, Status.UNKNOWN: 1, Status.WARN: 2, Status.FAIL: 3,
}  # fmt: skip


class Kind(StrEnum):
    """What a change means."""

    WORSE = "worse"
    BETTER = "better"
    VALUE = "changed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One check that says something else than before."""

    id: str
    kind: Kind
    before: CheckResult
    now: CheckResult

    def describe(self) -> str:
        """`LIM-03 worse: pass -> warn: none -> /dev/shm/nccl-x`."""
        if self.kind is Kind.VALUE:
            return f"{self.id} changed: {self.before.measured} -> {self.now.measured}"
        step = f"{self.before.status} -> {self.now.status}"
        remedy = f"; {self.now.remedy}" if self.kind is Kind.WORSE and self.now.remedy else ""
        return f"{self.id} {self.kind}: {step}: {self.now.measured}{remedy}"


def changes_between(
    before: Iterable[CheckResult], now: Iterable[CheckResult]
) -> tuple[Change, ...]:
    """Checks with another verdict, then those with another measurement: a tenth off at least."""
    old = {result.id: result for result in before}
    found = []
    for result in now:
        previous = old.get(result.id)
        if previous is None:
            continue
        step = _SEVERITY[result.status] - _SEVERITY[previous.status]
        if step:
            kind = Kind.WORSE if step > 0 else Kind.BETTER
        elif result.status is not previous.status or not is_same_measurement(
            previous.measured, result.measured
        ):
            kind = Kind.VALUE
        else:
            continue
        found.append(Change(id=result.id, kind=kind, before=previous, now=result))
    order = list(Kind)
    return tuple(sorted(found, key=lambda change: order.index(change.kind)))


def is_same_measurement(one: str, other: str) -> bool:
    """Whether two texts differ by no more than a tenth in each of their numbers, versions apart.

    How long something took, and how fast it went, is different in each round: only the verdict
    tells more of it.
    """
    if one == other:
        return True
    if _NUMBER.sub(_place, one) != _NUMBER.sub(_place, other):
        return False
    pairs = zip(_values(one), _values(other), strict=True)
    return all(abs(a - b) <= _STEADY_PART * max(a, b) for a, b in pairs)


def _is_noise(match: re.Match[str]) -> bool:
    return match["unit"] in _TIMES or match["rate"] is not None


def _is_version(match: re.Match[str]) -> bool:
    num_dots = match["number"].count(".")
    return num_dots > 1 or (num_dots == 1 and not (match["unit"] or match["rate"]))


def _place(match: re.Match[str]) -> str:
    """What stands for a number when the words are compared."""
    if _is_version(match):
        return match[0]
    if _is_noise(match):
        return "#/s" if match["rate"] else "#s"
    return "#B" if match["unit"] in _SCALES else "#" + match[0].removeprefix(match["number"])


def _values(text: str) -> list[float]:
    """The numbers that count, sizes in bytes."""
    return [
        float(match["number"].replace(",", "")) * _SCALES.get(match["unit"] or "", 1)
        for match in _NUMBER.finditer(text)
        if not (_is_version(match) or _is_noise(match))
    ]
