"""A worker's process: take a call from the ring, run it, reply; until told to stop or alone.

    ring --CallHeader, payload--> run on the worker --ReplyHeader, result--> reply ring

The hot loop knows nothing of the model: everything it calls is a public method of the worker.
"""

import contextlib
from typing import Any

import msgspec

from vcli.runtime.config import EngineConfig
from vcli.runtime.errors import FailureReport
from vcli.runtime.ipc.broadcast import BroadcastReader, BroadcastWriter
from vcli.runtime.ipc.codec import decode, encode
from vcli.runtime.ipc.errors import PeerDiedError, QueueCancelled
from vcli.runtime.ipc.handles import ReaderHandle, WriterHandle
from vcli.runtime.log import get_logger
from vcli.runtime.process.child import ChildContext
from vcli.runtime.process.failures import report_error
from vcli.runtime.worker.call_messages import ALL_RANKS, CallHeader, CallKind, ReplyHeader
from vcli.runtime.worker.dispatch import (
    RankWorker,
    check_rpc_method,
    make_worker,
    rpc_methods,
)

logger = get_logger(__name__)

#: The driver always reads replies; one that doesn't for so long is as good as gone.
_REPLY_TIMEOUT_S = 60.0


class WorkerLinks(msgspec.Struct, frozen=True, kw_only=True):
    """Inherited descriptors of a worker: calls come in, replies go out, the store is shared."""

    calls: ReaderHandle
    replies: WriterHandle
    rendezvous_path: str | None

    def fds(self) -> tuple[int, ...]:
        """The descriptors to inherit."""
        return (*self.calls.fds(), *self.replies.fds())


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
    # A loop that is idle ends in order when its executor is gone, within the lifeline's grace.
    context.on_parent_death(calls.cancel)
    worker = make_worker(
        worker_cls,
        config,
        rank,
        rendezvous_path=links.rendezvous_path,
        report=context.report_state,
    )
    try:
        worker.init_device()
        worker.load_model()
        loop = WorkerLoop(context, worker, rank, calls, replies)
        context.ready({"methods": sorted(loop.methods)})
        loop.run()
    except Exception as error:
        # Before the clean-up, which may wait for peers: they must hear of it first.
        context.fail_with(error)
        raise
    finally:
        worker.shutdown()
        calls.close()
        replies.close()


class WorkerLoop:
    """Runs calls one after the other on `worker`, in the order of the ring."""

    def __init__(
        self,
        context: ChildContext,
        worker: RankWorker,
        rank: int,
        calls: BroadcastReader,
        replies: BroadcastWriter,
    ) -> None:
        self.methods = rpc_methods(worker)
        self._context = context
        self._worker = worker
        self._rank = rank
        self._calls = calls
        self._replies = replies
        self._headers = msgspec.msgpack.Decoder(CallHeader)

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
        self._calls.set_activity(header.method)
        failure: FailureReport | None = None
        reply: list[Any] = []
        try:
            result = self._run(header, record[1:])
            if header.reply_rank in (ALL_RANKS, self._rank):
                reply = list(encode(result))
        except Exception as error:
            logger.info("call failed method=%s", header.method, exc_info=error)
            failure = report_error(
                error,
                process=self._context.title,
                phase=header.method,
                rank=self._rank,
                is_serving=True,
            )
        if reply or failure is not None:
            answer = ReplyHeader(header.call_id, failure)
            self._replies.send([msgspec.msgpack.encode(answer), *reply], _REPLY_TIMEOUT_S)
        self._calls.set_activity("")
        return True

    def _run(self, header: CallHeader, payload: list[memoryview]) -> Any:
        if header.kind is CallKind.EXECUTE_MODEL:
            return self._worker.execute_model(decode(payload))
        if header.kind is CallKind.METHOD:
            args, kwargs = decode(payload)
            check_rpc_method(header.method, self.methods)
            return self.methods[header.method](*args, **kwargs)
        function, args, kwargs = decode(payload)
        return function(self._worker, *args, **kwargs)
