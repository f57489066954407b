"""A worker process for each rank of one node: one ring to all, one reply ring from each.

start      rings -> all children at once -> each: device, joined, groups, weights, ready
call       header and payload into the ring; one receiver thread settles the futures
failure    a failed step, or the death of a worker: every call fails with the first cause
shutdown   stop record -> children's ladder -> receivers -> rings
"""

import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Final

import msgspec

from vcli.runtime.config import EngineConfig
from vcli.runtime.errors import FailureReport, RpcTimeoutError, WorkerDiedError
from vcli.runtime.executor.base import Executor, RpcCall
from vcli.runtime.executor.rpc import PendingCall, RpcClient
from vcli.runtime.ipc.broadcast import BroadcastReader, BroadcastWriter
from vcli.runtime.ipc.codec import decode, encode
from vcli.runtime.ipc.errors import PeerDiedError, QueueCancelled, QueueFullTimeout, QueueTimeout
from vcli.runtime.ipc.handles import WriterHandle
from vcli.runtime.ipc.reader_set import ReaderSet
from vcli.runtime.log import get_logger
from vcli.runtime.messages import ChildMessage
from vcli.runtime.process.child import ChildSpec
from vcli.runtime.process.failures import report_error
from vcli.runtime.process.group import ChildGroup
from vcli.runtime.worker.call_messages import ALL_RANKS, CallHeader, CallKind, ReplyHeader
from vcli.runtime.worker.dispatch import DEFAULT_WORKER_CLS, check_rpc_method
from vcli.runtime.worker.worker_proc import WorkerLinks
from vcli.topology.errors import ConfigError
from vcli.topology.names import TITLE_PREFIX

logger = get_logger(__name__)

#: As the plan counts them, see `topology.processes`.
BROADCAST_RING_BYTES: Final = 32 * 1024 * 1024
REPLY_RING_BYTES: Final = 1024 * 1024

#: A ring that is full at shutdown has readers that hang: they are not asked, they are ended.
_STOP_TIMEOUT_S = 0.2

#: For the rest of a reply whose beginning is there.
_REPLY_PART_TIMEOUT_S = 5.0


