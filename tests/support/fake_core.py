"""An engine core without a model: a thread that speaks the client's protocol over a real socket.

It answers every request with the tokens that `script` gives for it, one token per step, and
records what the client sent.
"""

import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from vcli.runtime.errors import FailureReport
from vcli.runtime.ipc.frames import FrameSocket, frame_pair
from vcli.runtime.messages import (
    AbortRequests,
    ClientMessage,
    CoreMessage,
    EngineFailed,
    EngineOutput,
    EngineOutputs,
    EngineRequest,
    SchedulerStats,
    ShutdownCore,
    TokenLogprobs,
    UtilityCall,
    UtilityReply,
)

Script = Callable[[EngineRequest], Sequence[int]]

HEALTHY = {"is_healthy": True, "answered": [0], "missing": [], "errors": {}}


class FakeCore:
    """Use as a context manager; give `client_socket` to the client.

    A request ends with the first eos token after its script (finish `stop`), at max_tokens
    (`length`), or, with `holds_after=k`, never: it stays open after k tokens.
    """

    def __init__(self, script: Script, *, holds_after: int | None = None) -> None:
        self.client_socket, core_socket = frame_pair()
        self._socket = core_socket
        self._frames = FrameSocket(core_socket)
        self._script = script
        self._holds_after = holds_after
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="fake-core", daemon=True)
        self.requests: list[EngineRequest] = []
        self.aborted: list[str] = []
        self.shutdowns: list[ShutdownCore] = []
        self.replies: dict[str, Any] = {"check_health": HEALTHY}
        self.num_generated = 0
        self.refusal = ""
        #: what stands behind the sampled token among the most likely ones
        self.likely: Sequence[int] = (0, 1)

    def __enter__(self) -> "FakeCore":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.die()
        self._thread.join(5)
        assert not self._thread.is_alive()

    def die(self) -> None:
        """End the connection without a word, as a killed process does."""
        self._frames.close()

    def fail(self, report: FailureReport) -> None:
        """Say that the engine is dead; the connection stays open."""
        self._send(EngineFailed(report=report))

    def send_raw(self, payload: bytes) -> None:
        """Send a frame that may be no message."""
        self._frames.send(payload, 5)

    def wait(self, condition: Callable[["FakeCore"], bool], timeout_s: float = 5) -> None:
        """Until `condition(self)` holds; fails the test otherwise."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not condition(self):
                left = deadline - time.monotonic()
                assert left > 0, f"not seen: requests={self.requests} aborted={self.aborted}"
                self._changed.wait(left)

    def _run(self) -> None:
        decoder = msgspec.msgpack.Decoder(ClientMessage)
        while True:
            try:
                frame = self._frames.recv()
                if frame is None:
                    return
                self._handle(decoder.decode(frame))
            except OSError:  # closed by `die`, here or while sending
                return

    def _handle(self, message: ClientMessage) -> None:
        match message:
            case EngineRequest():
                self._record(self.requests, [message])
                self._answer(message)
            case AbortRequests():
                self._record(self.aborted, message.request_ids)
            case ShutdownCore():
                self._record(self.shutdowns, [message])
            case UtilityCall():
                self._reply(message)

    def _record(self, log: list[Any], entries: Sequence[Any]) -> None:
        with self._changed:
            log.extend(entries)
            self._changed.notify_all()

    def _reply(self, call: UtilityCall) -> None:
        value = self.replies.get(call.method)
        if value is None:
            self._send(UtilityReply(call_id=call.call_id, error=f"no method {call.method}"))
        elif value != "silence":
            self._send(UtilityReply(call_id=call.call_id, value=value))

    def _answer(self, request: EngineRequest) -> None:
        if self.refusal:
            refused = EngineOutput(
                request_id=request.request_id,
                new_token_ids=[],
                finish_reason="error",
                error=self.refusal,
            )
            self._send(EngineOutputs(outputs=[refused], stats=self._stats()))
            return
        tokens = [*self._script(request), *request.eos_token_ids[:1]]
        limit = request.sampling.max_tokens
        assert limit is not None
        for place, token in enumerate(tokens[:limit]):
            if place == self._holds_after:
                return
            self.num_generated += 1
            is_stop = place == len(tokens) - 1 or token in request.sampling.stop_token_ids
            finish = "stop" if is_stop else "length" if place + 1 == limit else None
            output = _output(request, token, finish, place, self.likely)
            self._send(EngineOutputs(outputs=[output], stats=self._stats()))
            if finish:
                return

    def _stats(self) -> SchedulerStats:
        return SchedulerStats(
            num_running=1,
            num_kv_blocks=100,
            num_free_kv_blocks=75,
            generation_tokens_total=self.num_generated,
        )

    def _send(self, message: CoreMessage) -> None:
        self._frames.send(msgspec.msgpack.encode(message), 5)


def _output(
    request: EngineRequest, token: int, finish: str | None, place: int, likely: Sequence[int]
) -> EngineOutput:
    logprobs = None
    if request.sampling.logprobs is not None:
        others = [number for number in likely if number != token]
        top = [token, *others][: request.sampling.logprobs]
        values = [-0.5, *([float("-inf")] * len(others))]
        logprobs = [TokenLogprobs(token, -0.5, top, values[: len(top)])]
    return EngineOutput(
        request_id=request.request_id,
        new_token_ids=[token],
        finish_reason=finish,
        stop_token_id=token if finish == "stop" else None,
        num_cached_tokens=2 if place == 0 else 0,
        logprobs=logprobs,
    )


def closed_socket() -> socket.socket:
    """A client's end whose core is gone."""
    client, core = frame_pair()
    core.close()
    return client
