"""A worker process for each rank of one node.

start      rings -> all children at once -> each: device, joined, groups, weights, ready
call       header and payload into the ring; one receiver thread settles the futures
failure    a failed step, or the death of a worker: every call fails with the first cause
shutdown   stop record -> children's ladder -> receivers -> rings
"""

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, ClassVar, Final

from vcli.runtime.config import EngineConfig
from vcli.runtime.errors import FailureReport, WorkerDiedError
from vcli.runtime.executor.base import Executor, RpcCall
from vcli.runtime.executor.pending_call import PendingCall
from vcli.runtime.executor.ring_ranks import RingRanks, encode_call
from vcli.runtime.executor.rpc import RpcClient
from vcli.runtime.executor.waiting import Waiter
from vcli.runtime.messages import ChildMessage
from vcli.runtime.process.child import ChildSpec
from vcli.runtime.process.environ import one_host_environ
from vcli.runtime.process.group import ChildGroup
from vcli.runtime.process.held import describe_holds, describe_stop
from vcli.runtime.worker.call_messages import RankActivity
from vcli.runtime.worker.dispatch import DEFAULT_WORKER_CLS, check_rpc_method
from vcli.runtime.worker.progress import (
    Absence,
    ProgressBoard,
    RankProgress,
    missing_from_collective,
)
from vcli.topology.errors import ConfigError
from vcli.topology.names import TITLE_PREFIX

#: As the plan counts them, see `topology.processes`.
BROADCAST_RING_BYTES: Final = 32 * 1024 * 1024


#: For workers of a start that failed: they have nothing to finish, and who waits wants the cause.
_UNREADY_STOP_S: Final = 1.5


