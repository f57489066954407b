"""`vcli doctor --instance`: what a running instance does, and what dead ones left behind."""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vcli.cli.doctor_instance_facts import Leftovers, examine, parents_of, read_pages
from vcli.cli.environment import Environment
from vcli.cli.output import Output
from vcli.cli.views.instance import instance_json, instance_view, leftover_lines, leftovers_json
from vcli.cli.views.report import ReportStyle, can_show_marks
from vcli.diagnostics.checks.leftovers import find_leftover_shm
from vcli.diagnostics.files import HostFiles
from vcli.diagnostics.instances import (
    Instance,
    VcliProcess,
    find_memfd_holders,
    find_processes,
    group_instances,
)
from vcli.diagnostics.redact import redact, redact_values
from vcli.topology import ConfigError, ExitStatus, UnfitError

LATEST = "latest"


#: Flags that make sense for the checks only.
_OTHERS = ("checks", "fix", "save_facts", "save_baseline", "baseline", "bundle", "html", "deep",
           "watch", "list_checks", "skip", "strict")  # fmt: skip


def refuse_with_instance(params: Mapping[str, object]) -> None:
    """Refuse what says something about checks, which are not run.

    Raises:
        ConfigError: the first flag of that kind.
    """
    for name in _OTHERS:
        if params.get(name):
            flag = "a check's name" if name == "checks" else f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"--instance runs no checks, so it does not go with {flag}",
                hint="vcli doctor --instance latest, and vcli doctor by itself",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceSession:
    """One look at an instance."""

    environment: Environment
    output: Output
    is_verbose: bool
    files: HostFiles = field(default_factory=HostFiles)

    def run(self, typed: str) -> int:
        """Show the instance that `typed` names: a pid of any of its processes, or `latest`.

        Exit status 1 where something is wrong with it.

        Raises:
            ConfigError: no such process, or it is none of vcli.
            UnfitError: nothing runs, or it is another user's.
        """
        begin = time.monotonic()
        processes = find_processes(self.files)
        pages = read_pages(processes)
        instances, orphans = group_instances(processes, self.files, parents_of(pages))
        leftovers = self._leftovers(processes, instances, orphans)
        instance = self._choose(typed, instances, leftovers)
        self._refuse_foreign(instance)
        report = examine(self.files, instance, pages)
        status = ExitStatus.UNFIT if report.problems else ExitStatus.OK
        seconds = time.monotonic() - begin
        if self.output.json_mode:
            content = {**instance_json(report), "leftovers": leftovers_json(leftovers)}
            clean = redact_values(content)
            self.output.document("vcli.instance/1", clean, status)
        else:
            text = instance_view(report, leftovers, self._style(), seconds=seconds)
            others = [other.owner.pid for other in instances if other is not instance]
            if others:
                text += f"\nother instances: {', '.join(map(str, others))}"
            self.output.result(redact(f"{text}\n\n{_closing_line(len(report.problems), status)}"))
        return int(status)

    def _leftovers(
        self,
        processes: Sequence[VcliProcess],
        instances: Sequence[Instance],
        orphans: tuple[VcliProcess, ...],
    ) -> Leftovers:
        # The owner of an instance may be any program, and its own helpers inherit descriptors.
        known = {p.pid for p in processes} | {i.owner.pid for i in instances} | {os.getpid()}
        return Leftovers(
            orphans=orphans,
            shm_files=find_leftover_shm(self.files),
            memfd_holders=find_memfd_holders(self.files, tuple(known)),
        )

    def _choose(self, typed: str, instances: Sequence[Instance], leftovers: Leftovers) -> Instance:
        if typed.lower() == LATEST:
            if instances:
                return instances[-1]
            for line in leftover_lines(leftovers):
                self.output.note(line)
            raise UnfitError(
                "no instance of vcli runs on this machine, as far as this user and this "
                "container can see",
                hint="vcli serve starts one; vcli doctor checks the machine",
            )
        if not typed.isascii() or not typed.isdigit() or not 0 < int(typed) < 1 << 31:
            raise ConfigError(
                f"--instance {typed!r} is neither a pid nor {LATEST!r}", hint=_hint(instances)
            )
        pid = int(typed)
        for instance in instances:
            if pid in (process.pid for process in instance.everybody):
                return instance
        if pid in (process.pid for process in leftovers.orphans):
            raise ConfigError(
                f"pid {pid} is left over from an instance that is gone", hint=f"kill {pid}"
            )
        if not self.files.exists(f"/proc/{pid}"):
            raise ConfigError(f"there is no process {pid}", hint=_hint(instances))
        raise ConfigError(f"pid {pid} belongs to no instance of vcli", hint=_hint(instances))

    def _refuse_foreign(self, instance: Instance) -> None:
        hidden = [process for process in instance.everybody if process.memfds is None]
        if not hidden:
            return
        user, pid = hidden[0].user, instance.owner.pid
        pids = ", ".join(str(process.pid) for process in instance.everybody)
        raise UnfitError(
            f"instance {pid} (pids {pids}) runs as user {user}, and the kernel shows its memory "
            "and takes signals only from that user or root",
            hint=f"sudo -u {user} vcli doctor --instance {pid}",
        )

    def _style(self) -> ReportStyle:
        stdout = self.environment.stdout
        return ReportStyle(
            width=self.output.width,
            has_color=self.environment.has_color(stdout),
            has_marks=can_show_marks(stdout.encoding),
            is_verbose=self.is_verbose,
        )


def _hint(instances: Sequence[Instance]) -> str:
    pids = [str(instance.owner.pid) for instance in instances]
    return f"running: {', '.join(pids)}" if pids else "none runs here; vcli serve starts one"


def _closing_line(num_problems: int, status: ExitStatus) -> str:
    text = f"{num_problems or 'no'} problem{'' if num_problems == 1 else 's'} found."
    return f"{text}   exit {int(status)}"
