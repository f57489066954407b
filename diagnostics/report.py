"""Results of a run as one verdict: counts, exit status, the JSON document."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from vcli.diagnostics.check import Check, CheckResult, Status
from vcli.diagnostics.redact import redact
from vcli.topology import ExitStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All results of one node in the order of repair; `is_strict` makes warnings count as failures.

    Secrets are out of every text.
    """

    results: tuple[CheckResult, ...]
    seconds: float
    node_rank: int = 0
    is_strict: bool = False
    is_interrupted: bool = False

    @property
    def counts(self) -> Counter[Status]:
        """Number of results by verdict."""
        return Counter(result.status for result in self.results)

    @property
    def refusals(self) -> tuple[CheckResult, ...]:
        """The failures because of which a launch would be refused."""
        return tuple(result for result in self.results if result.refuses_launch)

    @property
    def exit_status(self) -> ExitStatus:
        """What the command ends with."""
        if self.is_interrupted:
            return ExitStatus.INTERRUPTED
        counts = self.counts
        is_bad = counts[Status.FAIL] or (self.is_strict and counts[Status.WARN])
        return ExitStatus.UNFIT if is_bad else ExitStatus.OK

    def checks_json(self) -> list[dict[str, Any]]:
        """The `checks` of the document vcli.doctor/1."""
        return [
            {
                "id": result.id,
                "group": result.check.group,
                "status": result.status.value,
                "title": result.check.title,
                "measured": result.measured,
                "expected": result.expected,
                "why": result.why,
                "remedy": result.remedy,
                "seconds": round(result.seconds, 4),
                "node_rank": self.node_rank,
            }
            for result in self.results
        ]

    def summary_json(self) -> dict[str, Any]:
        """The `summary` of the document vcli.doctor/1."""
        counts = self.counts
        return {
            **{status.value: counts[status] for status in Status},
            "launch_refused": bool(self.refusals),
            "strict": self.is_strict,
            "interrupted": self.is_interrupted,
            "seconds": round(self.seconds, 3),
        }


def make_report(
    results: Iterable[CheckResult],
    *,
    seconds: float,
    node_rank: int = 0,
    is_strict: bool = False,
    is_interrupted: bool = False,
) -> Report:
    """The report of these results, secrets removed."""
    clean = tuple(
        replace(
            result,
            measured=redact(result.measured),
            expected=redact(result.expected),
            remedy=redact(result.remedy),
            trace=redact(result.trace),
        )
        for result in results
    )
    return Report(
        results=clean,
        seconds=seconds,
        node_rank=node_rank,
        is_strict=is_strict,
        is_interrupted=is_interrupted,
    )


def list_json(checks: Iterable[Check]) -> list[dict[str, Any]]:
    """The `checks` of the document vcli.checks/1."""
    return [
        {
            "id": check.id,
            "group": check.group,
            "level": check.level.value,
            "title": check.title,
            "requires": list(check.requires),
        }
        for check in checks
    ]
