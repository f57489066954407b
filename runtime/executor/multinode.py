"""A worker process for each rank of this node, and the launchers of other nodes for the rest.

start      hub -> own workers -> each node says that its workers are ready
call       the ring for own ranks, one message to each other node for its ranks
failure    of any process on any node, or a node that is lost: the first cause ends all
shutdown   the other nodes are told, then own workers, then the hub
"""

import dataclasses
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, ClassVar, Final

import msgspec

from vcli.runtime.config import EngineConfig
from vcli.runtime.errors import FailureReport, StartupError, WorkerDiedError
from vcli.runtime.executor.base import RpcCall
from vcli.runtime.executor.multiproc import BROADCAST_RING_BYTES, MultiprocExecutor
from vcli.runtime.executor.node_messages import NodeLinks
from vcli.runtime.executor.pending_call import PendingCall
from vcli.runtime.executor.remote_nodes import RemoteNodes
from vcli.runtime.executor.ring_ranks import RingRanks, encode_call
from vcli.runtime.ipc.plain import to_plain
from vcli.runtime.messages import ChildMessage
from vcli.runtime.process.child import ChildSpec
from vcli.runtime.process.environ import interface_environ
from vcli.runtime.process.first_cause import FirstCause
from vcli.runtime.process.held import SLOW_HINT
from vcli.runtime.worker.call_messages import CallKind, RankActivity
from vcli.runtime.worker.dispatch import DEFAULT_WORKER_CLS
from vcli.runtime.worker.progress import Absence, RankProgress
from vcli.topology.errors import ConfigError, ExitStatus

#: A worker that lost its peer fails at once; why the peer is gone comes from another node.
CAUSE_WAIT_S: Final = 1.5

#: For the nodes to say where their ranks are, when a step is stuck.
_ANSWER_S: Final = 1.0


