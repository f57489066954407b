"""A worker's answers: at once, or by a thread that waits for the device while the next call runs.

A method whose result is still on its way from the device gives a `PendingResult`; the thread
resolves it and sends the reply. Replies leave in the order of the calls.
"""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Protocol, runtime_checkable

import msgspec

from vcli.runtime.errors import FailedWithOutput
from vcli.runtime.ipc.broadcast import BroadcastWriter
from vcli.runtime.ipc.codec import encode
from vcli.runtime.log import get_logger
from vcli.runtime.process.child import ChildContext
from vcli.runtime.process.failures import report_error
from vcli.runtime.worker.call_messages import ALL_RANKS, CallHeader, ReplyHeader

logger = get_logger(__name__)

#: The driver always reads replies; one that doesn't for so long is as good as gone.
_REPLY_TIMEOUT_S = 60.0


@runtime_checkable
class PendingResult(Protocol):
    """A result that some device still computes."""

    def resolve(self) -> Any:
        """Wait for the result, in another thread than the one that made this."""


class ReplySender:
    """Sends the replies of `rank`. `bind_thread` makes the thread use the worker's device."""

    def __init__(
        self,
        context: ChildContext,
        rank: int,
        replies: BroadcastWriter,
        *,
        bind_thread: Callable[[], None],
    ) -> None:
        self._context = context
        self._rank = rank
        self._replies = replies
        self._bind_thread = bind_thread
        self._queue: SimpleQueue[tuple[CallHeader, Any] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._num_waiting = 0
        self.on_idle: Callable[[], None] = lambda: None
        """Called by the thread of late replies when none is left."""

    @property
    def is_waiting(self) -> bool:
        """Whether a result is still on its way from the device."""
        return self._num_waiting > 0

    def send(self, header: CallHeader, result: Any) -> None:
        """Answer a call. A result that can't be sent is a failure of its call."""
        with self._lock:
            is_later = self._num_waiting > 0 or isinstance(result, PendingResult)
            self._num_waiting += is_later
        if not is_later:
            self._send(header, result)
            return
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._send_later, name="worker-replies", daemon=True
            )
            self._thread.start()
        self._queue.put((header, result))

    def fail(self, header: CallHeader, error: Exception) -> None:
        """Tell that a call failed, at once, and whoever was to answer it."""
        logger.info("call failed method=%s", header.method, exc_info=error)
        report = report_error(
            error,
            process=self._context.title,
            phase=header.method,
            rank=self._rank,
            is_serving=True,
        )
        output: list[Any] = []
        if isinstance(error, FailedWithOutput):
            output = list(encode(error.output))
        answer = ReplyHeader(header.call_id, report, bool(output))
        self._replies.send([msgspec.msgpack.encode(answer), *output], _REPLY_TIMEOUT_S)

    def close(self, timeout_s: float) -> None:
        """Send what waits, as far as it comes in time."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(timeout_s)

    def _send(self, header: CallHeader, result: Any) -> None:
        if header.reply_rank not in (ALL_RANKS, self._rank):
            return
        try:
            reply = list(encode(result))
        except Exception as error:  # noqa: BLE001 - border: pickling runs foreign code
            self.fail(header, error)
            return
        answer = ReplyHeader(header.call_id)
        self._replies.send([msgspec.msgpack.encode(answer), *reply], _REPLY_TIMEOUT_S)

    def _send_later(self) -> None:
        try:
            self._bind_thread()
            while (item := self._queue.get()) is not None:
                self._resolve_and_send(*item)
                # Nothing of a result lives while the next one is waited for.
                del item
                with self._lock:
                    self._num_waiting -= 1
                if not self.is_waiting:
                    self.on_idle()
        except Exception as error:  # noqa: BLE001 - border: without this thread no reply comes
            self._context.fail_with(error)

    def _resolve_and_send(self, header: CallHeader, result: Any) -> None:
        if isinstance(result, PendingResult):
            try:
                result = result.resolve()
            except Exception as error:  # noqa: BLE001 - border: as in the worker's loop
                self.fail(header, error)
                return
        self._send(header, result)
