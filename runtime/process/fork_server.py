"""The fork server: a process with torch imported that starts children as copies of itself.

Started first of all by the process that the user started, it imports while that one still checks
and resolves. It has one thread, no OpenMP pool and no device, so a copy of it is as good as new.

    owner --exec or fork--> server --fork--> engine core, worker, worker, ...
    link of the owner ----> server <---- link of the engine core, handed in by the owner

It is the parent of its children and reaps them; their lives are their clients' business: each
child has its control socket and its lifeline from the client that asked for it. The server leaves
when its last client is gone, and the kernel ends it when its owner is (`lifeline.end_with`).
Signals to everybody, as an init system sends them, do not reach it: its clients still want to know
how their children ended. A child ignores them too, until its own lifeline is armed.
"""

import gc
import importlib
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import msgspec
from setproctitle import setproctitle

from vcli.runtime.log import configure_logging, get_logger
from vcli.runtime.process import entry
from vcli.runtime.process.descriptors import close_all_but, place_descriptors
from vcli.runtime.process.failures import one_line
from vcli.runtime.process.fork_protocol import (
    DescriptorsLostError,
    Ended,
    LinkRequest,
    Preloaded,
    Refused,
    Started,
    StartRequest,
    ToClient,
    ToServer,
    close_all,
    receive_packet,
    send_packet,
)
from vcli.runtime.process.fork_safety import fork_problem
from vcli.runtime.process.lifeline import STOP_SIGNALS, end_with
from vcli.topology.errors import ExitStatus
from vcli.topology.names import titled

MODULE = "vcli.runtime.process.fork_server"
TITLE = titled("ForkServer")

logger = get_logger(MODULE)


def server_command(
    link_fd: int, lifeline_fd: int, log_level: str, preload: Sequence[str]
) -> list[str]:
    """The command line of a fork server, for its owner; see `entry.start_command`."""
    numbers = (str(link_fd), str(lifeline_fd))
    return [sys.executable, "-P", "-m", MODULE, *numbers, log_level, *preload]


def be_fork_server(
    link_fd: int, lifeline_fd: int, log_level: str, preload: Sequence[str]
) -> NoReturn:
    """Be the fork server until the last client is gone; does not return."""
    begin_s = time.monotonic()
    end_with(lifeline_fd)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # its owner held them
    setproctitle(TITLE)
    configure_logging("ForkServer", log_level)
    # Before files are closed: garbage may own one, and would close its number's next owner.
    gc.collect()
    close_all_but({0, 1, 2, link_fd, lifeline_fd})
    _set_streams()
    for descriptor in (link_fd, lifeline_fd):
        os.set_inheritable(descriptor, False)
    entry.set_up_fork_server()
    problem = _preload(preload) or fork_problem()
    # What is there now is never looked at by the collector again, so its pages stay shared.
    gc.collect()
    gc.freeze()
    greeting = Preloaded(seconds=time.monotonic() - begin_s, problem=problem, pid=os.getpid())
    ForkServerLoop(socket.socket(fileno=link_fd), greeting).run()
    os._exit(int(ExitStatus.OK))


def _set_streams() -> None:
    """As a spawned child has them: nothing to read, and what is printed goes to stderr."""
    descriptor = os.open(os.devnull, os.O_RDONLY)
    os.dup2(descriptor, 0)
    os.close(descriptor)
    os.dup2(2, 1)


def _preload(modules: Sequence[str]) -> str:
    """Import the modules; gives what is wrong when one of them can't be imported."""
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - border: foreign code runs at import
            # Half an import may be left, so no copy of this process is as good as new.
            hint = entry.unset_hint(error)
            return f"{name} can't be imported: {one_line(error)}" + (f" ({hint})" if hint else "")
    return ""


@dataclass(slots=True)
class _Client:
    link: socket.socket
    waiting: deque[tuple[ToClient, int]] = field(default_factory=deque)
    """Messages that do not fit the socket yet, and the pidfd that goes with each, or -1."""


