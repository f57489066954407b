"""Is this machine fit: facts about the host, and checks that judge them."""

from vcli.diagnostics.check import (
    Check,
    CheckResult,
    Finding,
    Level,
    Remedy,
    Status,
    check,
    failed,
    passed,
    skipped,
    unknown,
    warned,
)
from vcli.diagnostics.checks import builtin_checks
from vcli.diagnostics.context import CheckContext, ModelInput, PortUse
from vcli.diagnostics.dialect import Dialect, detect_dialect
from vcli.diagnostics.host import collect_host_facts, has_nvidia_gpu, usable_cpus
from vcli.diagnostics.registry import CheckRegistry
from vcli.diagnostics.report import Report, list_json, make_report
from vcli.diagnostics.runner import RunOutcome, run_checks

__all__ = [
    "Check",
    "CheckContext",
    "CheckRegistry",
    "CheckResult",
    "Dialect",
    "Finding",
    "Level",
    "ModelInput",
    "PortUse",
    "Remedy",
    "Report",
    "RunOutcome",
    "Status",
    "builtin_checks",
    "check",
    "collect_host_facts",
    "detect_dialect",
    "failed",
    "has_nvidia_gpu",
    "list_json",
    "make_report",
    "passed",
    "run_checks",
    "skipped",
    "unknown",
    "usable_cpus",
    "warned",
]
