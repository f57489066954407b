"""Start one child: the pipes at its edge, and the process itself.

`Starter` is where another way of starting comes in (`fork_client`): it gives the same
`StartedChild`, whose exit status then comes from somewhere else than waitpid.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Protocol

from vcli.runtime.process.child import ChildSpec
from vcli.runtime.process.control import send_frame
from vcli.runtime.process.entry import start_command, start_environ
from vcli.runtime.process.facts import ray_environ
from vcli.runtime.process.lifeline import stop_signals_held
from vcli.topology.errors import UnfitError

#: A child reads its spec as soon as it runs; the frame fits the socket's buffer unless it is huge.
_SPEC_SEND_TIMEOUT_S = 30.0


class StartedChild:
    """A process that was started, with the parent's ends of its edge; owns all of them."""

    def __init__(
        self,
        spec: ChildSpec,
        *,
        pid: int,
        pidfd: int,
        edge: "ChildEdge",
        poll: Callable[[], int | None],
    ) -> None:
        self.spec = spec
        self.pid = pid
        self.pidfd = pidfd
        self.control = edge.control
        self._poll = poll
        self._lifeline_fd: int | None = edge.lifeline_fd

    def poll(self) -> int | None:
        """The exit code (negative: a signal), None while it runs. Does not wait for its end."""
        return self._poll()

    def send_signal(self, signum: signal.Signals) -> None:
        """Send a signal; nothing happens when the child has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signum)

    def close_lifeline(self) -> None:
        """Let go of the child: it ends within a second, whatever it does."""
        if self._lifeline_fd is not None:
            os.close(self._lifeline_fd)
            self._lifeline_fd = None

    def close(self) -> None:
        """Give back the descriptors of a child that has ended."""
        self.close_lifeline()
        self.control.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


class ChildEdge:
    """The pipes between a parent and a child that is about to be started; both ends of each."""

    def __init__(self) -> None:
        self.control, self.child_control = socket.socketpair()
        try:
            self.child_lifeline_fd, self.lifeline_fd = os.pipe()
        except OSError:
            self.control.close()
            self.child_control.close()
            raise

    @property
    def child_fds(self) -> tuple[int, int]:
        """The child's ends: control socket, lifeline."""
        return self.child_control.fileno(), self.child_lifeline_fd

    def close_child_ends(self) -> None:
        """The child has them, or there is none."""
        self.child_control.close()
        os.close(self.child_lifeline_fd)

    def close_own_ends(self) -> None:
        """There is no child; one that is half born ends."""
        self.control.close()
        os.close(self.lifeline_fd)

    def send_spec(self, frame: bytes) -> None:
        """Tell the child what it shall be; from here on the control socket does not block."""
        self.control.settimeout(_SPEC_SEND_TIMEOUT_S)
        # A child that has ended already is found, with its exit status, by whoever watches it.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError, TimeoutError):
            send_frame(self.control, frame)
        self.control.setblocking(False)


class Starter(Protocol):
    """A way of starting a child."""

    def start(self, spec: ChildSpec, *, end_s: float | None = None) -> StartedChild:
        """Start the child that `spec` describes; does not wait for it.

        A way that has to wait for somebody else does so until `end_s` on the monotonic clock.

        Raises:
            UnfitError: the system gives no process.
            StartupError: who was waited for did not answer.
        """


class SpawnStarter:
    """A fresh interpreter for each child: nothing is shared with the parent but what is passed.

    `multiprocessing` is not used: its resource tracker leaves a process and files behind when its
    owner is killed.
    """

    def start(self, spec: ChildSpec, *, end_s: float | None = None) -> StartedChild:
        """Start a fresh interpreter and send it its spec; nobody has to be waited for."""
        frame = spec.encode()
        edge = open_edge(spec)
        try:
            with stop_signals_held():
                process = subprocess.Popen(
                    start_command(*edge.child_fds),
                    stdin=subprocess.DEVNULL,
                    stdout=2,  # ours is for results: what a child prints goes to stderr
                    env={**ray_environ(), **start_environ()},
                    close_fds=True,
                    pass_fds=(*spec.pass_fds, *edge.child_fds),
                    # Its own group: ^C in the terminal is for the process that the user started.
                    process_group=0,
                )
        except OSError as error:
            edge.close_own_ends()
            raise no_process(spec, str(error)) from error
        finally:
            edge.close_child_ends()
        # It can't be reaped, so its pid can't be another's, before `poll` is called.
        pidfd = os.pidfd_open(process.pid)
        child = StartedChild(spec, pid=process.pid, pidfd=pidfd, edge=edge, poll=process.poll)
        edge.send_spec(frame)
        return child


def open_edge(spec: ChildSpec) -> ChildEdge:
    """The pipes for a child.

    Raises:
        UnfitError: too many open files.
    """
    try:
        return ChildEdge()
    except OSError as error:
        raise no_process(spec, str(error)) from error


def no_process(spec: ChildSpec, reason: str) -> UnfitError:
    """The error of a start that failed because the system gives no process."""
    return UnfitError(
        f"can't start {spec.title} with {sys.executable!r}: {reason}",
        hint="look at `ulimit -u`, `ulimit -n` and the container's limit of processes",
    )
