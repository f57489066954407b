"""What a check is, and what it says: a verdict with its measurement and what mends it.

A check is one function `(CheckContext) -> Finding`, made a `Check` by the decorator `check`.
Whoever runs it turns the finding into a `CheckResult`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from vcli.diagnostics.dialect import Dialect

if TYPE_CHECKING:
    from vcli.diagnostics.context import CheckContext


class Status(StrEnum):
    """The five verdicts; `unknown` counts neither as pass nor as fail."""

    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"
    UNKNOWN = "unknown"


class Level(StrEnum):
    """What a check needs: L0 files and sockets of this host, L1 NVML, model headers or children.

    L3 starts children that use torch or CUDA, where there are GPUs: not with `--fast`.
    """

    L0 = "L0"
    L1 = "L1"
    L3 = "L3"


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """What to type, by where vcli runs; `bare_metal` is used where a dialect has no own text.

    `{name}` stands for a value of the finding.
    """

    bare_metal: str
    docker: str = ""
    kubernetes: str = ""
    slurm: str = ""

    def template(self, dialect: Dialect) -> str:
        """The text for this dialect, with its placeholders."""
        own = {
            Dialect.BARE_METAL: self.bare_metal,
            Dialect.DOCKER: self.docker,
            Dialect.KUBERNETES: self.kubernetes or self.docker,
            Dialect.SLURM: self.slurm,
        }[dialect]
        return own or self.bare_metal

    def fill(self, dialect: Dialect, values: Mapping[str, object]) -> str:
        """The text for this dialect with the values of a finding."""
        return self.template(dialect).format_map(values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a check function gives; empty texts are filled from its `Check`.

    `is_typed`: the cause is what the user typed, so a refused start is a usage error.
    `blocks_launch`: whether a failure keeps `serve` from starting, where the check is a preflight.
    """

    status: Status
    measured: str
    expected: str = ""
    why: str = ""
    remedy: Remedy | str = ""
    values: Mapping[str, object] = field(default_factory=dict)
    is_typed: bool = False
    blocks_launch: bool = True


def passed(measured: str) -> Finding:
    """All is well; `measured` is what was seen."""
    return Finding(status=Status.PASS, measured=measured)


def skipped(reason: str) -> Finding:
    """The check does not apply here."""
    return Finding(status=Status.SKIP, measured=reason)


def unknown(reason: str, *, remedy: Remedy | str = "") -> Finding:
    """It could not be measured; `remedy` is what would let it be."""
    return Finding(status=Status.UNKNOWN, measured=reason, remedy=remedy)


def warned(
    measured: str,
    *,
    expected: str = "",
    why: str = "",
    remedy: Remedy | str = "",
    values: Mapping[str, object] | None = None,
) -> Finding:
    """It works, and a person should know."""
    return Finding(
        status=Status.WARN,
        measured=measured,
        expected=expected,
        why=why,
        remedy=remedy,
        values=values or {},
    )


def failed(
    measured: str,
    *,
    expected: str = "",
    why: str = "",
    remedy: Remedy | str = "",
    values: Mapping[str, object] | None = None,
    is_typed: bool = False,
    blocks_launch: bool = True,
) -> Finding:
    """It does not work."""
    return Finding(
        status=Status.FAIL,
        measured=measured,
        expected=expected,
        why=why,
        remedy=remedy,
        values=values or {},
        is_typed=is_typed,
        blocks_launch=blocks_launch,
    )


CheckFunction = Callable[["CheckContext"], Finding]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One row of the catalogue.

    `requires` are ids that must pass or warn first. `is_preflight`: fast enough for every start,
    and a failure refuses it. `is_headline`: its measurement stands in the line of a green group.
    """

    id: str
    title: str
    level: Level
    why: str
    expected: str
    remedy: Remedy
    run: CheckFunction
    explanation: str
    requires: tuple[str, ...] = ()
    deadline_s: float = 2.0
    is_preflight: bool = False
    is_headline: bool = False

    @property
    def group(self) -> str:
        """The lower-case prefix of the id."""
        return self.id.split("-", 1)[0].lower()


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """What the report says about one check; `trace` is the traceback of a check that crashed."""

    check: Check
    status: Status
    measured: str
    expected: str = ""
    why: str = ""
    remedy: str = ""
    seconds: float = 0.0
    trace: str = ""
    is_typed: bool = False
    blocks_launch: bool = False

    @property
    def id(self) -> str:
        """The check's id."""
        return self.check.id

    @property
    def refuses_launch(self) -> bool:
        """Whether `serve` would not start because of this."""
        return self.status is Status.FAIL and self.check.is_preflight and self.blocks_launch


def check(
    id_: str,
    title: str,
    *,
    level: Level = Level.L0,
    why: str,
    expected: str,
    remedy: Remedy,
    requires: tuple[str, ...] = (),
    deadline_s: float = 2.0,
    is_preflight: bool = False,
    is_headline: bool = False,
) -> Callable[[CheckFunction], Check]:
    """Make a function the check `id_`; its docstring is the explanation on the check's page."""

    def make(function: CheckFunction) -> Check:
        return Check(
            id=id_,
            title=title,
            level=level,
            why=why,
            expected=expected,
            remedy=remedy,
            run=function,
            explanation=function.__doc__ or "",
            requires=requires,
            deadline_s=deadline_s,
            is_preflight=is_preflight,
            is_headline=is_headline,
        )

    return make


def result_of(
    check_: Check, finding: Finding, *, dialect: Dialect, seconds: float, trace: str = ""
) -> CheckResult:
    """The result that a finding makes, with the check's own texts where it has none."""
    is_problem = finding.status in (Status.WARN, Status.FAIL)
    remedy = finding.remedy or (check_.remedy if is_problem else "")
    if isinstance(remedy, Remedy):
        remedy = remedy.fill(dialect, finding.values)
    return CheckResult(
        check=check_,
        status=finding.status,
        measured=finding.measured,
        expected=finding.expected or check_.expected,
        why=finding.why or (check_.why if is_problem else ""),
        remedy=remedy,
        seconds=seconds,
        trace=trace,
        is_typed=finding.is_typed,
        blocks_launch=finding.blocks_launch,
    )
