"""One made-up machine and the verdict that a check must give on it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.support.fake_host import HEALTHY_HOST, make_context, run
from vcli.cli.runtime_checks import registry
from vcli.diagnostics import CheckResult, Status
from vcli.diagnostics.redact import redact

CHECKS = {check.id: check for check in registry().checks}


@dataclass(frozen=True, kw_only=True)
class Case:
    """`says` must stand in the measurement, `remedy` in the remedy.

    `host` replaces facts of the healthy host; `more` goes to `make_context`; `prepare` gives
    further arguments for it from the folder of the test.
    """

    id: str
    status: Status
    says: str = ""
    remedy: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    host: Mapping[str, Any] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)
    prepare: Callable[[Path], Mapping[str, Any]] | None = None

    def __str__(self) -> str:
        return f"{self.id}-{self.status}-{self.says[:24]}"


def check_case(case: Case, folder: Path) -> CheckResult:
    """Run the check of the case and hold it against what the case says."""
    prepared = dict(case.prepare(folder)) if case.prepare else {}
    result = run(
        CHECKS[case.id],
        make_context(
            folder / "root",
            files=case.files,
            host=replace(HEALTHY_HOST, **case.host),
            config=case.config,
            environ={"HOME": "/home/me", **case.environ},
            **{**case.more, **prepared},
        ),
    )
    assert result.status is case.status, result
    assert case.says in result.measured, result
    assert case.remedy in result.remedy, result
    assert redact(result.remedy) == result.remedy, "the report would take out part of it"
    if result.status in (Status.WARN, Status.FAIL):
        assert result.remedy, result
        assert result.why, result
        assert "{" not in result.remedy.replace("{{", "").replace("[{", ""), result
    return result
