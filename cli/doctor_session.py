"""One run of the doctor: facts, checks, report."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from vcli.cli.doctor_facts import DoctorRequest, make_context
from vcli.cli.doctor_page import PageFile
from vcli.cli.doctor_watch import DoctorWatch, Round
from vcli.cli.environment import Environment
from vcli.cli.gpu_checks import request_of, with_trials
from vcli.cli.output import Output
from vcli.cli.topo_facts import save_facts
from vcli.cli.views.report import (
    ReportStyle,
    can_show_marks,
    changes_view,
    closing_line,
    headline,
    list_view,
    report_view,
)
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
from vcli.diagnostics.baseline import baseline_json, changes_since
from vcli.diagnostics.checks.trials import BASE
from vcli.diagnostics.redact import redact, redact_values
from vcli.diagnostics.repairs import repair
from vcli.diagnostics.text import plural
from vcli.topology import ConfigError, ExitStatus, ParallelConfig, VcliError, plan_to_json

BUNDLE_SUFFIXES: Final = (".tgz", ".tar.gz")


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorFiles:
    """Files to write or to compare with, as typed; None for those that were not asked for."""

    save_facts: str | None = None
    save_baseline: str | None = None
    baseline: str | None = None
    bundle: str | None = None
    html: str | None = None


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
    files: DoctorFiles = DoctorFiles()
    does_fix: bool = False
    is_deep: bool = False

    def run(self, request: DoctorRequest, parallel: ParallelConfig) -> int:
        """Run the checks, print the report and write what was asked for; gives the exit status."""
        begin = time.monotonic()
        kept = self._read_baseline()
        page = self._page_file()
        context = self._make_context(request, parallel)
        if self.does_fix:
            for line in repair(context) or ("nothing to repair",):
                self.output.note(f"fix: {redact(line)}")
        self._announce_trial(context)
        report = self.examine(context, begin=begin)
        changes = changes_since(kept, report, context.host) if kept is not None else None
        notes: list[str] = []
        problem = None
        try:
            notes += self._write_files(report, context, changes)
            if page is not None:
                self._write_page(page, report, context, changes)
                notes.append(f"{page.path} holds the report, secrets removed")
        except VcliError as error:
            problem = error
        self.show(report, context, changes, problem)
        for note in notes:
            self.output.note(note)
        if problem is None:
            return int(report.exit_status)
        self.output.note_error(problem)
        return int(problem.exit_status)

    def watch(self, request: DoctorRequest, parallel: ParallelConfig, *, interval_s: float) -> int:
        """The same again and again until ^C.

        Raises:
            ConfigError: with files that are for one run.
        """
        files = self.files
        if self.does_fix or files.save_facts or files.save_baseline or files.bundle:
            raise ConfigError(
                "--watch goes with none of --fix, --bundle, --save-baseline, --save-facts",
                hint="run vcli doctor once for them",
            )
        page = self._page_file()
        kept = self._read_baseline()

        def examine_once() -> Round:
            begin = time.monotonic()
            context = self._make_context(request, parallel)
            report = self.examine(context, begin=begin)
            changes = changes_since(kept, report, context.host) if kept is not None else None
            if page is not None:
                self._write_page(page, report, context, changes)
            text = self._text(report, context, changes)
            document = _document(report, context, changes)
            return Round(report=report, context=context, text=text, document=document)

        watch = DoctorWatch(environment=self.environment, output=self.output, interval_s=interval_s)
        return watch.run(examine_once)

    def _make_context(self, request: DoctorRequest, parallel: ParallelConfig) -> CheckContext:
        context = make_context(
            request, parallel, environ=self.environment.environ, cwd=self.environment.cwd
        )
        return with_trials(replace(context, is_deep=self.is_deep))

    def _announce_trial(self, context: CheckContext) -> None:
        wanted = {check.id for check in self.registry.with_requirements(self.selected)}
        num_devices = len(request_of(context).devices)
        if BASE in wanted.difference(self.skip_ids) and num_devices:
            what = "GPU" if context.is_cuda else "CPU rank"
            self.output.note(f"trying {plural(num_devices, what)}, up to a minute; --fast does not")

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

    def show(
        self,
        report: Report,
        context: CheckContext,
        changes: Sequence[Mapping[str, str]] | None,
        problem: VcliError | None = None,
    ) -> None:
        """Print the report as text or as the document vcli.doctor/1.

        problem: why a file could not be written; the document's `error` and `exit_code` tell it.
        """
        if self.output.json_mode:
            content, status = _document(report, context, changes), report.exit_status
            if problem is not None:
                content["error"], status = problem.message, problem.exit_status
            self.output.document("vcli.doctor/1", content, status)
            return
        self.output.result(self._text(report, context, changes))

    def _text(
        self, report: Report, context: CheckContext, changes: Sequence[Mapping[str, str]] | None
    ) -> str:
        stdout = self.environment.stdout
        style = ReportStyle(
            width=self.output.width,
            has_color=self.environment.has_color(stdout),
            has_marks=can_show_marks(stdout.encoding),
            is_verbose=self.is_verbose,
            is_terminal=stdout.isatty(),
        )
        text = report_view(report, context, style)
        return text if changes is None else f"{text}\n{redact(changes_view(changes))}"

    def _page_file(self) -> PageFile | None:
        """Where the page goes; all files are looked at before anything is run.

        Raises:
            ConfigError, UnfitError: one of them can't be written.
        """
        files, cwd = self.files, self.environment.cwd
        for typed, usual in (
            (files.save_facts, "--save-facts facts.json"),
            (files.save_baseline, "--save-baseline baseline.json"),
            (files.bundle, "--bundle vcli.tgz"),
        ):
            if typed is not None:
                PageFile.at(typed, cwd, usual)
        if files.bundle is not None and not files.bundle.endswith(BUNDLE_SUFFIXES):
            raise ConfigError(
                f"--bundle {files.bundle}: a bundle is a {' or '.join(BUNDLE_SUFFIXES)}",
                hint=f"--bundle {Path(files.bundle).with_suffix('.tgz')}",
            )
        return None if files.html is None else PageFile.at(files.html, cwd)

    def _write_page(
        self,
        page: PageFile,
        report: Report,
        context: CheckContext,
        changes: Sequence[Mapping[str, str]] | None,
    ) -> None:
        from vcli.cli.views.report_page import report_page

        page.write(
            report_page(
                _document(report, context, changes),
                headline=redact(headline(report, context)),
                closing=closing_line(report),
                made_at=time.strftime("%Y-%m-%d %H:%M:%S %z"),
            )
        )

    def _read_baseline(self) -> Mapping[str, Any] | None:
        if self.files.baseline is None:
            return None
        path = Path(self.environment.cwd, self.files.baseline)
        hint = "vcli doctor --save-baseline FILE"
        try:
            document = json.loads(path.read_text())
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}", hint=hint) from error
        except ValueError as error:
            raise ConfigError(f"{path} is no valid JSON: {error}", hint=hint) from error
        if not isinstance(document, dict):
            raise ConfigError(f"{path} holds no baseline", hint=hint)
        return document

    def _write_files(
        self, report: Report, context: CheckContext, changes: Sequence[Mapping[str, str]] | None
    ) -> tuple[str, ...]:
        """Write them; what to say about them."""
        files, cwd = self.files, self.environment.cwd
        if files.save_facts:
            save_facts(Path(cwd, files.save_facts), context.host)
        if files.save_baseline:
            path = Path(cwd, files.save_baseline)
            try:
                path.write_text(json.dumps(baseline_json(report, context.host), indent=2) + "\n")
            except OSError as error:
                raise ConfigError(
                    f"{path} cannot be written: {error.strerror}", hint="name another file"
                ) from error
        if files.bundle:
            from vcli.diagnostics.bundle import bundle_texts, write_bundle

            text = report_view(report, context, ReportStyle(width=100, is_verbose=True))
            texts = bundle_texts(context, _document(report, context, changes), text)
            write_bundle(Path(cwd, files.bundle), texts)
            return (f"{files.bundle} holds, secrets removed: {', '.join(texts)}",)
        return ()


def _document(
    report: Report, context: CheckContext, changes: Sequence[Mapping[str, str]] | None
) -> dict[str, Any]:
    plan = plan_to_json(context.plan)
    plan.pop("schema")
    content = {
        "checks": report.checks_json(),
        "summary": report.summary_json(),
        "plan": plan,
        "host": context.host.to_json(),
    }
    if changes is not None:
        content["changes"] = list(changes)
    clean: dict[str, Any] = redact_values(content)
    return clean


def show_list(output: Output, checks: Sequence[Check]) -> int:
    """Print the checks, run none."""
    if output.json_mode:
        output.document("vcli.checks/1", {"checks": list_json(checks)})
    else:
        output.result(list_view(checks))
    return int(ExitStatus.OK)
