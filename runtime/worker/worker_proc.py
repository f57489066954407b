"""A worker's process: take a call from the ring, run it, reply; until told to stop or alone.

    ring --CallHeader, payload--> run on the worker --ReplyHeader, result--> reply ring

The hot loop knows nothing of the model: everything it calls is a public method of the worker.
"""

import contextlib
import threading
from typing import Any

import msgspec
from setproctitle import setproctitle

from vcli.runtime.config import EngineConfig
from vcli.runtime.ipc.broadcast import BroadcastReader, BroadcastWriter
from vcli.runtime.ipc.codec import decode
from vcli.runtime.ipc.errors import PeerDiedError, QueueCancelled
from vcli.runtime.ipc.handles import ReaderHandle, WriterHandle
from vcli.runtime.log import get_logger
from vcli.runtime.process.child import ChildContext
from vcli.runtime.worker.call_messages import STEP_METHODS, CallHeader, CallKind
from vcli.runtime.worker.dispatch import (
    CollectiveWorker,
    DeviceWorker,
    RankWorker,
    StoreAddress,
    check_rpc_method,
    make_worker,
    rpc_methods,
)
from vcli.runtime.worker.progress import ProgressBoard
from vcli.runtime.worker.replies import ReplySender
from vcli.runtime.worker.watchdog import Watchdog
from vcli.topology.names import TITLE_PREFIX

logger = get_logger(__name__)

#: Results that are on their way when the loop ends.
_LAST_REPLIES_S = 1.0


class WorkerLinks(msgspec.Struct, frozen=True, kw_only=True):
    """Inherited descriptors of a worker: calls come in, replies go out, the store is shared."""

    calls: ReaderHandle
    replies: WriterHandle
    progress_fd: int
    rendezvous_path: str | None
    store: StoreAddress | None = None
    """Instead of the path, where the world has several nodes."""

    def fds(self) -> tuple[int, ...]:
        """The descriptors to inherit."""
        listen_fd = self.store.listen_fd if self.store else None
        store_fds = () if listen_fd is None else (listen_fd,)
        return (*self.calls.fds(), *self.replies.fds(), self.progress_fd, *store_fds)


def worker_main(
    context: ChildContext,
    config: EngineConfig,
    rank: int,
    worker_cls: str,
    links: WorkerLinks,
) -> None:
    """Be the worker of `rank`: device, groups and weights, then ready, then calls."""
    calls = BroadcastReader.attach(links.calls)
    replies = BroadcastWriter.attach(links.replies)
    calls.set_writer_pid(context.parent_pid)
    replies.set_reader_pid(0, context.parent_pid)
    setproctitle(f"{TITLE_PREFIX}{context.title} (starting)")
    worker = make_worker(
        worker_cls,
        config,
        rank,
        rendezvous_path=links.rendezvous_path,
        report=context.report_state,
        store=links.store,
    )
    if isinstance(worker, CollectiveWorker):
        worker.trace_collectives(ProgressBoard.attach(links.progress_fd).line(rank))
    bind_thread = worker.bind_thread if isinstance(worker, DeviceWorker) else _keep_device
    sender = ReplySender(context, rank, replies, bind_thread=bind_thread)
    watchdog = Watchdog(config.deadlines.stall_s, page=context.page)
    try:
        worker.init_device()
        worker.load_model()
        loop = WorkerLoop(worker, calls, sender, watchdog)
        context.on_parent_death(loop.leave)
        setproctitle(f"{TITLE_PREFIX}{context.title}")
        context.ready({"methods": sorted(loop.methods)})
        loop.run()
        sender.close(_LAST_REPLIES_S)
    except Exception as error:
        # Before the clean-up, which may wait for peers: they must hear of it first.
        context.fail_with(error)
        raise
    finally:
        watchdog.close()
        worker.shutdown()
        calls.close()
        replies.close()


def _keep_device() -> None:
    """For workers without a device."""


class WorkerLoop:
    """Runs calls one after the other on `worker`, in the order of the ring."""

    def __init__(
        self,
        worker: RankWorker,
        calls: BroadcastReader,
        replies: ReplySender,
        watchdog: Watchdog,
    ) -> None:
        self.methods = rpc_methods(worker)
        self._worker = worker
        self._calls = calls
        self._replies = replies
        self._watchdog = watchdog
        self._headers = msgspec.msgpack.Decoder(CallHeader)
        self._is_busy = False
        self._lock = threading.Lock()
        replies.on_idle = self._rest

    def leave(self) -> bool:
        """End the loop, from another thread; gives whether it is idle, and so will end at once.

        In a call it may wait for peers that are gone, or compile for seconds.
        """
        self._calls.cancel()
        return not self._is_busy

    def run(self) -> None:
        """Serve until the executor stops the loop, closes the ring, or is gone."""
        with contextlib.suppress(QueueCancelled, PeerDiedError):
            while self._serve_one():
                # Nothing of the last call lives here while the next one is waited for: its
                # buffers may be large, and the ring wants their place.
                self._calls.release()
        logger.info("left the loop")

    def _serve_one(self) -> bool:
        record = self._calls.recv()
        header = self._headers.decode(record[0])
        if header.kind is CallKind.STOP:
            return False
        with self._lock:
            self._is_busy = True
            self._calls.set_activity(header.method)
            if header.method in STEP_METHODS:  # others may take their time, like a reload
                self._watchdog.begin()
        try:
            result = self._run(header, record[1:])
        except Exception as error:  # noqa: BLE001 - border: the worker's loop
            self._replies.fail(header, error)
        else:
            self._replies.send(header, result)
        self._is_busy = False
        self._rest()
        return True

    def _rest(self) -> None:
        """Nothing is done any more, unless the device still is at a step, or a new call came."""
        with self._lock:
            if not (self._is_busy or self._replies.is_waiting):
                self._watchdog.end()
                self._calls.set_activity("")

    def _run(self, header: CallHeader, payload: list[memoryview]) -> Any:
        if header.kind is CallKind.EXECUTE_MODEL:
            return self._worker.execute_model(decode(payload))
        if header.kind is CallKind.METHOD:
            args, kwargs = decode(payload)
            check_rpc_method(header.method, self.methods)
            return self.methods[header.method](*args, **kwargs)
        function, args, kwargs = decode(payload)
        return function(self._worker, *args, **kwargs)
