"""The client's side of the fork server: ask for children, hear of their ends.

One thread reads the link. When the server is gone, or refuses to fork, children are spawned
instead; those that it started before live on, and what is known of their end comes from the kernel.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from vcli.runtime.errors import FailureReport, StartupError
from vcli.runtime.exit_status import has_ended, kernel_exit_code
from vcli.runtime.log import get_logger
from vcli.runtime.process.child import ChildContext, ChildSpec
from vcli.runtime.process.entry import surroundings
from vcli.runtime.process.failures import LOST_EXIT_CODE
from vcli.runtime.process.fork_protocol import (
    MAX_DESCRIPTORS,
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
    link_pair,
    receive_packet,
    send_packet,
)
from vcli.runtime.process.held import HELD_HINT, Hold, HoldWatch
from vcli.runtime.process.starter import (
    ChildEdge,
    SpawnStarter,
    StartedChild,
    Starter,
    no_process,
    open_edge,
)
from vcli.topology.errors import ExitStatus, VcliError

logger = get_logger(__name__)

#: For an answer to a start, where the start has no deadline: the server may still be importing.
_ANSWER_TIMEOUT_S = 300.0

#: A server that has not answered for so long is looked at, as often.
_LOOK_EVERY_S = 5.0

#: Between the end of a child and the server's word of it: it only has to be scheduled.
_STATUS_TIMEOUT_S = 1.0


class StartCancelledError(VcliError):
    """The fork server was closed while a child was to be started."""


class _NoForkError(Exception):
    """The server gives no child; the message says why."""


class ForkServerClient:
    """One link to the fork server. Safe from any thread. `on_lost` is called when it is gone.

    `server_pid` is known to who started it; others learn it from its first message.
    """

    def __init__(
        self,
        link: socket.socket,
        *,
        server_pid: int | None = None,
        on_lost: Callable[[], None] | None = None,
    ) -> None:
        self.preloaded: Preloaded | None = None
        self._know(server_pid)
        self._link = link
        self._on_lost = on_lost
        self._news = threading.Condition()
        self._is_lost = False
        self._is_closed = False
        self._next_id = 0
        self._answers: dict[int, tuple[Started | Refused, int]] = {}
        self._awaited: set[int] = set()
        self._exit_codes: dict[int, int] = {}
        self._told_hold = Hold()
        self._thread = threading.Thread(target=self._read, name="fork-server-link", daemon=True)
        self._thread.start()

    @property
    def is_closed(self) -> bool:
        """Whether this side has closed the link."""
        return self._is_closed

    def exit_code(self, pid: int) -> int | None:
        """How a child of the server ended, whoever asked for it; None while it runs, or unknown."""
        with self._news:
            return self._exit_codes.get(pid)

    def new_link(self) -> socket.socket:
        """A link for another client, to be passed to it; a dead one if the server is gone."""
        ours, theirs = link_pair()
        with theirs, contextlib.suppress(OSError):
            self._send(LinkRequest(), [theirs.fileno()])
        return ours

    def fork(
        self,
        targets: Sequence[int],
        descriptors: Sequence[int],
        *,
        title: str,
        end_s: float | None = None,
    ) -> tuple[int, int]:
        """Have a child forked that has `descriptors` under the numbers `targets`.

        Gives its pid and a pidfd, which is the caller's. Waits while the server imports, until
        `end_s` on the monotonic clock; `title` is the child's, for messages.

        Raises:
            _NoForkError: no child by this way; another one may work.
            OSError: the system gives no child.
            StartCancelledError: `close` was called.
            StartupError: the server did not answer in time.
        """
        if len(descriptors) > MAX_DESCRIPTORS:
            raise _NoForkError(f"{len(descriptors)} descriptors don't fit one packet")
        with self._news:
            request_id = self._next_id = self._next_id + 1
            self._awaited.add(request_id)
        try:
            self._send(StartRequest(request_id=request_id, targets=tuple(targets)), descriptors)
        except OSError as error:
            if self._is_closed:
                raise StartCancelledError("the start was cancelled") from error
            raise _NoForkError("the fork server is gone") from error
        answer, pidfd = self._wait_answer(request_id, title, end_s)
        if isinstance(answer, Started):
            return answer.pid, pidfd
        if answer.is_limit:
            raise OSError(answer.reason)
        raise _NoForkError(answer.reason)

    def wait_exit_code(self, pid: int, pidfd: int) -> int | None:
        """The exit code of a child of this client; None while it runs.

        Asks the process itself first: the server's death says nothing about its children.
        """
        if not has_ended(pidfd):
            return None
        end_s = time.monotonic() + _STATUS_TIMEOUT_S
        with self._news:
            while pid not in self._exit_codes:
                left_s = end_s - time.monotonic()
                if self._is_lost or left_s <= 0:
                    break
                self._news.wait(left_s)
            if pid in self._exit_codes:
                return self._exit_codes[pid]
        code = kernel_exit_code(pidfd)
        return LOST_EXIT_CODE if code is None else code

    def close(self) -> None:
        """Let go of the server: with its last client it leaves. Starts that wait are cancelled."""
        with self._news:
            self._is_closed = True
            self._news.notify_all()
        with contextlib.suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._link.close()

    def _send(self, message: ToServer, descriptors: Sequence[int]) -> None:
        send_packet(self._link, message, descriptors)

    def _wait_answer(
        self, request_id: int, title: str, end_s: float | None
    ) -> tuple[Started | Refused, int]:
        begin_s = time.monotonic()
        end_s = begin_s + _ANSWER_TIMEOUT_S if end_s is None else end_s
        with self._news:
            while request_id not in self._answers:
                if self._is_closed:
                    raise StartCancelledError("the start was cancelled")
                if self._is_lost:
                    raise _NoForkError("the fork server is gone")
                left_s = end_s - time.monotonic()
                if left_s <= 0:
                    self._awaited.discard(request_id)
                    raise StartupError(self._late_report(title, time.monotonic() - begin_s))
                if not self._news.wait(min(left_s, _LOOK_EVERY_S)):
                    self._warn_of_hold(title)
            self._awaited.discard(request_id)
            return self._answers.pop(request_id)

    def _warn_of_hold(self, title: str) -> None:
        """Say once that the server can't answer, long before the start's deadline."""
        hold, told = self._look(), self._told_hold
        if hold.text and not (told.text and told.is_stopped is hold.is_stopped):
            self._told_hold = hold
            pid = self._server_pid
            logger.warning("fork server (pid %s) starts no %s: %s", pid, title, hold.text)

    def _late_report(self, title: str, waited_s: float) -> FailureReport:
        hold = self._look().text
        doing = "it is importing" if self.preloaded is None else "it has imported"
        return FailureReport(
            process="ForkServer",
            phase=f"start of {title}",
            kind="StartTimeout",
            message=f"no answer within {waited_s:.1f} s, {hold or doing}",
            pid=self._server_pid,
            host=socket.gethostname(),
            hint=HELD_HINT if hold else "--start-method spawn does without it",
            exit_status=int(ExitStatus.START_FAILED),
        )

    def _know(self, pid: int | None) -> None:
        self._server_pid = pid
        self._hold_watch = None if pid is None else HoldWatch(pid)

    def _look(self) -> Hold:
        return Hold() if self._hold_watch is None else self._hold_watch.look()

    def _read(self) -> None:
        while True:
            try:
                payload, descriptors = receive_packet(self._link)
            except DescriptorsLostError as error:
                payload, descriptors = error.args[0], []
            except OSError:
                payload, descriptors = b"", []
            if not payload:
                break
            with self._news:
                self._take(msgspec.msgpack.decode(payload, type=ToClient), descriptors)
                self._news.notify_all()
        with self._news:
            self._is_lost = True
            self._news.notify_all()
        if self._on_lost is not None and not self._is_closed:
            self._on_lost()

    def _take(self, message: ToClient, descriptors: Sequence[int]) -> None:
        match message:
            case Started() if message.request_id not in self._awaited:
                close_all(descriptors)  # it came too late: the child's edge was let go of
            case Started() if descriptors:
                # The number is new: what was said of an earlier process that had it is over.
                self._exit_codes.pop(message.pid, None)
                self._answers[message.request_id] = (message, descriptors[0])
            case Started():
                # Our limit of open files: the child can't be watched, and its edge is let go.
                reason = "too many open files to watch the child"
                refused = Refused(request_id=message.request_id, reason=reason, is_limit=True)
                self._answers[message.request_id] = (refused, -1)
            case Refused():
                self._answers[message.request_id] = (message, -1)
            case Ended():
                self._exit_codes[message.pid] = message.exit_code
            case Preloaded():
                self.preloaded = message
                self._know(message.pid)


class ForkServerStarter:
    """Children as copies of the fork server; spawned ones where it can't give any."""

    def __init__(self, client: ForkServerClient) -> None:
        self._client = client
        self._spawn = SpawnStarter()
        self._told: set[str] = set()

    def start(self, spec: ChildSpec, *, end_s: float | None = None) -> StartedChild:
        """Have a child forked and send it its spec; waits while the server imports.

        Raises:
            UnfitError: the system gives no process.
            StartCancelledError: the link was closed.
            StartupError: the server did not answer until `end_s`.
        """
        frame = spec.encode(surroundings())
        edge = open_edge(spec)
        try:
            pid, pidfd = self._fork(spec, edge, end_s)
        except BaseException as error:
            edge.close_own_ends()
            if isinstance(error, _NoForkError):
                self._tell(spec, str(error))
                return self._spawn.start(spec)
            if isinstance(error, OSError):
                raise no_process(spec, str(error)) from error
            raise
        finally:
            edge.close_child_ends()
        client = self._client

        def poll() -> int | None:
            return client.wait_exit_code(pid, pidfd)

        child = StartedChild(spec, pid=pid, pidfd=pidfd, edge=edge, poll=poll)
        edge.send_spec(frame)
        return child

    def _fork(self, spec: ChildSpec, edge: ChildEdge, end_s: float | None) -> tuple[int, int]:
        numbers = tuple(dict.fromkeys((*edge.child_fds, *spec.pass_fds)))
        return self._client.fork(numbers, numbers, title=spec.title, end_s=end_s)

    def _tell(self, spec: ChildSpec, reason: str) -> None:
        if reason not in self._told:
            self._told.add(reason)
            logger.warning(
                "no fork for %s, it is spawned, which takes longer: %s", spec.title, reason
            )


def starter_of(context: ChildContext) -> Starter:
    """How a child starts children of its own: by the fork server that it has a link to, if any."""
    if context.fork_server_fd is None:
        return SpawnStarter()
    return ForkServerStarter(ForkServerClient(socket.socket(fileno=context.fork_server_fd)))
