"""The engine core's end of the socket to its client. Nothing here waits for the client.

client --frames--> read(), by the core's loop --ClientMessage--> inbox
client <--frames-- send(), by any thread; what the socket does not take, by the output thread
"""

import socket
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import msgspec

from vcli.runtime.core.core_events import ClientGone, CoreEvent
from vcli.runtime.core.request import FinishReason
from vcli.runtime.errors import FailureReport
from vcli.runtime.ipc.frames import FrameError, FrameParser, FrameSocket
from vcli.runtime.log import get_logger
from vcli.runtime.messages import (
    ClientMessage,
    CoreMessage,
    EngineFailed,
    EngineOutput,
    EngineOutputs,
    UtilityReply,
)

logger = get_logger(__name__)

_READ_BYTES = 1 << 20

UNKNOWN_CALL = -1
"""`call_id` of the reply to a frame that could not be read at all."""


class ClientChannel:
    """What comes is given to `put`. A frame that makes no sense is answered, not fatal."""

    def __init__(self, client: socket.socket, put: Callable[[CoreEvent], None]) -> None:
        self._client = client
        self._frames = FrameSocket(client)
        self._parser = FrameParser()
        self._decoder: msgspec.msgpack.Decoder[ClientMessage] = msgspec.msgpack.Decoder(
            ClientMessage
        )
        self._encoder = msgspec.msgpack.Encoder()
        self._put = put
        self._outbox: SimpleQueue[tuple[memoryview, bytes] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._num_queued = 0
        self._has_ended = False
        self._output = threading.Thread(target=self._write, name="core-output", daemon=True)

    def fileno(self) -> int:
        """What is readable when `read` has something to do."""
        return self._frames.fileno()

    def read(self) -> None:
        """Put what has come; at the end of the stream that the client is gone."""
        try:
            data = self._client.recv(_READ_BYTES, socket.MSG_DONTWAIT)
            frames = self._parser.feed(data)
        except BlockingIOError:
            return
        except (OSError, FrameError) as error:
            logger.warning("client socket broke: %s", error)
            data, frames = b"", []
        if not data:
            if not self._parser.is_between_frames:
                logger.warning("the client went away in the middle of a frame")
            self._put(ClientGone())
        for frame in frames:
            try:
                self._put(self._decoder.decode(frame))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                logger.warning("frame of %d bytes refused: %s", len(frame), error)
                self.send(_refusal(frame, f"the engine core cannot read this message: {error}"))

    def send(self, message: CoreMessage) -> None:
        """Send a message, or queue it; after `fail` or `close` it is dropped."""
        with self._lock:
            if not self._has_ended:
                self._send(message)

    def fail(self, report: FailureReport) -> None:
        """Send the last message; only the first failure is told."""
        with self._lock:
            if not self._has_ended:
                self._has_ended = True
                self._send(EngineFailed(report=report))

    def close(self, timeout_s: float) -> None:
        """Write what is queued, as far as the client reads it in time, and close the socket."""
        with self._lock:
            self._has_ended = True
            self._outbox.put(None)
        if self._output.ident is not None:
            self._output.join(timeout_s)
            if self._output.is_alive():
                logger.warning("client did not read its last messages within %.1f s", timeout_s)
        self._frames.close()

    def _send(self, message: CoreMessage) -> None:
        # At once if the socket takes it: a wake-up less than by the output thread.
        payload = self._encoder.encode(message)
        if self._num_queued:
            self._queue(memoryview(b""), payload)
            return
        try:
            rest = self._frames.send_now(payload)
        except OSError as error:
            self._client_left(error)
        else:
            if rest:
                self._queue(rest, b"")

    def _queue(self, rest: memoryview, payload: bytes) -> None:
        self._num_queued += 1
        self._outbox.put((rest, payload))
        if self._output.ident is None:
            self._output.start()

    def _write(self) -> None:
        while (item := self._outbox.get()) is not None:
            rest, payload = item
            try:
                if rest:
                    self._frames.send_rest(rest)
                else:
                    self._frames.send(payload)
            except OSError as error:
                self._client_left(error)
                return
            with self._lock:
                self._num_queued -= 1

    def _client_left(self, error: OSError) -> None:
        # The reader sees the same end; what is still queued has nobody to go to.
        logger.info("client is gone, messages are dropped: %s", error)
        self._has_ended = True
        self._put(ClientGone())


def _refusal(frame: bytes, error: str) -> CoreMessage:
    """An answer that reaches whoever waits for one, as far as the frame still names it."""
    fields = _fields_of(frame)
    request_id = fields.get("request_id")
    if isinstance(request_id, str):
        refused = EngineOutput(
            request_id=request_id,
            new_token_ids=[],
            finish_reason=str(FinishReason.ERROR),
            error=error,
        )
        return EngineOutputs(outputs=[refused])
    call_id = fields.get("call_id")
    return UtilityReply(call_id=call_id if isinstance(call_id, int) else UNKNOWN_CALL, error=error)


def _fields_of(frame: bytes) -> dict[Any, Any]:
    try:
        fields = msgspec.msgpack.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}
    return fields if isinstance(fields, dict) else {}
