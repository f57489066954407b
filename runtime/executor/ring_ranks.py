"""The way to ranks in other processes: one ring to all of them, one reply ring from each.

    send:     header and payload --> broadcast ring --> every rank
    receiver: reply rings --> one thread --> `RpcClient`; its own, or who has the `waiter`

It knows no processes: who started them tells their pids, and why one ended.
"""

import contextlib
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Final

import msgspec

from vcli.runtime.errors import FailureReport, RpcTimeoutError
from vcli.runtime.executor.base import RpcCall
from vcli.runtime.executor.pending_call import PendingCall
from vcli.runtime.executor.rpc import RpcClient
from vcli.runtime.executor.waiting import idle_spin_us
from vcli.runtime.ipc.broadcast import BroadcastReader, BroadcastWriter
from vcli.runtime.ipc.codec import decode, encode
from vcli.runtime.ipc.errors import PeerDiedError, QueueCancelled, QueueFullTimeout, QueueTimeout
from vcli.runtime.ipc.handles import WriterHandle
from vcli.runtime.ipc.reader_set import ReaderSet
from vcli.runtime.log import get_logger
from vcli.runtime.process.failures import report_error
from vcli.runtime.worker.call_messages import (
    ALL_RANKS,
    CallHeader,
    CallKind,
    RankActivity,
    ReplyHeader,
)
from vcli.runtime.worker.worker_proc import WorkerLinks
from vcli.topology.decision import Decision

logger = get_logger(__name__)

REPLY_RING_BYTES: Final = 1024 * 1024

#: A ring that is full at shutdown has readers that hang: they are not asked, they are ended.
_STOP_TIMEOUT_S = 0.2

#: For the rest of a reply whose beginning is there.
_REPLY_PART_TIMEOUT_S = 5.0


