"""First code of every child: `python -m vcli.runtime.process.entry CONTROL_FD LIFELINE_FD`.

The lifeline is armed before anything else is imported. Then the child learns from one frame what
it shall be, sets its environment, threads, CPUs, log and title, and only then imports its target,
which may import torch. The parent's environment is never changed.

A copy of the fork server comes in by `be_forked_child` and goes the same way; what it did not
inherit from the process that wants it stands in the frame (`Surroundings`).
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
import resource
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import msgspec
from setproctitle import setproctitle

from vcli.runtime.log import configure_logging
from vcli.runtime.process.child import ChildContext, StartFrame, Surroundings
from vcli.runtime.process.control import receive_frame
from vcli.runtime.process.environ import (
    OMP_NUM_THREADS,
    PREFERS_CUBLASLT,
    bootstrap_environ,
    first_number,
    restore_environ,
    variables_in,
    worker_environ,
)
from vcli.runtime.process.numa import bind_to_node
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
    return bootstrap_environ(os.environ, sys.path, _folder())


def surroundings() -> Surroundings:
    """What a copy of the fork server needs to stand where a child of this process would."""
    folder = _folder()
    return Surroundings(
        environ=dict(os.environ),
        search_path=[str(folder / entry) for entry in sys.path],
        folder=str(folder),
        affinity=tuple(os.sched_getaffinity(0)),
        max_open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    )


def _folder() -> Path:
    try:
        return Path.cwd()
    except FileNotFoundError:
        return Path("/")  # the working directory was deleted: nothing can be imported from it


def unset_hint(error: BaseException) -> str:
    """How to be rid of the variables of this process that `error` names; empty for none.

    Empty too where something is missing: such a message names the variables that are to have it.
    """
    if isinstance(error, (ImportError, OSError, MemoryError)):
        return ""
    names = variables_in(str(error), os.environ)
    return f"unset {' '.join(names)}" if names else ""


def set_up_fork_server() -> None:
    """Make the environment of this process one to import and fork in.

    A BLAS library starts its threads when it is loaded, and a fork wants a single thread.
    """
    environ = restore_environ(os.environ)
    environ["OPENBLAS_NUM_THREADS"] = "1"
    # Torch reads it when it is imported: here, for all children.
    environ.setdefault(PREFERS_CUBLASLT, "1")
    _replace_environ(environ)
    # It holds descriptors of all children that are being started; they get their parent's limit.
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))


def be_forked_child(control_fd: int, lifeline_fd: int) -> NoReturn:
    """Be a child, as a copy of the fork server; does not return."""
    lifeline = Lifeline(lifeline_fd)
    sys.argv[1:] = [str(control_fd), str(lifeline_fd)]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()  # or all copies draw the same numbers; `random` sees to it by itself
    _end(main(control_fd, lifeline))


def main(control_fd: int, lifeline: Lifeline) -> int:
    """Be the child that the first frame on `control_fd` describes; gives the exit code."""
    os.set_inheritable(control_fd, False)
    control = socket.socket(fileno=control_fd)
    frame = receive_frame(control)
    if frame is None:
        return int(ExitStatus.BUG)
    start = msgspec.msgpack.decode(frame, type=StartFrame)
    context = ChildContext(start, control, lifeline)
    lifeline.on_signal(context.tell_signal)
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
    base = restore_environ(os.environ)
    if start.surroundings is not None:
        base = _take_place(start.surroundings)
    _replace_environ(
        worker_environ(base, additions=start.environ, omp_num_threads=start.omp_num_threads)
    )
    for descriptor in start.pass_fds:
        os.set_inheritable(descriptor, False)
    # A line that waits in a buffer is lost with a process that is killed.
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(line_buffering=True)
    faulthandler.enable()
    configure_logging(start.title, start.log_level)
    if start.cpu_affinity:
        os.sched_setaffinity(0, start.cpu_affinity)
    if start.numa_node is not None:
        bind_to_node(start.numa_node, has_affinity=start.cpu_affinity is not None)
    if start.surroundings is not None:
        _limit_threads()


def _take_place(surroundings: Surroundings) -> dict[str, str]:
    """Be where a child of the process that wants this one would be; gives the environment there."""
    sys.path[:] = surroundings.search_path
    importlib.invalidate_caches()
    os.chdir(surroundings.folder)
    os.sched_setaffinity(0, surroundings.affinity)
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (min(surroundings.max_open_files, hard_limit), hard_limit)
    )
    return surroundings.environ


def _replace_environ(environ: Mapping[str, str]) -> None:
    for name in os.environ.keys() - environ.keys():
        del os.environ[name]
    os.environ.update(environ)


def _limit_threads() -> None:
    """Tell torch what OMP_NUM_THREADS says: its runtime read it when the fork server loaded it."""
    torch = sys.modules.get("torch")
    num_threads = first_number(os.environ.get(OMP_NUM_THREADS, ""))
    if torch is not None and num_threads is not None:
        torch.set_num_threads(num_threads)


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


def _end(exit_code: int) -> NoReturn:
    """End the process without the interpreter's own clean-up.

    After a failure, threads and exit handlers of native libraries may wait for peers for ever.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


if __name__ == "__main__":
    _end(main(int(sys.argv[1]), _LIFELINE))
