"""First code of every child: `python -m vcli.runtime.process.entry CONTROL_FD LIFELINE_FD`.

The lifeline is armed before anything else is imported. Then the child learns from one frame what
it shall be, sets its environment, threads, CPUs, signals, log and title, and only then imports
its target, which may import torch. The parent's environment is never changed.
"""

import os
import sys

from vcli.runtime.process.lifeline import Lifeline

if __name__ == "__main__":
    # Armed here and not in main(): the imports below take a tenth of a second on a busy machine.
    _LIFELINE = Lifeline(int(sys.argv[2]))

import faulthandler
import importlib
import logging
import pickle
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
from setproctitle import setproctitle

from vcli.runtime.log import configure_logging
from vcli.runtime.process.child import ChildContext, StartFrame
from vcli.runtime.process.control import receive_frame
from vcli.runtime.process.environ import bootstrap_environ, restore_environ, worker_environ
from vcli.topology.errors import ExitStatus
from vcli.topology.names import TITLE_PREFIX

MODULE = "vcli.runtime.process.entry"


def start_command(control_fd: int, lifeline_fd: int) -> list[str]:
    """The command line of a child, for its parent.

    -P: the working directory may hold a `queue.py`, or our own folders under their bare names.
    """
    return [sys.executable, "-P", "-m", MODULE, str(control_fd), str(lifeline_fd)]


def start_environ() -> dict[str, str]:
    """The environment to start a child with, for its parent: its own, and its import path."""
    try:
        folder = Path.cwd()
    except FileNotFoundError:
        folder = Path("/")  # the working directory was deleted: nothing can be imported from it
    return bootstrap_environ(os.environ, sys.path, folder)


def main(control_fd: int, lifeline: Lifeline) -> int:
    """Be the child that the first frame on `control_fd` describes; gives the exit code."""
    # First: a ^C in the terminal is for the parent, which then tells its children what to do.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.set_inheritable(control_fd, False)
    control = socket.socket(fileno=control_fd)
    frame = receive_frame(control)
    if frame is None:
        return int(ExitStatus.BUG)
    start = msgspec.msgpack.decode(frame, type=StartFrame)
    context = ChildContext(start, control, lifeline)
    try:
        _set_up(start)
        context.report_state("spawned")
        function = _load_target(start.target)
        context.report_state("imported")
        function(context, *_load_arguments(start.arguments))
    except SystemExit as exit_request:
        return _exit_code_of(exit_request)
    except BaseException as error:  # noqa: BLE001 - border: whatever ends a child is told
        return context.fail_with(error).exit_status
    return int(ExitStatus.OK)


def _set_up(start: StartFrame) -> None:
    # Before the environment changes: it finds the place of the title next to the original one.
    setproctitle(f"{TITLE_PREFIX}{start.title}")
    environ = worker_environ(
        restore_environ(os.environ),
        additions=start.environ,
        omp_num_threads=start.omp_num_threads,
    )
    for name in os.environ.keys() - environ.keys():
        del os.environ[name]
    os.environ.update(environ)
    for descriptor in start.pass_fds:
        os.set_inheritable(descriptor, False)
    if start.cpu_affinity:
        os.sched_setaffinity(0, start.cpu_affinity)
    # A line that waits in a buffer is lost with a process that is killed.
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(line_buffering=True)
    faulthandler.enable()
    signal.signal(signal.SIGTERM, _end_once)
    configure_logging(start.title, start.log_level)


def _end_once(signum: int, frame: FrameType | None) -> None:
    # A second SIGTERM must not interrupt the clean-up that the first one began.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(128 + signum)


def _load_target(target: str) -> Callable[..., None]:
    module_name, _, function_name = target.partition(":")
    function: Callable[..., None] = getattr(importlib.import_module(module_name), function_name)
    return function


def _load_arguments(pickled: bytes) -> tuple[Any, ...]:
    # From our own parent over an inherited socket pair that no one else can write to.
    arguments: tuple[Any, ...] = pickle.loads(pickled)  # noqa: S301
    return arguments


def _exit_code_of(exit_request: SystemExit) -> int:
    code = exit_request.code
    if code is None:
        return int(ExitStatus.OK)
    return code if isinstance(code, int) else int(ExitStatus.BUG)


def _end(exit_code: int) -> None:
    """End the process without the interpreter's own clean-up.

    After a failure, threads and exit handlers of native libraries may wait for peers for ever.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


if __name__ == "__main__":
    _end(main(int(sys.argv[1]), _LIFELINE))
