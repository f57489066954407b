"""Start one child: the pipes at its edge, and the process itself.

`Starter` is where another way of starting (a fork server) comes in: it must give the same
`StartedChild`, whose exit status may then come from somewhere else than waitpid.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from typing import Protocol

from vcli.runtime.process.child import ChildSpec
from vcli.runtime.process.control import send_frame
from vcli.runtime.process.entry import start_command, start_environ
from vcli.topology.errors import UnfitError

#: A child reads its spec as soon as it runs; the frame fits the socket's buffer unless it is huge.
_SPEC_SEND_TIMEOUT_S = 30.0


class StartedChild:
    """A process that was started, with the parent's ends of its edge; owns all of them."""

    def __init__(
        self,
        spec: ChildSpec,
        process: "subprocess.Popen[bytes]",
        control: socket.socket,
        lifeline_fd: int,
    ) -> None:
        self.spec = spec
        self.pid = process.pid
        self.control = control
        # The child can't be reaped, so its pid can't be another's, before `poll` is called.
        self.pidfd = os.pidfd_open(process.pid)
        self._process = process
        self._lifeline_fd: int | None = lifeline_fd

    def poll(self) -> int | None:
        """The exit code (negative: a signal), None while it runs; reaps it. Does not block."""
        return self._process.poll()

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


class Starter(Protocol):
    """A way of starting a child."""

    def start(self, spec: ChildSpec) -> StartedChild:
        """Start the child that `spec` describes; does not wait for it.

        Raises:
            UnfitError: the system gives no process.
        """


class SpawnStarter:
    """A fresh interpreter for each child: nothing is shared with the parent but what is passed.

    `multiprocessing` is not used: its resource tracker leaves a process and files behind when its
    owner is killed.
    """

    def start(self, spec: ChildSpec) -> StartedChild:
        """Start a fresh interpreter and send it its spec."""
        frame = spec.encode()
        ours, theirs = socket.socketpair()
        lifeline_read, lifeline_write = os.pipe()
        try:
            process = subprocess.Popen(
                start_command(theirs.fileno(), lifeline_read),
                stdin=subprocess.DEVNULL,
                env=start_environ(),
                close_fds=True,
                pass_fds=(*spec.pass_fds, theirs.fileno(), lifeline_read),
                # Its own group: ^C in the terminal reaches only the process that the user started.
                process_group=0,
            )
        except OSError as error:
            os.close(lifeline_write)
            ours.close()
            raise UnfitError(
                f"can't start {spec.title} with {sys.executable!r}: {error}",
                hint="look at `ulimit -u` and the container's limit of processes",
            ) from error
        finally:
            theirs.close()
            os.close(lifeline_read)
        child = StartedChild(spec, process, ours, lifeline_write)
        ours.settimeout(_SPEC_SEND_TIMEOUT_S)
        # A child that has ended already is found, with its exit status, by whoever watches it.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError, TimeoutError):
            send_frame(ours, frame)
        ours.setblocking(False)
        return child
