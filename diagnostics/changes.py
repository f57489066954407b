"""What differs between two reports of the same machine, for whoever watches it."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from vcli.diagnostics.check import CheckResult, Status

_NUMBER: Final = re.compile(r"\d+(?:\.\d+)?")
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
    """Whether two texts differ by no more than a tenth in each of their numbers."""
    if one == other:
        return True
    if _NUMBER.sub("#", one) != _NUMBER.sub("#", other):
        return False
    pairs = zip(_NUMBER.findall(one), _NUMBER.findall(other), strict=True)
    return all(abs(float(a) - float(b)) <= _STEADY_PART * max(float(a), float(b)) for a, b in pairs)
