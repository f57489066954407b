"""The engine core's end of the socket to its client: one thread reads, one writes.

client --frames--> input thread --ClientMessage--> inbox (the core's loop takes from it)
client <--frames-- output thread <--CoreMessage-- send(), from any thread
"""

import contextlib
import socket
import threading
from queue import SimpleQueue
from typing import Any

import msgspec

from vcli.runtime.core.core_events import ClientGone, CoreEvent
from vcli.runtime.core.request import FinishReason
from vcli.runtime.errors import FailureReport
from vcli.runtime.ipc.frames import FrameError, FrameSocket
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

UNKNOWN_CALL = -1
"""`call_id` of the reply to a frame that could not be read at all."""


class ClientChannel:
    """Threads around the client's socket. A frame that makes no sense is answered, not fatal."""

    def __init__(self, client: socket.socket, inbox: "SimpleQueue[CoreEvent]") -> None:
        self._client = client
        self._frames = FrameSocket(client)
        self._inbox = inbox
        self._outbox: SimpleQueue[CoreMessage | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._has_ended = False
        self._input = threading.Thread(target=self._read, name="core-input", daemon=True)
        self._output = threading.Thread(target=self._write, name="core-output", daemon=True)

    def start(self) -> None:
        """Start reading and writing."""
        self._input.start()
        self._output.start()

    def send(self, message: CoreMessage) -> None:
        """Queue a message; after `fail` or `close` it is dropped."""
        with self._lock:
            if not self._has_ended:
                self._outbox.put(message)

    def fail(self, report: FailureReport) -> None:
        """Queue the last message; only the first failure is told."""
        with self._lock:
            if not self._has_ended:
                self._has_ended = True
                self._outbox.put(EngineFailed(report=report))

    def close(self, timeout_s: float) -> None:
        """Write what is queued, as far as the client reads it in time, and close the socket."""
        with self._lock:
            self._has_ended = True
            self._outbox.put(None)
        if self._output.ident is not None:
            self._output.join(timeout_s)
            if self._output.is_alive():
                logger.warning("client did not read its last messages within %.1f s", timeout_s)
        # The reader has to see the end before its descriptor is gone.
        with contextlib.suppress(OSError):  # the client closed first
            self._client.shutdown(socket.SHUT_RDWR)
        if self._input.ident is not None:
            self._input.join(timeout_s)
        self._frames.close()

    def _read(self) -> None:
        decoder = msgspec.msgpack.Decoder(ClientMessage)
        while True:
            try:
                frame = self._frames.recv()
            except (OSError, FrameError) as error:
                logger.warning("client socket broke: %s", error)
                frame = None
            if frame is None:
                self._inbox.put(ClientGone())
                return
            try:
                self._inbox.put(decoder.decode(frame))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                logger.warning("frame of %d bytes refused: %s", len(frame), error)
                self.send(_refusal(frame, f"the engine core cannot read this message: {error}"))

    def _write(self) -> None:
        encoder = msgspec.msgpack.Encoder()
        while (message := self._outbox.get()) is not None:
            try:
                self._frames.send(encoder.encode(message))
            except OSError as error:
                # The reader sees the same end; what is still queued has nobody to go to.
                logger.info("client is gone, messages are dropped: %s", error)
                self._inbox.put(ClientGone())
                return


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
