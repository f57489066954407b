"""Judges the classes that flags name before anything is started, in a short-lived process.

A user's module may do anything when it is imported: take a device, start threads, exit. It is not
to do that in the process that serves, and the engine is not to be started for a name that is wrong.
"""

import threading
from dataclasses import dataclass
from typing import Final

import msgspec

from vcli.runtime.errors import StartupError
from vcli.runtime.executor.backends import get_executor_class
from vcli.runtime.process.child import ChildContext, ChildSpec
from vcli.runtime.process.group import ChildGroup
from vcli.runtime.worker.extension import extended_class
from vcli.topology.errors import ConfigError, ExitStatus

_TITLE: Final = "CheckClasses"


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedCode:
    """Classes of a user's modules, as flags have them; None for what was left out."""

    executor: str | None = None
    worker_extension: str | None = None

    @property
    def flags(self) -> str:
        """What was typed."""
        typed = (
            ("--distributed-executor-backend", self.executor),
            ("--worker-extension-cls", self.worker_extension),
        )
        return ", ".join(f"{flag} {name}" for flag, name in typed if name is not None)


def judge_named_code(code: NamedCode, *, deadline_s: float) -> bool:
    """Import the classes elsewhere, as the engine would; whether the executor can overlap steps.

    Raises:
        ConfigError: one can't be imported or used, or its import ended the process.
        UnfitError: the system gives no process.
        StartupError: no answer within the deadline.
    """
    group = ChildGroup(on_message=_ignore, on_failure=_ignore)
    try:
        group.start(
            [
                ChildSpec(
                    target="vcli.runtime.executor.named_code:judge_main",
                    arguments=(code,),
                    title=_TITLE,
                    log_level="CRITICAL",
                )
            ]
        )
        (can_overlap,) = group.wait_ready(deadline_s)
    except StartupError as error:
        report = error.report
        if report.kind == "StartTimeout":  # a slow disk, or an import that hangs
            report = msgspec.structs.replace(
                report,
                message=f"{code.flags}: {report.message}",
                phase="importing",
                hint="import it with python -c to see what it waits for; a slow disk needs a "
                "longer --start-timeout",
            )
            raise StartupError(report) from None
        if report.exit_status == ExitStatus.USAGE:
            raise ConfigError(report.message, hint=report.hint) from None
        kind = f"{report.kind}: " if report.kind else ""
        raise ConfigError(
            f"{code.flags} can't be imported: {kind}{report.message}",
            hint=report.hint or "import it with python -c to see why",
        ) from None
    finally:
        group.shutdown(0.5, asked=False)
    return bool(can_overlap)


def judge_main(context: ChildContext, code: NamedCode) -> None:
    """The process that imports; what it raises is its answer."""
    can_overlap = True
    if code.executor is not None:
        can_overlap = get_executor_class(code.executor).can_overlap_steps
    if code.worker_extension is not None:
        extended_class(_AnyWorker, code.worker_extension)
    context.ready(can_overlap)
    threading.Event().wait()  # one that ends is one that failed


class _AnyWorker:
    """Stands for the worker, whose import is torch's: names that clash are found by the worker."""


def _ignore(message: object) -> None:
    del message
