"""The owner's side of the fork server: bring it up, answer for it, end it."""

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from typing import Final, Literal, NoReturn, Protocol, Self

from vcli.runtime.log import get_logger
from vcli.runtime.process.entry import start_environ
from vcli.runtime.process.failures import describe_exit
from vcli.runtime.process.fork_client import ForkServerClient, ForkServerStarter
from vcli.runtime.process.fork_protocol import Preloaded, link_pair
from vcli.runtime.process.fork_safety import fork_problem, release_libgomp
from vcli.runtime.process.fork_server import be_fork_server, server_command
from vcli.runtime.process.lifeline import stop_signals_held
from vcli.topology.errors import ExitStatus, UnfitError

logger = get_logger(__name__)

#: What every child of a deployment imports. transformers is not among it: no child uses it.
DEFAULT_PRELOAD: Final = (
    "torch",
    "vcli.runtime.core.core_proc",
    "vcli.runtime.executor.multiproc",
    "vcli.runtime.worker.worker_proc",
    "vcli.runtime.worker.worker",
)

#: The server has nothing to finish, it only has to be scheduled.
_LEAVE_S = 0.5
_KILL_S = 2.0

#: A killed process closes its files a moment before it can be reaped.
_REAP_S = 1.0


class _Process(Protocol):
    pid: int

    def poll(self) -> int | None: ...


class _ForkedProcess:
    """A child of this process that was forked and not executed."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._lock = threading.Lock()
        self._exit_code: int | None = None

    def poll(self) -> int | None:
        with self._lock:
            if self._exit_code is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self._exit_code = os.waitstatus_to_exitcode(status)
            return self._exit_code


class ForkServer:
    """A running fork server, owned by this process: it does not outlive it.

    Its death is no failure of what it started: that lives on, a warning says so, and from then on
    children are spawned.
    """

    def __init__(self, process: _Process, link: socket.socket, lifeline_fd: int) -> None:
        self.pid = process.pid
        self._process = process
        self._pidfd = os.pidfd_open(process.pid)
        self._lifeline_fd = lifeline_fd
        self._client = ForkServerClient(link, server_pid=process.pid, on_lost=self._on_lost)
        self.starter = ForkServerStarter(self._client)

    @classmethod
    def start(
        cls,
        method: Literal["forkserver", "fork"] = "forkserver",
        *,
        preload: Sequence[str] = DEFAULT_PRELOAD,
        log_level: str = "WARNING",
    ) -> Self:
        """Start it and return at once; it imports `preload` meanwhile.

        `forkserver` is a new interpreter. `fork` is a copy of this process, which must have no
        second thread: to be called before it starts one.

        Raises:
            UnfitError: the system gives no process, or a copy of this one would not work.
        """
        link, server_link = link_pair()
        lifeline_read, lifeline_write = os.pipe()
        try:
            bring_up = _fork if method == "fork" else _execute
            with stop_signals_held():  # until it ignores them
                process = bring_up(server_link.fileno(), lifeline_read, log_level, tuple(preload))
        except BaseException as error:
            link.close()
            os.close(lifeline_write)
            if isinstance(error, OSError):
                raise UnfitError(
                    f"can't start the fork server: {error}", hint="look at `ulimit -u`"
                ) from error
            raise
        finally:
            server_link.close()
            os.close(lifeline_read)
        return cls(process, link, lifeline_write)

    @property
    def preloaded(self) -> Preloaded | None:
        """How the imports went; None while they go on."""
        return self._client.preloaded

    def new_link(self) -> socket.socket:
        """A link for a child, which may then start children in the same way."""
        return self._client.new_link()

    def exit_code(self, pid: int) -> int | None:
        """How any child of the server ended; None while it runs."""
        return self._client.exit_code(pid)

    def cancel_starts(self) -> None:
        """Let no more children be started by this process; those that wait for one give up."""
        self._client.close()

    def close(self) -> None:
        """End the server; its children have ended. Safe to call again."""
        if self._lifeline_fd < 0:
            return
        self._client.close()
        # While it imports it has no children, and would not hear of it.
        if not self._wait(0.0 if self.preloaded is None else _LEAVE_S):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            self._wait(_KILL_S)
        os.close(self._lifeline_fd)
        os.close(self._pidfd)
        self._lifeline_fd = self._pidfd = -1

    def _on_lost(self) -> None:
        self._wait(_REAP_S)
        exit_code = self._process.poll()
        status = "closed its link" if exit_code is None else describe_exit(exit_code)
        logger.warning(
            "fork server (pid %s) %s: running processes live on, new ones are spawned",
            self.pid,
            status,
        )

    def _wait(self, timeout_s: float) -> bool:
        """Whether it has ended, and was reaped, within that time."""
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        poller.poll(timeout_s * 1000)
        return self._process.poll() is not None


def _execute(
    link_fd: int, lifeline_fd: int, log_level: str, preload: Sequence[str]
) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        server_command(link_fd, lifeline_fd, log_level, preload),
        stdin=subprocess.DEVNULL,
        env=start_environ(),
        close_fds=True,
        pass_fds=(link_fd, lifeline_fd),
        # Its own group: ^C in the terminal is not for it.
        process_group=0,
    )


def _fork(link_fd: int, lifeline_fd: int, log_level: str, preload: Sequence[str]) -> _ForkedProcess:
    release_libgomp()
    problem = fork_problem()
    if problem:
        raise UnfitError(
            f"a copy of this process would not work: {problem}",
            hint="--start-method forkserver, or call this before anything else",
        )
    # What waits in a buffer would be written by both.
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _be_copy(link_fd, lifeline_fd, log_level, preload)
    return _ForkedProcess(pid)


def _be_copy(link_fd: int, lifeline_fd: int, log_level: str, preload: Sequence[str]) -> NoReturn:
    try:
        os.setpgid(0, 0)
        be_fork_server(link_fd, lifeline_fd, log_level, preload)
    except BaseException:  # noqa: BLE001 - border: a copy must never return into the original
        traceback.print_exc()
    os._exit(int(ExitStatus.BUG))