class MultiNodeExecutor(MultiprocExecutor):
    """`MultiprocExecutor` whose ranks live on several nodes; `use_nodes` comes before `start`."""

    spans_nodes: ClassVar[bool] = True

    start_patience_s: ClassVar[float] = 1.0

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
        own_node = config.parallel.node_rank
        self._child_ranks = [rank for rank in self._ranks if rank.node_rank == own_node]
        self._local_ranks = frozenset(rank.rank for rank in self._child_ranks)
        self._cause = FirstCause(self._on_cause, wait_s=CAUSE_WAIT_S)
        self._rpc.cause_wait_s = CAUSE_WAIT_S
        self._links: NodeLinks | None = None
        self._remote: RemoteNodes | None = None

    def use_nodes(self, links: NodeLinks) -> None:
        """How the other nodes are reached."""
        self._links = links

    @property
    def worker_pids(self) -> Mapping[str, int]:
        """Pid of each worker on its own node, by its title."""
        titles = [self._titles[rank.rank] for rank in self._child_ranks]
        remote = self._remote.pids if self._remote is not None else {}
        return {**dict(zip(titles, self._group.pids, strict=False)), **remote}

    # ---- start ------------------------------------------------------------------------------

    def start(self) -> None:
        """Start own workers, and wait until those of all nodes are ready for calls."""
        links = self._need_links()
        self._remote = RemoteNodes(
            links,
            [rank for rank in self._ranks if rank.rank not in self._local_ranks],
            rpc=self._rpc,
            cause=self._cause,
            on_message=self._on_message,
        )
        self._remote.start()
        super().start()
        if links.store.listen_fd is not None:
            os.close(links.store.listen_fd)  # rank 0 has it

    def _make_rendezvous(self) -> str:
        return ""  # a store over TCP, see `_child_spec`

    def _child_spec(self, index: int, rings: RingRanks, rendezvous_path: str | None) -> ChildSpec:
        spec = super()._child_spec(index, rings, None)
        links = self._need_links()
        config, rank, worker_cls, worker_links = spec.arguments
        store = links.store
        if rank != 0:
            store = msgspec.structs.replace(store, listen_fd=None)
        worker_links = msgspec.structs.replace(worker_links, store=store)
        return dataclasses.replace(
            spec,
            arguments=(config, rank, worker_cls, worker_links),
            environ=interface_environ(links.interface),
            pass_fds=worker_links.fds(),
        )

    def _wait_ready(self, rendezvous_path: str | None) -> frozenset[str]:
        assert self._remote is not None
        deadlines = self._config.deadlines
        end_s = time.monotonic() + deadlines.start_left_s() + 2 * self.start_patience_s
        here = self._own_ready(rendezvous_path)
        cause, remote = self._cause.told, self._remote.ready
        while not (here.done() and remote.done()):
            running: set[Future[Any]] = {
                future for future in (here, remote, cause) if not future.done()
            }
            if here.done() and here.exception() is not None:
                error = here.exception()
                if not isinstance(error, StartupError):
                    here.result()
                    raise AssertionError from error
                # What ends a worker here may be the end of its peer there.
                self._cause.observe(error.report)
                running.discard(here)
                wait({cause}, end_s - time.monotonic())
            else:
                wait(running, max(0.0, end_s - time.monotonic()), FIRST_COMPLETED)
            if cause.done():
                raise StartupError(cause.result())
            if time.monotonic() > end_s:
                raise StartupError(self._nodes_missing(deadlines.start_s))
        return here.result()

    def _own_ready(self, rendezvous_path: str | None) -> "Future[frozenset[str]]":
        ready: Future[frozenset[str]] = Future()

        def wait_for_workers() -> None:
            try:
                ready.set_result(super(MultiNodeExecutor, self)._wait_ready(rendezvous_path))
            except StartupError as error:
                ready.set_exception(error)

        threading.Thread(target=wait_for_workers, name="own-workers-ready", daemon=True).start()
        return ready

    def _nodes_missing(self, limit_s: float) -> FailureReport:
        assert self._remote is not None
        return FailureReport(
            process="EngineCore",
            phase="start",
            kind="StartTimeout",
            message=f"not ready after {limit_s:g} s: {self._remote.describe_missing()}",
            hint=SLOW_HINT,
            exit_status=int(ExitStatus.START_FAILED),
        )

    # ---- calls ------------------------------------------------------------------------------

    def _submit(self, call: RpcCall) -> "Future[Any]":
        if not self._need_links().key.is_secret:
            _check_without_token(call)
        return super()._submit(call)

    def _submit_here(self, pending: PendingCall, call: RpcCall) -> None:
        assert self._remote is not None
        self._remote.send(pending, call, encode_call(call))

    def _activity(self, rank: int) -> RankActivity | None:
        if rank in self._local_ranks:
            return super()._activity(rank)
        return self._remote.activity(rank) if self._remote is not None else None

    def _progress(self) -> Sequence[RankProgress | None]:
        remote = self._remote.progress(_ANSWER_S) if self._remote is not None else {}
        # Own lines last: they show what the others' answers can't be older than.
        own = super()._progress()
        return [
            line if rank in self._local_ranks else remote.get(rank) for rank, line in enumerate(own)
        ]

    def _stopped(self) -> dict[int, str]:
        remote = self._remote.stopped if self._remote is not None else {}
        return super()._stopped() | {
            rank: f"{self._name(rank)} is {hold}" for rank, hold in remote.items()
        }

    def _describe_absence(self, absence: Absence) -> str:
        text = super()._describe_absence(absence)
        if absence.progress is None:
            text += f": its node told nothing newer within {_ANSWER_S:g} s"
        return text

    def _name(self, rank: int) -> str:
        node, hosts = self._ranks[rank].node_rank, self._need_links().hosts
        return f"rank {rank} ({self._titles[rank]} on node {node}, {hosts[node]})"

    # ---- failure and end --------------------------------------------------------------------

    def _on_child_failure(self, report: FailureReport) -> None:
        self._cause.observe(report)

    def _on_cause(self, report: FailureReport) -> None:
        self._fail(report)
        self._rpc.fail(WorkerDiedError(report))

    def shutdown(self) -> None:
        """Tell the other nodes, stop own workers, and give everything back."""
        if self._remote is not None:
            self._remote.stop(self._failure)
        self._cause.close()
        super().shutdown()
        if self._remote is not None:
            self._remote.close()

    def _need_links(self) -> NodeLinks:
        if self._links is None:
            raise ConfigError("several nodes were planned, and nobody joined them")
        return self._links


def _check_without_token(call: RpcCall) -> None:
    """Before anybody gets the call: who may have sent a pickle can't be known without a token.

    Raises:
        ConfigError: the call carries a function.
        NotPlainError: it carries another thing that only a pickle can carry.
    """
    if not isinstance(call.method, str):
        raise ConfigError(
            f"{call.name}: functions are not sent to other nodes without a job token",
            hint="give all nodes the same --job-token-file or VCLI_JOB_TOKEN",
        )
    kind, buffers = encode_call(call)
    if kind is not CallKind.EXECUTE_MODEL:
        to_plain(buffers)
