"""One child as both sides see it: what it shall be (`ChildSpec`), what it may say (`ChildContext`).

Both speak over the control socket:

    parent  --StartFrame, once-->  child
    parent  <--ChildMessage, often- child
"""

import contextlib
import os
import pickle
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from vcli.runtime.errors import FailureReport
from vcli.runtime.log import get_logger
from vcli.runtime.messages import (
    ChildFailure,
    ChildMessage,
    ChildReady,
    ChildSignalled,
    ChildState,
)
from vcli.runtime.process.control import send_frame
from vcli.runtime.process.failures import report_error
from vcli.runtime.process.lifeline import Lifeline
from vcli.runtime.process.live_page import LivePage
from vcli.topology.names import TITLE_PREFIX

logger = get_logger(__name__)

#: Between two reports of progress within one state.
_PROGRESS_INTERVAL_S = 0.1

#: Phase of a process that is ready, in the failures that it reports.
SERVING = "serving"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """A child to start. `target` is `package.module:function`, called with a `ChildContext` first.

    `arguments` are pickled in the parent and read in the child after its own set-up. `environ` is
    added to the inherited environment (`environ.worker_environ` has the rules); `pass_fds` keep
    their numbers. With `numa_node` the child's memory comes from there, and its CPUs unless
    `cpu_affinity` names them. `fork_server_fd`, one of `pass_fds`, is a link to the fork server
    for the child's own children. `title` is kept without the prefix of process titles.
    """

    target: str
    arguments: tuple[Any, ...]
    title: str
    rank: int | None = None
    environ: Mapping[str, str] = field(default_factory=dict)
    omp_num_threads: int | None = None
    cpu_affinity: tuple[int, ...] | None = None
    numa_node: int | None = None
    pass_fds: tuple[int, ...] = ()
    fork_server_fd: int | None = None
    log_level: str = "INFO"

    def __post_init__(self) -> None:
        object.__setattr__(self, "title", self.title.removeprefix(TITLE_PREFIX))

    def encode(self, surroundings: "Surroundings | None" = None) -> bytes:
        """The frame that tells all of this to the child; with what it does not inherit."""
        return msgspec.msgpack.encode(
            StartFrame(
                target=self.target,
                title=self.title,
                rank=self.rank,
                environ=dict(self.environ),
                omp_num_threads=self.omp_num_threads,
                cpu_affinity=self.cpu_affinity,
                numa_node=self.numa_node,
                pass_fds=self.pass_fds,
                fork_server_fd=self.fork_server_fd,
                log_level=self.log_level,
                parent_pid=os.getpid(),
                started_s=time.monotonic(),
                arguments=pickle.dumps(self.arguments, protocol=pickle.HIGHEST_PROTOCOL),
                surroundings=surroundings,
            )
        )


class Surroundings(msgspec.Struct, frozen=True, kw_only=True):
    """What a child would inherit from the process that wants it, if that were what starts it."""

    environ: dict[str, str]
    search_path: list[str]
    folder: str
    affinity: tuple[int, ...]
    max_open_files: int


class StartFrame(msgspec.Struct, frozen=True, kw_only=True):
    """`ChildSpec` on the wire; `arguments` stay pickled until the child has set itself up.

    `started_s` is on the monotonic clock, which all processes of a host share.
    """

    target: str
    title: str
    rank: int | None
    environ: dict[str, str]
    omp_num_threads: int | None
    cpu_affinity: tuple[int, ...] | None
    numa_node: int | None
    pass_fds: tuple[int, ...]
    fork_server_fd: int | None
    log_level: str
    parent_pid: int
    started_s: float
    arguments: bytes
    surroundings: Surroundings | None


class ChildContext:
    """A child's own side: who it is, and how it talks to its parent. Safe from any thread.

    A parent that is gone makes the messages vanish: the lifeline is about to end the process.
    """

    def __init__(self, start: StartFrame, control: socket.socket, lifeline: Lifeline) -> None:
        self.title = start.title
        self.rank = start.rank
        self.parent_pid = start.parent_pid
        self.fork_server_fd = start.fork_server_fd
        self.page = LivePage()
        self.page.tell(title=self.title, rank=self.rank, parent_pid=self.parent_pid)
        self._started_s = start.started_s
        self._control = control
        self._lifeline = lifeline
        self._send_lock = threading.Lock()
        self._failure_lock = threading.Lock()
        self._phase = "spawned"
        self._state = ""
        self._is_ready = False
        self._has_failed = False
        self._last_progress_s = 0.0

    def seconds(self) -> float:
        """Time since the parent started this process."""
        return time.monotonic() - self._started_s

    def set_phase(self, name: str) -> None:
        """Name what the process does from here on; used when it fails."""
        self._phase = name

    def report_state(self, state: str, fraction: float | None = None, detail: str = "") -> None:
        """Tell the parent that `state` is reached, or how far it is.

        Progress within a state may be reported as often as it is known: it is sent at most ten
        times a second, its end always.
        """
        now = time.monotonic()
        is_progress = state == self._state and fraction is not None and fraction < 1.0
        if is_progress and now - self._last_progress_s < _PROGRESS_INTERVAL_S:
            return
        self._last_progress_s = now
        self._state = state
        if not self._is_ready:
            self._phase = state
        self.forward(
            ChildState(
                process=self.title,
                state=state,
                seconds=self.seconds(),
                pid=os.getpid(),
                rank=self.rank,
                fraction=fraction,
                detail=detail,
            )
        )

    def ready(self, payload: Any = None) -> None:
        """Tell the parent that this process can be used; `payload` must be msgpack-able."""
        self._phase = SERVING
        self._is_ready = True
        self.page.tell(state="ready")
        self.forward(
            ChildReady(process=self.title, seconds=self.seconds(), pid=os.getpid(), payload=payload)
        )

    def fail(self, report: FailureReport) -> None:
        """Tell the parent of a failure; the first one is sent, later ones are its consequences."""
        with self._failure_lock:
            if self._has_failed:
                return
            self._has_failed = True
        self.forward(ChildFailure(report=report))

    def fail_with(self, error: BaseException) -> FailureReport:
        """Tell the parent, and the log, of an error that ends this process; once.

        The log has it as INFO: the parent shows the first cause, followers must not drown it.
        """
        report = report_error(
            error,
            process=self.title,
            phase=self._phase,
            rank=self.rank,
            is_serving=self._is_ready,
        )
        if not self._has_failed:
            logger.info("failed phase=%s", self._phase, exc_info=error)
        self.fail(report)
        return report

    def forward(self, message: ChildMessage) -> None:
        """Send a message as it is: a child passes on what its own children report."""
        if isinstance(message, ChildState):
            self.page.note_state(message)
        payload = msgspec.msgpack.encode(message)
        # The send lock also orders the messages of several threads.
        with self._send_lock, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            send_frame(self._control, payload)

    def tell_signal(self, number: signal.Signals) -> None:
        """Tell the parent of a signal to stop that this process leaves to it."""
        self.forward(
            ChildSignalled(
                process=self.title, pid=os.getpid(), rank=self.rank, signal_name=number.name
            )
        )

    def on_parent_death(self, callback: Callable[[], bool]) -> None:
        """Run `callback` when the parent is gone; a hard exit follows within a second.

        At once, when it gives that the process will not end by itself.
        """
        self._lifeline.on_parent_death(callback)