class RingRanks:
    """The rings of `ranks` (global ranks, in the order of their processes); owns all of them."""

    def __init__(
        self,
        ranks: Sequence[int],
        *,
        ring_bytes: int,
        rpc: RpcClient,
        titles: Sequence[str],
        spin: Decision[int],
    ) -> None:
        self._ranks = list(ranks)
        self._rpc = rpc
        self._titles = titles
        self._spin = spin
        self._stop_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        num_ranks, spin_us = len(self._ranks), spin.value
        self._calls = BroadcastWriter.create(num_ranks, ring_bytes, "broadcast", spin_us=spin_us)
        self._replies: dict[BroadcastReader, int] = {}
        """Replies of ranks that can still send some."""
        self._readers: list[BroadcastReader] = []
        self._writers: list[WriterHandle] = []
        for rank in self._ranks:
            reader, writer = BroadcastReader.create(
                REPLY_RING_BYTES, f"reply-r{rank}", spin_us=spin_us
            )
            self._readers.append(reader)
            self._replies[reader] = rank
            self._writers.append(writer)
        self._receiver: threading.Thread | None = None
        self._taker: int | None = None
        """The thread that has the `waiter`."""
        self._reply_headers = msgspec.msgpack.Decoder(ReplyHeader)

    def links(self, index: int, *, progress_fd: int, rendezvous_path: str | None) -> WorkerLinks:
        """What the process of `ranks[index]` inherits."""
        return WorkerLinks(
            calls=self._calls.reader_handle(index),
            replies=self._writers[index],
            progress_fd=progress_fd,
            rendezvous_path=rendezvous_path,
        )

    def start(self, pids: Sequence[int]) -> None:
        """Watch these processes, and settle calls with what they send."""
        for index, pid in enumerate(pids):
            self._calls.set_reader_pid(index, pid)
            self._readers[index].set_writer_pid(pid)
        self.start_receiver()

    def send(
        self, pending: PendingCall, call: RpcCall, payload: tuple[CallKind, list[Any]]
    ) -> None:
        """Put a booked call into the ring; what goes wrong settles the call."""
        kind, buffers = payload
        reply_rank = ALL_RANKS if call.reply_rank is None else call.reply_rank
        header = CallHeader(pending.call_id, kind, call.name, reply_rank)
        try:
            self._calls.send([msgspec.msgpack.encode(header), *buffers], pending.timeout_s)
            self._rpc.note_sent(pending)
        except QueueFullTimeout as error:
            failure = RpcTimeoutError(f"{pending.method}: {error.message}", hint=error.hint)
            self._rpc.abandon(pending, failure)
        except (PeerDiedError, QueueCancelled) as error:
            # The monitor knows more: it settles the call, or else this does.
            index = getattr(error, "reader_index", None)
            report = report_error(
                error,
                process=pending.method,
                phase=pending.method,
                rank=None if index is None else self._ranks[index],
                is_serving=True,
            )
            self._rpc.deliver_failure(pending.call_id, report)

    def ask_to_stop(self) -> bool:
        """Tell all ranks to leave their loops; whether that was possible."""
        header = CallHeader(0, CallKind.STOP, "", ALL_RANKS)
        try:
            self._calls.send([msgspec.msgpack.encode(header)], _STOP_TIMEOUT_S)
        except (QueueFullTimeout, PeerDiedError) as error:
            logger.warning("workers can't be asked to stop: %s", error)
            return False
        return True

    def activity(self, rank: int) -> RankActivity | None:
        """What a rank does now, as it writes into its line of the ring."""
        state = self._calls.reader_states()[self._ranks.index(rank)]
        return RankActivity(state.activity, state.activity_s) if state.activity else None

    def close(self) -> None:
        """Give back threads, rings and descriptors; the ranks have ended."""
        self.stop_receiver()
        for reader in self._readers:
            reader.close()
        self._calls.close()
        os.close(self._stop_fd)

    # ---- replies ----------------------------------------------------------------------------

    def waiter(self, fds: Sequence[int]) -> "ReplyWaiter":
        """Have the calling thread take the replies from now on, while it waits for `fds` too."""
        self.stop_receiver()
        self._taker = threading.get_ident()
        return ReplyWaiter(self, fds)

    def wait_for(self, future: "Future[Any]") -> None:
        """Return when `future` is settled, if this thread is the one that takes the replies."""
        if self._taker != threading.get_ident() or future.done():
            return
        future.add_done_callback(lambda _: os.eventfd_write(self._stop_fd, 1))
        waiting = self.reader_set([self._stop_fd])
        while not future.done():
            ready, rung = waiting.wait()
            if rung:  # also by the end of an earlier one
                self._clear_stop()
            if not self.take(ready):
                waiting.close()
                waiting = self.reader_set([self._stop_fd])
        waiting.close()

    def start_receiver(self) -> None:
        """Settle calls in a thread of its own."""
        self._taker = None
        self._clear_stop()
        self._receiver = threading.Thread(target=self._receive, name="rpc-replies", daemon=True)
        self._receiver.start()

    def stop_receiver(self) -> None:
        """Return when the thread takes no more replies."""
        if self._receiver is not None:
            os.eventfd_write(self._stop_fd, 1)
            self._receiver.join()
            self._receiver = None

    def reader_set(self, fds: Sequence[int]) -> ReaderSet:
        """A wait for `fds` and the replies of all ranks that are there."""
        return ReaderSet(list(self._replies), fds, idle_spin_us=idle_spin_us(self._spin))

    def expects_reply(self) -> bool:
        """Whether a call is in flight."""
        return self._rpc.has_pending

    def take(self, ready: Sequence[BroadcastReader]) -> bool:
        """Settle calls with what came; False when the replies of one of these have ended."""
        for reader in ready:
            rank = self._replies.get(reader)
            if rank is None:  # another wait has seen the end
                continue
            try:
                self._take_reply(rank, reader.recv(_REPLY_PART_TIMEOUT_S))
                reader.release()
            except QueueTimeout:
                logger.warning("rank %s stopped in the middle of a reply", rank)
            except PeerDiedError:
                # The process monitor tells why; here is only nothing more to read.
                del self._replies[reader]
        return all(reader in self._replies for reader in ready)

    def _receive(self) -> None:
        """Settle futures with what the ranks send, until told to stop."""
        waiting = self.reader_set([self._stop_fd])
        while True:
            ready, stopped = waiting.wait()
            if stopped:
                break
            if not self.take(ready):
                waiting.close()
                waiting = self.reader_set([self._stop_fd])
        waiting.close()

    def _clear_stop(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._stop_fd)

    def _take_reply(self, rank: int, record: list[memoryview]) -> None:
        header = self._reply_headers.decode(record[0])
        failure = header.failure
        if failure is not None and not header.has_output:
            self._rpc.deliver_failure(header.call_id, failure)
            return
        try:
            result = decode(record[1:])
        except Exception as error:  # noqa: BLE001 - border: unpickling runs foreign code
            self._rpc.deliver_failure(header.call_id, self._unreadable(rank, error))
            return
        if failure is None:
            self._rpc.deliver(rank, header.call_id, result)
        else:
            self._rpc.deliver_output_of_failed(rank, header.call_id, failure, result)

    def _unreadable(self, rank: int, error: Exception) -> FailureReport:
        return report_error(
            error, process=self._titles[rank], phase="reply", rank=rank, is_serving=True
        )


class ReplyWaiter:
    """A thread's wait for descriptors that takes the replies in `rings`; see `Waiter`."""

    def __init__(self, rings: RingRanks, fds: Sequence[int]) -> None:
        self._rings = rings
        self._fds = list(fds)
        self._set = rings.reader_set(fds)

    def wait(self, timeout_s: float | None) -> list[int]:
        """Until a reply was taken or a descriptor is readable, which are given."""
        return self._take(self._set.wait(timeout_s, expects_record=self._rings.expects_reply()))

    def look(self) -> list[int]:
        """Take the replies that are there; gives the descriptors that are readable."""
        return self._take(self._set.look())

    def close(self) -> None:
        """Let a thread take the replies again."""
        self._set.close()
        self._rings.start_receiver()

    def _take(self, found: tuple[list[BroadcastReader], list[int]]) -> list[int]:
        ready, fds = found
        if ready and not self._rings.take(ready):
            self._set.close()
            self._set = self._rings.reader_set(self._fds)
        return fds


def encode_call(call: RpcCall) -> tuple[CallKind, list[Any]]:
    """The kind of a call, and its payload as buffers; raises what pickling raises."""
    payload: Any
    if call.method == "execute_model" and len(call.args) == 1 and not call.kwargs:
        kind, payload = CallKind.EXECUTE_MODEL, call.args[0]
    elif isinstance(call.method, str):
        kind, payload = CallKind.METHOD, (call.args, dict(call.kwargs))
    else:
        kind, payload = CallKind.FUNCTION, (call.method, call.args, dict(call.kwargs))
    return kind, list(encode(payload))