class MultiprocExecutor(Executor):
    """Runs one child per rank. `ring_bytes` is the size of the ring to all of them."""

    can_overlap_steps: ClassVar[bool] = True

    first_child_rank: ClassVar[int] = 0
    """Ranks before it do not live in a child; see `ColocatedExecutor`."""

    spans_nodes: ClassVar[bool] = False
    """Whether other nodes have ranks too; see `MultiNodeExecutor`."""

    start_patience_s: ClassVar[float] = 0.0
    """Beyond the start's deadline, for children that run: who keeps them waiting is named first."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        on_message: Callable[[ChildMessage], None],
        worker_cls: str = DEFAULT_WORKER_CLS,
        ring_bytes: int = BROADCAST_RING_BYTES,
    ) -> None:
        super().__init__(config, on_message=on_message, worker_cls=worker_cls)
        if config.parallel.nnodes > 1 and not self.spans_nodes:
            raise ConfigError(
                f"nnodes={config.parallel.nnodes}: this executor runs the ranks of one node",
                hint="vcli launch runs those of several nodes",
            )
        dp_rank = config.parallel.data_parallel_rank or 0
        self._ranks = [
            config.plan.rank_plan(rank, dp_rank) for rank in range(config.plan.world_size)
        ]
        self._titles = [rank.title.removeprefix(TITLE_PREFIX) for rank in self._ranks]
        self._child_ranks = self._ranks[self.first_child_rank :]
        self._ring_bytes = ring_bytes
        self._rings: RingRanks | None = None
        self._board: ProgressBoard | None = None
        self._rendezvous_fd = -1
        self._methods: frozenset[str] = frozenset()
        self._is_ready = False
        self._is_shut_down = False
        self._shutdown_lock = threading.Lock()
        self._submit_lock = threading.Lock()
        self._group = ChildGroup(on_message, self._on_child_failure)
        self._rpc = RpcClient(
            self._titles,
            activity=self._activity,
            on_step_failure=self._fail,
            stall_s=config.deadlines.stall_s,
            diagnose=self._diagnose_stall,
            stopped=self._stopped,
        )

    @property
    def worker_pids(self) -> Mapping[str, int]:
        """Pid of each worker by its title."""
        titles = self._titles[self.first_child_rank :]
        return dict(zip(titles, self._group.pids, strict=False))

    # ---- start ------------------------------------------------------------------------------

    def start(self) -> None:
        """Start all workers at once and wait until each is ready for calls."""
        try:
            self._rpc.start()
            self._board = ProgressBoard.create(len(self._ranks))
            path = self._make_rendezvous() if len(self._ranks) > 1 else None
            if self._child_ranks:
                self._start_children(path)
            self._methods = self._wait_ready(path)
        except BaseException:
            self.shutdown()
            raise
        self._is_ready = True

    def _make_rendezvous(self) -> str:
        # The workers open it by this process' descriptor; nothing is left of it on disk.
        self._rendezvous_fd = os.memfd_create("vcli-rendezvous")
        return f"/proc/{os.getpid()}/fd/{self._rendezvous_fd}"

    def _start_children(self, rendezvous_path: str | None) -> None:
        rings = RingRanks(
            [rank.rank for rank in self._child_ranks],
            ring_bytes=self._ring_bytes,
            rpc=self._rpc,
            titles=self._titles,
            spin=self.spin,
        )
        self._rings = rings
        self._group.start(
            [
                self._child_spec(index, rings, rendezvous_path)
                for index in range(len(self._child_ranks))
            ],
            starter=self._starter,
            timeout_s=self._config.deadlines.start_left_s(),
        )
        rings.start(self._group.pids)

    def _child_spec(self, index: int, rings: RingRanks, rendezvous_path: str | None) -> ChildSpec:
        rank = self._child_ranks[index]
        assert self._board is not None
        links = rings.links(index, progress_fd=self._board.fd, rendezvous_path=rendezvous_path)
        return ChildSpec(
            target="vcli.runtime.worker.worker_proc:worker_main",
            arguments=(self._config, rank.rank, self._worker_cls, links),
            title=self._titles[rank.rank],
            rank=rank.rank,
            environ=one_host_environ(),
            omp_num_threads=rank.omp_num_threads,
            numa_node=rank.bound_numa_node,
            pass_fds=links.fds(),
            log_level=self._config.log_level,
        )

    def _wait_ready(self, rendezvous_path: str | None) -> frozenset[str]:
        """Wait for all ranks; gives the names of the methods that may be called."""
        deadlines = self._config.deadlines
        payloads = self._group.wait_ready(
            deadlines.start_s,
            left_s=deadlines.start_left_s(),
            patience_s=self.start_patience_s,
        )
        return frozenset(payloads[0]["methods"])

    # ---- calls ------------------------------------------------------------------------------

    def waiter(self, fds: Sequence[int]) -> Waiter:
        """A wait for `fds` that takes the replies of the children, too."""
        return super().waiter(fds) if self._rings is None else self._rings.waiter(fds)

    def _result_of(self, future: "Future[Any]") -> Any:
        if self._rings is not None:
            self._rings.wait_for(future)
        return future.result()

    def _submit(self, call: RpcCall) -> "Future[Any]":
        if isinstance(call.method, str) and self._failure is None:
            check_rpc_method(call.method, self._methods)
        payload = encode_call(call)
        # One lock for id and record, so that ids are in the order of the ring.
        with self._submit_lock:
            pending = self._rpc.book(
                call.name,
                timeout_s=call.timeout_s,
                reply_rank=call.reply_rank,
                aggregate=call.aggregate,
            )
            if self._rings is not None:
                self._rings.send(pending, call, payload)
            self._submit_here(pending, call)
        return pending.future

    def _submit_here(self, pending: PendingCall, call: RpcCall) -> None:
        """Give the call to the ranks that live in this process: none."""

    def _activity(self, rank: int) -> RankActivity | None:
        return self._rings.activity(rank) if self._rings is not None else None

    def _describe_holds(self, *, told: str) -> str:
        holds = zip(self._child_ranks, describe_holds(self._group.pids), strict=True)
        return "; ".join(
            f"{self._name(rank.rank)} is held: {hold}"
            for rank, hold in holds
            if hold and hold not in told
        )

    def _diagnose_stall(self) -> str:
        """Which ranks do not come to a collective that others wait in."""
        groups = [{str(group.kind): group.ranks for group in rank.groups} for rank in self._ranks]
        absences = missing_from_collective(self._progress(), groups)
        return "; ".join(map(self._describe_absence, absences))

    def _stopped(self) -> dict[int, str]:
        """Ranks whose process is stopped, each with a sentence that says what continues it."""
        pids = zip(self._child_ranks, self._group.pids, strict=False)
        stops = [(rank.rank, stop) for rank, pid in pids if (stop := describe_stop(pid))]
        return {rank: f"{self._name(rank)} is {stop}" for rank, stop in stops}

    def _progress(self) -> Sequence[RankProgress | None]:
        """Where each rank is, None where that is not known."""
        num_ranks = len(self._ranks)
        return [None] * num_ranks if self._board is None else self._board.read(num_ranks)

    def _describe_absence(self, absence: Absence) -> str:
        name, collective = self._name(absence.rank), absence.collective
        if absence.progress is None:
            return f"it is not known whether {name} has come to the {collective}"
        return f"{name} has not come to the {collective}, it is {absence.progress.describe()}"

    def _name(self, rank: int) -> str:
        return f"rank {rank} ({self._titles[rank]})"

    # ---- failure and end --------------------------------------------------------------------

    def _on_child_failure(self, report: FailureReport) -> None:
        self._fail(report)
        self._rpc.fail(WorkerDiedError(report))

    def shutdown(self) -> None:
        """Stop the workers, within the shutdown deadline, and give everything back."""
        with self._shutdown_lock:
            if self._is_shut_down:
                return
            self._is_shut_down = True
            # Before ready nobody listens, and after a failure peers may hang in a collective.
            can_ask = self._is_ready and self._failure is None and self._group.failure is None
            is_asked = can_ask and (self._rings is None or self._rings.ask_to_stop())
            self._stop_here(is_asked=is_asked)
            limit_s = self._config.deadlines.shutdown_s
            self._group.shutdown(
                limit_s if self._is_ready else min(limit_s, _UNREADY_STOP_S), asked=is_asked
            )
            self._rpc.fail(WorkerDiedError(self._shutdown_report()))
            self._rpc.close()
            if self._rings is not None:
                self._rings.close()
            if self._board is not None:
                self._board.close()
            if self._rendezvous_fd >= 0:
                os.close(self._rendezvous_fd)

    def _stop_here(self, *, is_asked: bool) -> None:
        """Stop the ranks that live in this process: none."""
