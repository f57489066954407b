"""The workers of a node without an engine core: its launcher hands records on, both ways.

    core --call--> launcher --ring--> workers --reply rings--> launcher --reply--> core

Workers know rings only. Records are passed on as they are, with a job token; without one nothing
that came from another node is unpickled, see `ipc.plain`.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from vcli.runtime.config import EngineConfig
from vcli.runtime.errors import FailureReport
from vcli.runtime.executor.multiproc import BROADCAST_RING_BYTES
from vcli.runtime.executor.node_messages import FrameKind, NodeActivity, message_frames
from vcli.runtime.executor.ring_ranks import RingRanks
from vcli.runtime.executor.rpc import RpcClient
from vcli.runtime.executor.waiting import spin_of
from vcli.runtime.ipc.errors import PeerDiedError, QueueCancelled, QueueFullTimeout
from vcli.runtime.ipc.plain import NotPlainError, from_plain, to_plain
from vcli.runtime.messages import ChildMessage
from vcli.runtime.process.child import ChildSpec
from vcli.runtime.process.failures import report_error
from vcli.runtime.process.group import ChildGroup
from vcli.runtime.process.held import describe_stop
from vcli.runtime.process.starter import Starter
from vcli.runtime.worker.call_messages import CallHeader, RankActivity, ReplyHeader
from vcli.runtime.worker.dispatch import DEFAULT_WORKER_CLS, StoreAddress
from vcli.runtime.worker.progress import ProgressBoard
from vcli.topology.decision import Decision
from vcli.topology.names import TITLE_PREFIX

SendFrames = Callable[[Sequence[bytes]], None]

#: Beyond the start's deadline, for workers that run: one that can't, on any node, is named first.
_START_PATIENCE_S: Final = 0.5

#: The core keeps the deadline of a call; this only ends a write that nobody will ever read.
_WRITE_TIMEOUT_S: Final = 300.0


class RelayRings(RingRanks):
    """The rings of a node's ranks; replies go to `on_reply` as they come."""

    def __init__(
        self,
        ranks: Sequence[int],
        titles: Sequence[str],
        on_reply: Callable[[int, list[memoryview]], None],
        spin: Decision[int],
    ) -> None:
        # Calls are booked where they are made, by the engine core: this client never has one.
        rpc = RpcClient(titles, activity=lambda _: None, on_step_failure=lambda _: None)
        super().__init__(ranks, ring_bytes=BROADCAST_RING_BYTES, rpc=rpc, titles=titles, spin=spin)
        self._on_reply = on_reply

    def write(self, record: Sequence[Any]) -> None:
        """Put a record that another node made into the ring."""
        self._calls.send(record, _WRITE_TIMEOUT_S)

    def _take_reply(self, rank: int, record: list[memoryview]) -> None:
        self._on_reply(rank, record)


