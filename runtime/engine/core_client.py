"""The front end's end of the socket to the engine core.

Two tasks own the socket, one per direction, so that posting a message needs no await and works in
the clean-up of a cancelled request. The engine counts as dead after the first of: the core says so
(`EngineFailed`), the socket ends, somebody who watches processes calls `fail`, or one of the two
tasks fails by a bug of ours, which must not end in silence.
"""

import asyncio
import contextlib
import itertools
import socket
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from vcli.runtime.errors import EngineDeadError, FailureReport, RequestError, RpcTimeoutError
from vcli.runtime.ipc.frames import MAX_FRAME_BYTES, AsyncFrames
from vcli.runtime.log import get_logger
from vcli.runtime.messages import (
    SIGN_OF_LIFE,
    ClientMessage,
    CoreMessage,
    EngineFailed,
    EngineOutputs,
    ShutdownCore,
    UtilityCall,
    UtilityReply,
)
from vcli.topology.errors import ExitStatus, VcliError
from vcli.topology.names import API_SERVER

logger = get_logger(__name__)

#: `FailureReport.process` of a failure on this end of the socket
FRONT_END = API_SERVER
#: The process monitor sees the exit status a moment after the socket ends; its report names the
#: signal, so it is worth this wait.
_REPORT_GRACE_S = 0.3


class CoreCallError(VcliError):
    """A method of the engine core raised; the core itself is well."""

    exit_status = ExitStatus.DIED_SERVING


class CoreClient:
    """Sends `ClientMessage`s and hands `EngineOutputs` to `on_outputs`; notices the core's death.

    All methods belong to the event loop's thread.
    """

    def __init__(
        self,
        core_socket: socket.socket,
        *,
        on_outputs: Callable[[EngineOutputs], None],
        on_failure: Callable[[FailureReport], None],
    ) -> None:
        self._socket = core_socket
        self._on_outputs = on_outputs
        self._on_failure = on_failure
        self._frames: AsyncFrames | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._outgoing: deque[bytes] = deque()
        self._has_outgoing = asyncio.Event()
        self._has_failed = asyncio.Event()
        self._is_shutting_down = False
        self._call_ids = itertools.count(1)
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[CoreMessage] = msgspec.msgpack.Decoder(CoreMessage)
        self.num_heard = 0
        """Messages of the core so far."""
        self.failure: FailureReport | None = None
        self.has_left_as_asked = False
        """Whether `failure` is only the end that `ShutdownCore` asked for."""

    def start(self) -> None:
        """Begin to send and receive, in the running event loop."""
        self._frames = AsyncFrames(self._socket)
        self._tasks = [
            asyncio.create_task(self._receive(self._frames), name="core-receive"),
            asyncio.create_task(self._send(self._frames), name="core-send"),
        ]

    def post(self, message: ClientMessage) -> None:
        """Queue a message for the core; in order, never blocks; dropped when the engine is dead.

        Raises:
            RequestError: a value in it cannot be sent; the engine is well.
        """
        if self.failure is not None:
            return
        payload = self._encode(message)
        if isinstance(message, ShutdownCore):
            self._is_shutting_down = True
        self._outgoing.append(payload)
        self._has_outgoing.set()

    @property
    def num_calls(self) -> int:
        """Calls that wait for the core's answer."""
        return len(self._calls)

    def ask_for_sign_of_life(self) -> None:
        """Have the core's loop say something, whatever its workers do."""
        self.post(SIGN_OF_LIFE)

    async def call(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        """The value that the core's method gives.

        Raises:
            CoreCallError: the method raised.
            RpcTimeoutError: no answer within `timeout_s`.
            EngineDeadError: the engine is dead, or died meanwhile.
        """
        if self.failure is not None:
            raise EngineDeadError(self.failure)
        call_id = next(self._call_ids)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        try:
            self.post(UtilityCall(call_id=call_id, method=method, arguments=list(arguments)))
            return await asyncio.wait_for(future, timeout_s)
        except TimeoutError as error:
            raise RpcTimeoutError(
                f"the engine core did not answer {method} within {timeout_s:g} s"
            ) from error
        finally:
            del self._calls[call_id]

    def fail(self, report: FailureReport) -> None:
        """Declare the engine dead; the first report counts, later ones change nothing."""
        if self.failure is not None:
            return
        self.failure = report
        self._has_failed.set()
        self._outgoing.clear()
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineDeadError(report))
        self._on_failure(report)

    async def close(self) -> None:
        """Stop both tasks and close the socket."""
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._tasks = []
        if self._frames is None:
            self._socket.close()
        else:
            self._frames.close()

    async def _receive(self, frames: AsyncFrames) -> None:
        cause = "the connection to the engine core ended"
        try:
            while (payload := await frames.recv()) is not None:
                self._handle(self._decoder.decode(payload))
        except (OSError, VcliError) as error:
            cause = f"the connection to the engine core broke: {error}"
        except Exception as error:  # noqa: BLE001 - a task that ends in silence hangs every request
            self._fail_here("reading from the engine core", error)
            return
        await self._fail_after_grace(cause)

    async def _send(self, frames: AsyncFrames) -> None:
        try:
            while True:
                await self._has_outgoing.wait()
                self._has_outgoing.clear()
                while self._outgoing:
                    await frames.send(self._outgoing.popleft())
        except (OSError, VcliError) as error:
            await self._fail_after_grace(f"the connection to the engine core broke: {error}")
        except Exception as error:  # noqa: BLE001 - a task that ends in silence hangs every request
            self._fail_here("writing to the engine core", error)

    def _encode(self, message: ClientMessage) -> bytes:
        """Here and not in the task that sends: the error belongs to the caller alone."""
        try:
            payload = self._encoder.encode(message)
        except (OverflowError, ValueError, TypeError) as error:
            raise RequestError(f"a value cannot be sent to the engine core: {error}") from error
        if len(payload) > MAX_FRAME_BYTES:
            raise RequestError(
                f"the request has {len(payload)} bytes for the engine core, "
                f"at most {MAX_FRAME_BYTES} can be sent"
            )
        return payload

    def _fail_here(self, phase: str, error: Exception) -> None:
        logger.error("front end failed phase=%s", phase, exc_info=error)
        self.fail(
            FailureReport(
                process=FRONT_END,
                phase=phase,
                kind=type(error).__name__,
                message=str(error),
                traceback="".join(traceback.format_exception(error)),
            )
        )

    async def _fail_after_grace(self, cause: str) -> None:
        if not self._is_shutting_down:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._has_failed.wait(), _REPORT_GRACE_S)
        self.has_left_as_asked = self._is_shutting_down and self.failure is None
        self.fail(
            FailureReport(
                process="EngineCore",
                phase="shutdown" if self._is_shutting_down else "serving",
                kind="",
                message="it was shut down" if self._is_shutting_down else cause,
            )
        )

    def _handle(self, message: CoreMessage) -> None:
        self.num_heard += 1
        match message:
            case EngineOutputs():
                self._on_outputs(message)
            case UtilityReply():
                self._handle_reply(message)
            case EngineFailed():
                self.fail(message.report)

    def _handle_reply(self, reply: UtilityReply) -> None:
        future = self._calls.get(reply.call_id)
        if future is None or future.done():
            logger.debug("late reply dropped call_id=%d", reply.call_id)
        elif reply.error:
            future.set_exception(CoreCallError(reply.error))
        else:
            future.set_result(reply.value)