class ForkServerLoop:
    """Serves clients from one thread: every wait is the one `poll` in `run`."""

    def __init__(self, first: socket.socket, greeting: Preloaded) -> None:
        self._greeting = greeting
        self._poller = select.poll()
        self._clients: dict[int, _Client] = {}
        self._children: dict[int, int] = {}  # pidfd -> pid
        self._add_client(first)

    def run(self) -> None:
        """Serve until no client is left."""
        while self._clients:
            for descriptor, events in self._poller.poll():
                self._handle(descriptor, events)

    def _handle(self, descriptor: int, events: int) -> None:
        # Several events come at once: the number may have changed its owner since.
        client = self._clients.get(descriptor)
        if descriptor in self._children:
            self._reap(descriptor)
        elif client is not None and events & select.POLLOUT:
            self._flush(client)
        elif client is not None:
            self._receive(client)

    # ---- clients ----------------------------------------------------------------------------

    def _add_client(self, link: socket.socket) -> None:
        link.setblocking(False)
        client = self._clients[link.fileno()] = _Client(link)
        self._poller.register(link, select.POLLIN)
        self._send(client, self._greeting)

    def _drop_client(self, client: _Client) -> None:
        if self._clients.pop(client.link.fileno(), None) is not None:
            self._poller.unregister(client.link)
            client.link.close()

    def _receive(self, client: _Client) -> None:
        try:
            payload, descriptors = receive_packet(client.link)
        except BlockingIOError:
            return
        except DescriptorsLostError as error:
            payload, descriptors = error.args[0], []
        if not payload:
            self._drop_client(client)
            return
        message = msgspec.msgpack.decode(payload, type=ToServer)
        if isinstance(message, LinkRequest):
            for descriptor in descriptors:
                self._add_client(socket.socket(fileno=descriptor))
        elif len(descriptors) != len(message.targets):
            self._refuse(client, message, "too many open files to take over its descriptors")
        else:
            self._start(client, message, descriptors)

    def _send(self, client: _Client, message: ToClient, pidfd: int = -1) -> None:
        client.waiting.append((message, pidfd))
        self._flush(client)

    def _flush(self, client: _Client) -> None:
        """Send what waits, as much as the client takes; one that is gone is told nothing."""
        while client.waiting:
            message, pidfd = client.waiting[0]
            try:
                send_packet(client.link, message, [pidfd] if pidfd >= 0 else [])
            except BlockingIOError:
                self._poller.modify(client.link, select.POLLIN | select.POLLOUT)
                return
            except OSError:
                client.waiting.clear()
                break
            client.waiting.popleft()
        if client.link.fileno() in self._clients:
            self._poller.modify(client.link, select.POLLIN)

    # ---- children ---------------------------------------------------------------------------

    def _start(self, client: _Client, request: StartRequest, descriptors: list[int]) -> None:
        problem = self._greeting.problem or fork_problem()
        if problem:
            close_all(descriptors)
            self._refuse(client, request, problem, is_limit=False)
            return
        try:
            pid, pidfd = self._fork(request, descriptors)
        except OSError as error:
            self._refuse(client, request, str(error))
            return
        finally:
            close_all(descriptors)
        self._children[pidfd] = pid
        self._poller.register(pidfd, select.POLLIN)
        self._send(client, Started(request_id=request.request_id, pid=pid), pidfd)

    def _fork(self, request: StartRequest, descriptors: list[int]) -> tuple[int, int]:
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            self._be_child(request, descriptors)
        try:
            return pid, os.pidfd_open(pid)
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise

    def _be_child(self, request: StartRequest, descriptors: list[int]) -> NoReturn:
        try:
            # Its own group: ^C in the terminal reaches only the process that the user started.
            os.setpgid(0, 0)
            for client in self._clients.values():
                client.link.detach()  # or its destructor would close somebody else's number
            place_descriptors(descriptors, request.targets)
            close_all_but({0, 1, 2, *request.targets})
            control_fd, lifeline_fd = request.targets[:2]
            entry.be_forked_child(control_fd, lifeline_fd)
        except BaseException:  # noqa: BLE001 - border: a child must never return into the server
            traceback.print_exc()
        os._exit(int(ExitStatus.BUG))

    def _refuse(
        self, client: _Client, request: StartRequest, reason: str, *, is_limit: bool = True
    ) -> None:
        self._send(client, Refused(request_id=request.request_id, reason=reason, is_limit=is_limit))

    def _reap(self, pidfd: int) -> None:
        pid = self._children[pidfd]
        ended_pid, status = os.waitpid(pid, os.WNOHANG)
        if not ended_pid:
            return  # what was polled under this number is closed, and the number is new
        del self._children[pidfd]
        self._poller.unregister(pidfd)
        os.close(pidfd)
        ended = Ended(pid=pid, exit_code=os.waitstatus_to_exitcode(status))
        for client in list(self._clients.values()):
            self._send(client, ended)


if __name__ == "__main__":
    be_fork_server(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