class NodeWorkers:
    """Starts the workers of the node `config.parallel.node_rank`, and relays for them.

    `send` takes frames for the core, in any thread. `on_failure` is called once, with the first
    cause, when a worker failed after all were ready.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        is_trusted: bool,
        send: SendFrames,
        on_message: Callable[[ChildMessage], None],
        on_failure: Callable[[FailureReport], None],
        worker_cls: str = DEFAULT_WORKER_CLS,
    ) -> None:
        self._config = config
        self._deadlines = config.deadlines
        self._is_trusted = is_trusted
        self._send = send
        self._on_failure = on_failure
        self._worker_cls = worker_cls
        plan = config.plan
        everybody = [plan.rank_plan(rank) for rank in range(plan.world_size)]
        self._ranks = [rank for rank in everybody if rank.node_rank == config.parallel.node_rank]
        titles = [rank.title.removeprefix(TITLE_PREFIX) for rank in everybody]
        self._titles = {rank.rank: titles[rank.rank] for rank in self._ranks}
        self._headers = msgspec.msgpack.Decoder(CallHeader)
        self._reply_headers = msgspec.msgpack.Decoder(ReplyHeader)
        self._board = ProgressBoard.create(plan.world_size)
        self._rings = RelayRings(
            [rank.rank for rank in self._ranks], titles, self._on_reply, spin_of(config)
        )
        self._group = ChildGroup(on_message, on_failure)
        self._is_ready = False
        self._end_lock = threading.Lock()
        self._has_ended = False

    @property
    def pids(self) -> dict[str, int]:
        """Pid of each worker by its title."""
        return dict(zip(self._titles.values(), self._group.pids, strict=False))

    def start(
        self, store: StoreAddress, *, environ: Mapping[str, str], starter: Starter | None
    ) -> bool:
        """Start all workers; `environ` is added to theirs. False when `shutdown` came first.

        Raises:
            UnfitError: the system gives no process.
            StartupError: the fork server did not answer in time.
        """
        specs = [self._spec(index, store, environ) for index in range(len(self._ranks))]
        with self._end_lock:
            if self._has_ended:
                return False
            self._deadlines = self._deadlines.begun()
            left_s = self._deadlines.start_left_s()
            self._group.start(specs, starter=starter, timeout_s=left_s)
            self._rings.start(self._group.pids)
        return True

    def wait_ready(self) -> list[str]:
        """Wait until all workers can be called; gives the methods that they have.

        Raises:
            StartupError: the first cause of a failure, or who was missing at the deadline.
        """
        deadlines = self._deadlines
        payloads = self._group.wait_ready(
            deadlines.start_s, left_s=deadlines.start_left_s(), patience_s=_START_PATIENCE_S
        )
        self._is_ready = True
        return list(payloads[0]["methods"])

    def call(self, frames: list[bytes]) -> None:
        """Hand a call of the core to the workers."""
        header, *payload = frames
        try:
            record = payload if self._is_trusted or not payload else from_plain(payload)
            self._rings.write([header, *record])
        except (PeerDiedError, QueueCancelled):
            return  # the group's monitor tells why
        except (QueueFullTimeout, NotPlainError) as error:
            phase = self._headers.decode(header).method
            self._on_failure(
                report_error(
                    error,
                    process=f"node{self._config.parallel.node_rank}",
                    phase=phase,
                    rank=None,
                    is_serving=self._is_ready,
                )
            )

    def activity(self) -> dict[int, RankActivity]:
        """What the workers do now, by rank; those that do nothing are not in it."""
        doing = {rank: self._rings.activity(rank) for rank in self._titles}
        return {rank: activity for rank, activity in doing.items() if activity is not None}

    def tell_activity(self) -> None:
        """Tell the core what the workers do now."""
        pids = zip(self._titles, self._group.pids, strict=False)
        stopped = {rank: stop for rank, pid in pids if (stop := describe_stop(pid))}
        self._send(message_frames(NodeActivity(by_rank=self.activity(), stopped=stopped)))

    def answer(self, number: int) -> None:
        """Tell the core in which collective each worker is; nothing while they are ended."""
        if not self._end_lock.acquire(blocking=False):
            return
        try:
            if not self._has_ended:
                progress = tuple(self._board.line(rank).read(rank) for rank in self._titles)
                answer = NodeActivity(by_rank=self.activity(), progress=progress, answers=number)
                self._send(message_frames(answer))
        finally:
            self._end_lock.release()

    def shutdown(self, *, is_asked: bool) -> None:
        """End the workers within the shutdown deadline; with `is_asked` in order."""
        with self._end_lock:
            if self._has_ended:
                return
            self._has_ended = True
            can_ask = is_asked and self._is_ready and self._group.failure is None
            was_asked = can_ask and self._rings.ask_to_stop()
            self._group.shutdown(self._config.deadlines.shutdown_s, asked=was_asked)
            self._rings.close()
            self._board.close()

    def _spec(self, index: int, store: StoreAddress, environ: Mapping[str, str]) -> ChildSpec:
        rank = self._ranks[index]
        links = msgspec.structs.replace(
            self._rings.links(index, progress_fd=self._board.fd, rendezvous_path=None), store=store
        )
        return ChildSpec(
            target="vcli.runtime.worker.worker_proc:worker_main",
            arguments=(self._config, rank.rank, self._worker_cls, links),
            title=self._titles[rank.rank],
            rank=rank.rank,
            environ={**environ, **self._config.device_environ},
            omp_num_threads=rank.omp_num_threads,
            numa_node=rank.bound_numa_node,
            pass_fds=links.fds(),
            log_level=self._config.log_level,
        )

    def _on_reply(self, rank: int, record: list[memoryview]) -> None:
        """In the receiver's thread; the record is valid until this returns."""
        header, *payload = record
        if payload and not self._is_trusted:
            try:
                payload = [memoryview(buffer) for buffer in to_plain(payload)]
            except NotPlainError as error:
                header, payload = memoryview(self._refusal(rank, header, error)), []
        frames = [FrameKind.REPLY.value, rank.to_bytes(4, "little"), bytes(header)]
        self._send([*frames, *(bytes(buffer) for buffer in payload)])

    def _refusal(self, rank: int, header: memoryview, error: NotPlainError) -> bytes:
        call_id = self._reply_headers.decode(header).call_id
        report = report_error(
            error, process=self._titles[rank], phase="reply", rank=rank, is_serving=True
        )
        return msgspec.msgpack.encode(ReplyHeader(call_id, report))