class MultiprocExecutor(Executor):
    """Runs one child per rank. `ring_bytes` is the size of the ring to all of them."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        on_message: Callable[[ChildMessage], None],
        worker_cls: str = DEFAULT_WORKER_CLS,
        ring_bytes: int = BROADCAST_RING_BYTES,
    ) -> None:
        super().__init__(config, on_message=on_message, worker_cls=worker_cls)
        if config.parallel.nnodes > 1:
            raise ConfigError(
                f"nnodes={config.parallel.nnodes}: the mp back end runs the ranks of one node",
                hint="topo plans several nodes; serve does not run them yet",
            )
        dp_rank = config.parallel.data_parallel_rank or 0
        self._ranks = [
            config.plan.rank_plan(rank, dp_rank) for rank in range(config.plan.world_size)
        ]
        self._titles = [rank.title.removeprefix(TITLE_PREFIX) for rank in self._ranks]
        self._ring_bytes = ring_bytes
        self._calls: BroadcastWriter | None = None
        self._replies: list[BroadcastReader] = []
        self._receiver: threading.Thread | None = None
        self._reply_headers = msgspec.msgpack.Decoder(ReplyHeader)
        self._stop_fd = -1
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
        )

    @property
    def worker_pids(self) -> Mapping[str, int]:
        """Pid of each worker by its title."""
        return dict(zip(self._titles, self._group.pids, strict=False))

    # ---- start ------------------------------------------------------------------------------

    def start(self) -> None:
        """Start all workers at once and wait until each is ready for calls."""
        try:
            self._start_children()
            payloads = self._group.wait_ready(self._config.deadlines.start_s)
        except BaseException:
            self.shutdown()
            raise
        self._methods = frozenset(payloads[0]["methods"])
        self._is_ready = True

    def _start_children(self) -> None:
        num_ranks = len(self._ranks)
        self._stop_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self._rpc.start()
        calls = BroadcastWriter.create(num_ranks, self._ring_bytes, "broadcast")
        self._calls = calls
        writers: list[WriterHandle] = []
        for rank in self._ranks:
            reader, writer = BroadcastReader.create(
                REPLY_RING_BYTES, f"reply-r{rank.rank}", num_processes=num_ranks + 1
            )
            self._replies.append(reader)
            writers.append(writer)
        rendezvous_path = None
        if num_ranks > 1:
            # The workers open it by this process' descriptor; nothing is left of it on disk.
            self._rendezvous_fd = os.memfd_create("vcli-rendezvous")
            rendezvous_path = f"/proc/{os.getpid()}/fd/{self._rendezvous_fd}"
        self._group.start(
            [
                self._child_spec(index, calls, writer, rendezvous_path)
                for index, writer in enumerate(writers)
            ]
        )
        for index, pid in enumerate(self._group.pids):
            calls.set_reader_pid(index, pid)
            self._replies[index].set_writer_pid(pid)
        self._receiver = threading.Thread(target=self._receive, name="rpc-replies", daemon=True)
        self._receiver.start()

    def _child_spec(
        self, index: int, calls: BroadcastWriter, writer: WriterHandle, path: str | None
    ) -> ChildSpec:
        rank = self._ranks[index]
        links = WorkerLinks(calls=calls.reader_handle(index), replies=writer, rendezvous_path=path)
        return ChildSpec(
            target="vcli.runtime.worker.worker_proc:worker_main",
            arguments=(self._config, rank.rank, self._worker_cls, links),
            title=self._titles[index],
            rank=rank.rank,
            omp_num_threads=rank.omp_num_threads,
            pass_fds=links.fds(),
            log_level=self._config.log_level,
        )

    # ---- calls ------------------------------------------------------------------------------

    def _submit(self, call: RpcCall) -> "Future[Any]":
        if isinstance(call.method, str) and self._failure is None:
            check_rpc_method(call.method, self._methods)
        kind, payload = _payload(call)
        buffers = encode(payload)
        # One lock for id and record, so that ids are in the order of the ring.
        with self._submit_lock:
            pending = self._rpc.book(
                call.name, timeout_s=call.timeout_s, reply_rank=call.reply_rank
            )
            reply_rank = ALL_RANKS if call.reply_rank is None else call.reply_rank
            header = CallHeader(pending.call_id, kind, call.name, reply_rank)
            self._send(pending, [msgspec.msgpack.encode(header), *buffers])
        return pending.future

    def _send(self, pending: PendingCall, record: list[Any]) -> None:
        if self._calls is None:
            raise RuntimeError("the executor is not started")
        try:
            self._calls.send(record, pending.timeout_s)
            self._rpc.note_sent(pending)
        except QueueFullTimeout as error:
            failure = RpcTimeoutError(f"{pending.method}: {error.message}", hint=error.hint)
            self._rpc.abandon(pending, failure)
        except (PeerDiedError, QueueCancelled) as error:
            # The monitor knows more: it settles the call, or else this does.
            report = report_error(
                error,
                process=pending.method,
                phase=pending.method,
                rank=getattr(error, "reader_index", None),
                is_serving=True,
            )
            self._rpc.deliver_failure(pending.call_id, report)

    def _receive(self) -> None:
        """Settle futures with what the ranks send, until told to stop."""
        ranks = {reader: rank for rank, reader in enumerate(self._replies)}
        readers = ReaderSet(self._replies, [self._stop_fd])
        while ranks:
            ready, stopped = readers.wait()
            if stopped:
                return
            for reader in ready:
                try:
                    self._take_reply(ranks[reader], reader.recv(_REPLY_PART_TIMEOUT_S))
                    reader.release()
                except QueueTimeout:
                    logger.warning("rank %s stopped in the middle of a reply", ranks[reader])
                except PeerDiedError:
                    # The process monitor tells why; here is only nothing more to read.
                    del ranks[reader]
                    readers = ReaderSet(list(ranks), [self._stop_fd]) if ranks else readers

    def _take_reply(self, rank: int, record: list[memoryview]) -> None:
        header = self._reply_headers.decode(record[0])
        if header.failure is not None:
            self._rpc.deliver_failure(header.call_id, header.failure)
            return
        try:
            result = decode(record[1:])
        except Exception as error:  # noqa: BLE001 - border: unpickling runs foreign code
            report = report_error(
                error,
                process=self._titles[rank],
                phase="reply",
                rank=rank,
                is_serving=True,
            )
            self._rpc.deliver_failure(header.call_id, report)
        else:
            self._rpc.deliver(rank, header.call_id, result)

    def _activity(self, rank: int) -> str:
        """What a rank does now, as it writes into its line of the ring."""
        if self._calls is None:
            return ""
        state = self._calls.reader_states()[rank]
        if not state.activity:
            return ""
        return f"in {state.activity} for {state.activity_s:.1f} s"

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
            is_asked = can_ask and self._ask_to_stop()
            self._group.shutdown(self._config.deadlines.shutdown_s, asked=is_asked)
            self._rpc.fail(WorkerDiedError(self._shutdown_report()))
            self._rpc.close()
            self._close()

    def _close(self) -> None:
        """Give back threads, rings and descriptors; the workers have ended."""
        if self._receiver is not None:
            os.eventfd_write(self._stop_fd, 1)
            self._receiver.join()
        for reader in self._replies:
            reader.close()
        if self._calls is not None:
            self._calls.close()
        for descriptor in (self._stop_fd, self._rendezvous_fd):
            if descriptor >= 0:
                os.close(descriptor)

    def _ask_to_stop(self) -> bool:
        if self._calls is None:
            return False
        header = CallHeader(0, CallKind.STOP, "", ALL_RANKS)
        try:
            self._calls.send([msgspec.msgpack.encode(header)], _STOP_TIMEOUT_S)
        except (QueueFullTimeout, PeerDiedError) as error:
            logger.warning("workers can't be asked to stop: %s", error)
            return False
        return True

    def _shutdown_report(self) -> FailureReport:
        return FailureReport(
            process="Executor", phase="shutdown", kind="", message="the executor was shut down"
        )


def _payload(call: RpcCall) -> tuple[CallKind, Any]:
    if call.method == "execute_model" and len(call.args) == 1 and not call.kwargs:
        return CallKind.EXECUTE_MODEL, call.args[0]
    if isinstance(call.method, str):
        return CallKind.METHOD, (call.args, dict(call.kwargs))
    return CallKind.FUNCTION, (call.method, call.args, dict(call.kwargs))
