"""Rank 0 in the executor's own process, the other ranks in children of it.

    driver: scheduler, rank 0 in a thread  --ring-->  children: ranks 1 ...

One process less than `mp`, and what rank 0 gives crosses no process: the shape of small engines
that are used as a library. The other side of it: what kills rank 0 kills the scheduler too.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, Future, wait
from typing import Any, ClassVar

import msgspec

from vcli.runtime.config import EngineConfig
from vcli.runtime.errors import FailureReport, StartupError
from vcli.runtime.executor.base import RpcCall
from vcli.runtime.executor.local_rank import LocalRank
from vcli.runtime.executor.multiproc import BROADCAST_RING_BYTES, MultiprocExecutor
from vcli.runtime.executor.pending_call import PendingCall
from vcli.runtime.messages import ChildMessage
from vcli.runtime.process.failures import Weight, report_error, weigh
from vcli.runtime.worker.call_messages import RankActivity
from vcli.runtime.worker.dispatch import DEFAULT_WORKER_CLS
from vcli.topology.errors import ExitStatus

#: How long rank 0 may take to end; in a collective that nobody comes to it never does.
_LEAVE_S = 0.5

#: A child's end is found out later than what it does to rank 0.
_CAUSE_WAIT_S = 0.5


class ColocatedExecutor(MultiprocExecutor):
    """`MultiprocExecutor` without a child for rank 0; with one rank there is no child at all."""

    first_child_rank: ClassVar[int] = 1

    def __init__(
        self,
        config: EngineConfig,
        *,
        on_message: Callable[[ChildMessage], None],
        worker_cls: str = DEFAULT_WORKER_CLS,
        ring_bytes: int = BROADCAST_RING_BYTES,
    ) -> None:
        super().__init__(
            config, on_message=on_message, worker_cls=worker_cls, ring_bytes=ring_bytes
        )
        self._local = LocalRank(
            config, 0, worker_cls=worker_cls, rpc=self._rpc, on_state=on_message
        )
        self._child_failure: Future[None] = Future()

    def _wait_ready(self, rendezvous_path: str | None) -> frozenset[str]:
        deadlines = self._config.deadlines
        # A child that is missing is named first: rank 0 may only wait for it.
        end_s = time.monotonic() + deadlines.start_left_s() + _CAUSE_WAIT_S
        assert self._board is not None
        here = self._local.start(rendezvous_path, self._board.line(0))
        # All ranks join one world, so rank 0 must not wait for the others, nor they for it.
        children = self._children_ready(rendezvous_path)
        pending: set[Future[Any]] = {here, children, self._child_failure}
        while not (here.done() and children.done()):
            done, pending = wait(pending, end_s - time.monotonic(), FIRST_COMPLETED)
            if here in done and here.exception() is not None:
                raise self._cause_of(here.exception(), [children, self._child_failure])
            for future in done:
                future.result()
            if not done:
                raise StartupError(self._local.late_report(deadlines.start_s))
        return frozenset(self._local.methods)

    def _children_ready(self, rendezvous_path: str | None) -> "Future[Any]":
        ready: Future[Any] = Future()
        if not self._child_ranks:
            ready.set_result(None)
            return ready

        def wait_for_children() -> None:
            try:
                ready.set_result(super(ColocatedExecutor, self)._wait_ready(rendezvous_path))
            except StartupError as error:
                ready.set_exception(error)

        threading.Thread(target=wait_for_children, name="children-ready", daemon=True).start()
        return ready

    def _cause_of(self, error: BaseException | None, others: "list[Future[Any]]") -> BaseException:
        """What to tell when rank 0 failed: that, or what happened to the peer that it lost."""
        assert error is not None
        report = report_error(
            error, process=self._local.title, phase=self._local.state, rank=0, is_serving=False
        )
        if weigh(report) is Weight.CONSEQUENCE:
            # One that is done without an error says nothing; the other may still tell the cause.
            wait(others, _CAUSE_WAIT_S, FIRST_EXCEPTION)
            for future in others:
                cause = future.exception() if future.done() else None
                if cause is not None:
                    return cause
        failure = StartupError(report)
        failure.__cause__ = error
        return failure

    def _on_child_failure(self, report: FailureReport) -> None:
        if not self._is_ready and not self._child_failure.done():
            # The children were ready, rank 0 is not: for the user, the start failed.
            status = int(ExitStatus.START_FAILED)
            self._child_failure.set_exception(
                StartupError(msgspec.structs.replace(report, exit_status=status))
            )
        super()._on_child_failure(report)

    def _submit_here(self, pending: PendingCall, call: RpcCall) -> None:
        self._rpc.note_sent(pending)
        self._local.submit(pending.call_id, call)

    def _activity(self, rank: int) -> RankActivity | None:
        return self._local.activity() if rank == 0 else super()._activity(rank)

    def _stop_here(self, *, is_asked: bool) -> None:
        self._local.stop(_LEAVE_S if is_asked else 0.0)
