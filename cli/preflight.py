"""The fast checks before a start: it is refused only for what would make it fail anyway."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from vcli.cli.doctor_facts import observe_host, ports_of
from vcli.cli.runtime_checks import registry
from vcli.diagnostics import (
    CheckContext,
    CheckRegistry,
    CheckResult,
    Status,
    detect_dialect,
    make_report,
    run_checks,
)
from vcli.diagnostics.limits import open_files_needed, raise_open_files
from vcli.topology import ConfigError, HostFacts, ProcessFacts, TopologyPlan, UnfitError

_SKIP_HINT = "--no-preflight starts in spite of it"


def run_preflight(
    plan: TopologyPlan,
    host: HostFacts,
    *,
    environ: Mapping[str, str],
    note: Callable[[str], None],
    process: ProcessFacts | None = None,
) -> None:
    """Check this host for the plan, and raise the soft limit of open files to its need.

    Takes a few hundredths of a second on one node. HTTP's port is not looked at: the caller has
    bound it already. `note` gets a line for each warning. GPUs that `host` lacks are looked for,
    and network cards where there are several nodes.

    Raises:
        ConfigError: what was typed cannot work here (a port that is taken, an address of others).
        UnfitError: the machine cannot do it; the message names every failed check.
    """
    if plan.device_type == "cuda" and not host.gpus:
        host, _ = observe_host(environ)
    if plan.config.nnodes > 1 and not host.nics:
        from vcli.diagnostics.network import collect_nics

        host = replace(host, nics=collect_nics())
    context = CheckContext(
        plan=plan,
        host=host,
        environ=environ,
        process=process or ProcessFacts(platform=host.platform, is_wsl=host.is_wsl),
        dialect=detect_dialect(environ),
        ports=ports_of(plan, port=None, address="", with_http=False),
    )
    judge(registry(), context, note=note)
    raised = raise_open_files(open_files_needed(len(context.local_ranks)))
    if raised:
        note(raised)


def judge(
    checks: CheckRegistry, context: CheckContext, *, note: Callable[[str], None]
) -> tuple[CheckResult, ...]:
    """Run the preflight checks of the registry, pass warnings on, raise for failures.

    Raises:
        ConfigError: every failure is what the user typed.
        UnfitError: at least one is the machine's.
    """
    wanted = [check for check in checks.checks if check.is_preflight]
    outcome = run_checks(checks.with_requirements(wanted), context)
    if outcome.is_interrupted:
        raise KeyboardInterrupt
    report = make_report(outcome.results, seconds=0.0)
    for result in report.results:
        if result.status is Status.WARN and result.check.is_preflight:
            note(f"! {result.id} {result.measured}; {result.why}\n  → {result.remedy}")
    refusals = report.refusals
    if not refusals:
        return report.results
    message = "; ".join(f"{result.id} {result.measured}" for result in refusals)
    hint = refusals[0].remedy
    if all(result.is_typed for result in refusals):
        raise ConfigError(message, hint=hint)
    raise UnfitError(
        f"this machine is not fit for the launch: {message}",
        hint=f"{hint}   ({_SKIP_HINT}; all of it: vcli doctor)",
    )
