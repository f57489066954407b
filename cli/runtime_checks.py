"""Checks that ask the runtime itself: it gives data, here they become verdicts."""

from vcli.cli import gpu_checks
from vcli.diagnostics import (
    CheckContext,
    CheckRegistry,
    Finding,
    Level,
    Remedy,
    builtin_checks,
    check,
    failed,
    passed,
    skipped,
    unknown,
)
from vcli.diagnostics.checks.fit import NO_MODEL
from vcli.diagnostics.text import listing, plural, size_text
from vcli.topology import ConfigError


@check(
    "PROC-05",
    "no orphan after a kill",
    level=Level.L1,
    why="workers that outlive their engine keep memory and devices",
    expected="both workers gone within 3 s",
    remedy=Remedy(
        bare_metal="kill {pids}; this is a bug in vcli: please report it with "
        "vcli doctor proc-05 -v --json",
    ),
    deadline_s=15.0,
)
def orphans(context: CheckContext) -> Finding:
    """Starts an engine with two workers, kills the engine with SIGKILL, and watches the workers.

    These are vcli's own process starter and lifelines, as `serve` uses them.
    """
    from vcli.runtime.errors import StartupError
    from vcli.runtime.process.orphan_probe import run_orphan_probe

    del context
    try:
        report = run_orphan_probe()
    except StartupError as error:
        return unknown(f"the children of the test did not start: {error.message}")
    if report.survivors:
        pids = " ".join(map(str, report.survivors))
        return failed(
            f"{len(report.survivors)} of {report.num_workers} workers lived on after "
            f"{report.seconds:.1f} s",
            values={"pids": pids},
        )
    return passed(
        f"{report.num_workers} workers gone {report.seconds * 1000:.0f} ms after the kill"
    )


@check(
    "FIT-03",
    "weight files are complete",
    level=Level.L1,
    why="a file that is cut short ends the start when it is half loaded",
    expected="every file of the index, each as long as its header says, none a git-lfs pointer",
    remedy=Remedy(bare_metal="{hint}"),
    requires=("FIT-01",),
    deadline_s=10.0,
    is_headline=True,
)
def complete_weights(context: CheckContext) -> Finding:
    """Reads the index and the header of every safetensors file; no weights.

    A failure lists every damaged or missing file.
    """
    from vcli.runtime.checkpoint.folder import check_weights, weight_files
    from vcli.runtime.checkpoint.safetensors_file import read_header

    folder = context.model.folder if context.model else None
    if folder is None:
        return skipped(NO_MODEL)
    try:
        files = weight_files(folder)
    except ConfigError as error:
        return failed(error.message, remedy=error.hint, is_typed=True)
    problems: list[ConfigError] = []
    for path in files:
        try:
            read_header(path)
        except ConfigError as error:
            problems.append(error)
    if problems:
        return failed(
            listing([error.message for error in problems], limit=8),
            remedy=problems[0].hint,
            is_typed=True,
        )
    try:
        entries = check_weights(folder)
    except ConfigError as error:
        return failed(error.message, remedy=error.hint, is_typed=True)
    total = sum(entry.end_bytes - entry.begin_bytes for entry in entries)
    return passed(f"{plural(len(files), 'weight file')}, {size_text(total)}")


@check(
    "FIT-07",
    "tokenizer",
    level=Level.L1,
    why="without it no text becomes tokens",
    expected="a tokenizer.json beside config.json",
    remedy=Remedy(bare_metal="{hint}"),
    requires=("FIT-01",),
)
def tokenizer(context: CheckContext) -> Finding:
    """Reads tokenizer.json as JSON, as the front end would at its start."""
    from vcli.runtime.checkpoint.folder import check_folder

    folder = context.model.folder if context.model else None
    if folder is None:
        return skipped(NO_MODEL)
    try:
        check_folder(folder)
    except ConfigError as error:
        if "tokenizer" not in error.message:
            return skipped("the folder has another fault, see FIT-03")
        return failed(error.message, remedy=error.hint, is_typed=True)
    return passed("tokenizer.json can be read")


def registry() -> CheckRegistry:
    """Every check of vcli: the built-in ones, and those about the runtime."""
    own = (orphans, complete_weights, tokenizer)
    return CheckRegistry((*builtin_checks(), *own, *gpu_checks.CHECKS))
