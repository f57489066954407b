"""One run of the doctor: facts, checks, report."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from vcli.cli.doctor_facts import DoctorRequest, make_context
from vcli.cli.environment import Environment
from vcli.cli.output import Output
from vcli.cli.views.report import ReportStyle, list_view, report_view
from vcli.diagnostics import (
    Check,
    CheckContext,
    CheckRegistry,
    Report,
    Status,
    list_json,
    make_report,
    run_checks,
)
from vcli.topology import ExitStatus, ParallelConfig, plan_to_json


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorSession:
    """One `vcli doctor`; `selected` are the checks that the report is about."""

    environment: Environment
    output: Output
    registry: CheckRegistry
    selected: tuple[Check, ...]
    skip_ids: tuple[str, ...] = ()
    is_strict: bool = False
    is_verbose: bool = False

    def run(self, request: DoctorRequest, parallel: ParallelConfig) -> int:
        """Run the checks and print the report; gives the exit status."""
        begin = time.monotonic()
        context = make_context(
            request, parallel, environ=self.environment.environ, cwd=self.environment.cwd
        )
        report = self.examine(context, begin=begin)
        self.show(report, context)
        return int(report.exit_status)

    def examine(self, context: CheckContext, *, begin: float) -> Report:
        """Run the selected checks and what they require.

        A requirement that was not selected is in the report only if something is wrong with it.
        """
        wanted = {check.id for check in self.selected}
        outcome = run_checks(
            self.registry.with_requirements(self.selected), context, skip_ids=self.skip_ids
        )
        return make_report(
            (
                result
                for result in outcome.results
                if result.id in wanted or result.status in (Status.FAIL, Status.UNKNOWN)
            ),
            seconds=time.monotonic() - begin,
            node_rank=context.plan.config.own_node_rank,
            is_strict=self.is_strict,
            is_interrupted=outcome.is_interrupted,
        )

    def show(self, report: Report, context: CheckContext) -> None:
        """Print the report as text or as the document vcli.doctor/1."""
        if self.output.json_mode:
            plan = plan_to_json(context.plan)
            plan.pop("schema")
            content = {
                "checks": report.checks_json(),
                "summary": report.summary_json(),
                "plan": plan,
                "host": context.host.to_json(),
            }
            self.output.document("vcli.doctor/1", content, report.exit_status)
            return
        stdout = self.environment.stdout
        style = ReportStyle(
            width=self.output.width,
            has_color=self.environment.has_color(stdout),
            has_marks=_can_show_marks(stdout.encoding),
            is_verbose=self.is_verbose,
        )
        self.output.result(report_view(report, context, style))


def show_list(output: Output, checks: Sequence[Check]) -> int:
    """Print the checks, run none."""
    if output.json_mode:
        output.document("vcli.checks/1", {"checks": list_json(checks)})
    else:
        output.result(list_view(checks))
    return int(ExitStatus.OK)


def _can_show_marks(encoding: str | None) -> bool:
    try:
        "✓✗→".encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
