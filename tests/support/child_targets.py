"""What the children of the process tests do."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from tests.support.fake_worker import sleep_in_c, sleep_in_c_with_the_lock
from vcli.runtime.errors import FailureReport, StartupError
from vcli.runtime.process.child import ChildContext, ChildSpec
from vcli.runtime.process.group import ChildGroup
from vcli.topology.errors import ConfigError


def spec(function: str, *arguments: Any, title: str = "Child", **fields: Any) -> ChildSpec:
    """A child that runs a function of this file."""
    return ChildSpec(
        target=f"tests.support.child_targets:{function}",
        arguments=arguments,
        title=title,
        log_level="CRITICAL",
        **fields,
    )


def wait(context: ChildContext, payload: Any = None) -> None:
    """Ready, then wait to be ended."""
    context.ready(payload)
    time.sleep(60)


def tell_about_itself(context: ChildContext, names: list[str]) -> None:
    """Ready, with what the child sees of its environment."""
    context.ready(
        {
            "environ": {name: os.environ.get(name) for name in names},
            "affinity": sorted(os.sched_getaffinity(0)),
            "stdin": str(Path("/proc/self/fd/0").readlink()),
            "has_one_output": Path("/proc/self/fd/1").samefile("/proc/self/fd/2"),
            "group": os.getpgid(0),
            "parent_pid": context.parent_pid,
            "torch": "torch" in sys.modules,
            "title": Path("/proc/self/cmdline").read_bytes().rstrip(b"\0").decode(),
            "line_buffering": sys.stdout.line_buffering,
            "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        }
    )
    time.sleep(60)


def tell_binding(context: ChildContext) -> None:
    """Ready, with the CPUs and the memory policies of this thread and of one that starts later."""
    told: list[tuple[list[int], list[str]]] = []

    def note() -> None:
        lines = Path("/proc/thread-self/numa_maps").read_text().splitlines()
        told.append((sorted(os.sched_getaffinity(0)), sorted({line.split()[1] for line in lines})))

    note()
    later = threading.Thread(target=note)
    later.start()
    later.join()
    context.ready(told)
    time.sleep(60)


def fail_in(context: ChildContext, phase: str, delay_s: float, kind: str, message: str) -> None:
    """Raise an exception of a builtin type in a phase."""
    context.report_state(phase, 0.5)
    time.sleep(delay_s)
    kinds = {"ValueError": ValueError, "ConnectionResetError": ConnectionResetError}
    raise kinds.get(kind, ConfigError)(message)


def meet_in(folder: Path, name: str, count: int) -> None:
    """Return when `count` processes are here, each under its name."""
    (folder / name).touch()
    end_s = time.monotonic() + 20
    while len(list(folder.iterdir())) < count:
        if time.monotonic() > end_s:
            raise ValueError(f"{name} is alone with {[path.name for path in folder.iterdir()]}")
        time.sleep(0.005)


def ready_together(context: ChildContext, folder: str, count: int) -> None:
    """Ready when `count` processes are here."""
    meet_in(Path(folder), context.title, count)
    context.ready(context.title)
    time.sleep(60)


def fail_together(
    context: ChildContext, folder: str, count: int, delay_s: float, kind: str, message: str
) -> None:
    """Wait until `count` processes are here, however slow their start was; then fail."""
    context.report_state("groups", 0.5)
    meet_in(Path(folder), context.title, count)
    time.sleep(delay_s)
    raise {"ValueError": ValueError, "ConnectionResetError": ConnectionResetError}[kind](message)


def hang_in(context: ChildContext, phase: str) -> None:
    """Reach a phase and stay there."""
    context.report_state(phase, 0.4)
    time.sleep(60)


def kill_itself(context: ChildContext, after_ready: bool) -> None:
    """Be killed."""
    if after_ready:
        context.ready()
    else:
        context.report_state("weights", 0.1)
    os.kill(os.getpid(), signal.SIGKILL)


def fail_after_late_state(context: ChildContext) -> None:
    """Ready, then a state, then an error."""
    context.ready()
    context.report_state("warm-up")
    raise ValueError("late")


def return_unready(context: ChildContext) -> None:
    """End in order, too early."""


def fail_for_another(context: ChildContext) -> None:
    """Raise what a child of this child reported."""
    raise StartupError(
        FailureReport(
            process="Worker_TP3", phase="weights", kind="ValueError", message="cause", rank=3
        )
    )


def fail_when_file_exists(context: ChildContext, path: str, kind: str, delay_s: float) -> None:
    """Ready; when the file is there, raise."""
    context.ready()
    while not Path(path).exists():
        time.sleep(0.005)
    time.sleep(delay_s)
    raise {"ValueError": ValueError, "BrokenPipeError": BrokenPipeError}[kind]("ordered")


def write_raw(context: ChildContext, data: bytes, count: int) -> None:
    """Write bytes past the protocol to the control socket, which is argument 1 of the command."""
    context.ready()
    control = socket.socket(fileno=os.dup(int(sys.argv[1])))
    control.settimeout(30)
    for _ in range(count):
        control.sendall(data)
    time.sleep(60)


def ignore_everything(context: ChildContext) -> None:
    """Survive the end of the lifeline: all threads are stopped."""
    context.ready()
    os.kill(os.getpid(), signal.SIGSTOP)


def run_program(context: ChildContext, path: str) -> None:
    """Ready with the pid of a program; leave a note of how it ended."""
    program = subprocess.Popen(["sleep", "60"])
    context.ready(program.pid)
    status = program.wait()
    Path(path).with_suffix(".new").write_text(str(status))
    Path(path).with_suffix(".new").rename(path)
    time.sleep(60)


def sleep_in_libc(context: ChildContext, with_lock: bool, with_callback: bool) -> None:
    """Ready, then stuck in C code."""
    if with_callback:
        context.on_parent_death(lambda: time.sleep(60))
    context.ready()
    if with_lock:
        sleep_in_c_with_the_lock(60)
    sleep_in_c(60)


def note_parent_death(context: ChildContext, path: str) -> None:
    """Leave a note when the parent is gone."""
    context.on_parent_death(lambda: Path(path).write_text("parent gone"))
    context.ready()
    time.sleep(60)


def be_parent(context: ChildContext, specs: list[ChildSpec]) -> None:
    """Start children, ready with their pids, wait."""
    group = ChildGroup(context.forward, lambda report: None)
    group.start(specs)
    context.report_state("device", None, ",".join(str(pid) for pid in group.pids))
    group.wait_ready(30)
    context.ready(list(group.pids))
    time.sleep(60)
