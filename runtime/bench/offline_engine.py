"""The engine without HTTP and without text: token ids in, token ids out, from one thread.

The processes are those of `vcli serve`. This thread sends all requests, then reads until each has
its last token; it sleeps in the socket meanwhile.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Final, Self

import msgspec

from vcli.runtime.bench.workloads import BenchRequest
from vcli.runtime.config import EngineConfig
from vcli.runtime.errors import EngineDeadError, FailureReport, RequestError
from vcli.runtime.ipc.frames import FrameSocket, frame_pair
from vcli.runtime.launch.core_child import CORE_PATIENCE_S, core_child
from vcli.runtime.messages import (
    SIGN_OF_LIFE,
    ChildMessage,
    ClientMessage,
    CoreMessage,
    EngineFailed,
    EngineOutput,
    EngineOutputs,
    EngineRequest,
    ShutdownCore,
    UtilityCall,
    UtilityReply,
)
from vcli.runtime.process.fork_owner import ForkServer
from vcli.runtime.process.group import ChildGroup
from vcli.runtime.process.left_signals import LeftSignals
from vcli.runtime.process.silence import LOOK_EVERY_S, SilenceWatch
from vcli.runtime.sampling_params import SamplingParams
from vcli.topology.errors import VcliError

_EXTENSION: Final = "vcli.runtime.worker.bench_extension:BenchExtension"
_SEND_S: Final = 60.0
#: the monitor of the processes says how one ended a moment after its socket did
_REPORT_GRACE_S: Final = 1.0
_STOP_S: Final = 1.5


@dataclass(slots=True)
class RequestTimes:
    """One request as this thread saw it: seconds of the monotonic clock."""

    sent_s: float
    token_ids: list[int] = field(default_factory=list)
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    """When tokens came, and how many."""

    @property
    def ttft_s(self) -> float:
        """From the request to its first token."""
        return self.arrivals[0][0] - self.sent_s

    @property
    def itl_s(self) -> list[float]:
        """Time of each later token; tokens that come together share theirs."""
        gaps: list[float] = []
        before_s = self.arrivals[0][0]
        for now_s, count in self.arrivals[1:]:
            gaps += [(now_s - before_s) / count] * count
            before_s = now_s
        return gaps


class OfflineEngine:
    """A started engine, as a context manager; belongs to the thread that makes it."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        on_message: Callable[[ChildMessage], None],
        fork_server: ForkServer | None,
    ) -> None:
        """`on_message` hears of the start-up states, from another thread."""
        self._config = replace(
            config, worker_extension_cls=_EXTENSION, deadlines=config.deadlines.begun()
        )
        self._fork_server = fork_server
        self._on_message = on_message
        self._is_ending = False
        self._left_signals = LeftSignals(lambda: self._is_ending)
        self._children = ChildGroup(on_message=self._take, on_failure=self._on_failure)
        self._failure: FailureReport | None = None
        self._has_failed = threading.Event()
        ours, self._core_end = frame_pair()
        self._frames = FrameSocket(ours)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[CoreMessage] = msgspec.msgpack.Decoder(CoreMessage)
        self._num_sent = 0
        #: What the core said when it was ready.
        self.started: Mapping[str, Any] = {}

    def __enter__(self) -> Self:
        """Start all processes and wait until they are ready.

        Raises:
            StartupError: one failed, died, or was not ready in time.
            UnfitError: the system gives no process.
        """
        try:
            self._start_core()
            deadlines = self._config.deadlines
            (self.started,) = self._children.wait_ready(
                deadlines.start_s, left_s=deadlines.start_left_s(), patience_s=CORE_PATIENCE_S
            )
            self._watch = SilenceWatch(
                "EngineCore",
                self.core_pid,
                stall_s=deadlines.stall_s,
                limit_s=deadlines.execute_model_s,
            )
        except BaseException:
            self._is_ending = True
            self._close(_STOP_S, asked=False)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End all processes; what runs is dropped."""
        self._is_ending = True
        self._children.expect_end()
        # A frame that was cut short, or a core that is gone already: the ladder ends it.
        with contextlib.suppress(OSError, VcliError):
            self._frames.send(self._encoder.encode(ShutdownCore(drain=False)), _STOP_S)
        self._close(_STOP_S)

    @property
    def core_pid(self) -> int:
        """Process id of the engine core."""
        return self._children.pids[0]

    def generate(
        self, requests: Sequence[BenchRequest], *, temperature: float = 0.0
    ) -> list[RequestTimes]:
        """Run the requests together, each to its full length; in their order.

        Raises:
            EngineDeadError: a process died or failed, or the core was silent for too long.
            RequestError: the engine refused a request.
        """
        times: dict[str, RequestTimes] = {}
        for request in requests:
            request_id = f"bench-{self._num_sent}"
            self._num_sent += 1
            message = EngineRequest(
                request_id=request_id,
                prompt_token_ids=request.prompt_token_ids,
                sampling=SamplingParams(
                    temperature=temperature, max_tokens=request.output_tokens, ignore_eos=True
                ),
            )
            times[request_id] = RequestTimes(time.monotonic())
            self._send(message)
        num_open = len(times)
        while num_open:
            outputs = self._receive()
            now_s = time.monotonic()
            if isinstance(outputs, EngineOutputs):
                for output in outputs.outputs:
                    num_open -= _take(times[output.request_id], output, now_s)
        return list(times.values())

    def call_ranks(self, method: str, *, timeout_s: float = 60.0) -> list[Any]:
        """What the worker's method gives on each rank.

        Raises:
            EngineDeadError: a process died, the call failed, or the core was silent for too long.
        """
        self._num_sent += 1
        call_id = self._num_sent
        self._send(
            UtilityCall(
                call_id=call_id, method="collective_rpc", arguments=[method, [], {}, timeout_s]
            )
        )
        while True:
            reply = self._receive()
            if isinstance(reply, UtilityReply) and reply.call_id == call_id:
                if reply.error:
                    raise EngineDeadError(_report(f"{method}: {reply.error}"))
                return list(reply.value)

    def _start_core(self) -> None:
        server = self._fork_server
        link = None if server is None else server.new_link()
        spec = core_child(
            self._config,
            self._core_end.fileno(),
            link_fd=None if link is None else link.fileno(),
        )
        try:
            self._children.start(
                [spec],
                starter=None if server is None else server.starter,
                timeout_s=self._config.deadlines.start_left_s(),
            )
        finally:
            self._core_end.close()
            if link is not None:
                link.close()

    def _send(self, message: ClientMessage) -> None:
        try:
            self._frames.send(self._encoder.encode(message), _SEND_S)
        except ConnectionError:
            raise EngineDeadError(self._cause()) from None

    def _receive(self) -> EngineOutputs | UtilityReply:
        while True:
            try:
                payload = self._frames.recv(LOOK_EVERY_S)
            except TimeoutError:
                self._look()
                continue
            break
        if payload is None:
            raise EngineDeadError(self._cause())
        self._watch.heard()
        message = self._decoder.decode(payload)
        if isinstance(message, EngineFailed):
            self._failure = self._failure or message.report
            raise EngineDeadError(self._failure)
        return message

    def _look(self) -> None:
        """Nothing came for a second: is the core only busy?"""
        report = self._watch.look()
        if report is not None:
            self._failure = self._failure or report
            raise EngineDeadError(self._failure)
        if self._watch.wants_to_ask():
            self._send(SIGN_OF_LIFE)

    def _cause(self) -> FailureReport:
        """Why the core's socket ended."""
        self._has_failed.wait(_REPORT_GRACE_S)
        self._failure = self._failure or _report("the connection to the engine core ended")
        return self._failure

    def _take(self, message: ChildMessage) -> None:
        if not self._left_signals.take(message):
            self._on_message(message)

    def _on_failure(self, report: FailureReport) -> None:
        # In the monitor's thread; whoever reads from the socket sees its end.
        self._failure = self._failure or report
        self._has_failed.set()

    def _close(self, grace_s: float, *, asked: bool = True) -> None:
        self._children.shutdown(grace_s, asked=asked)
        self._frames.close()


def _take(times: RequestTimes, output: EngineOutput, now_s: float) -> bool:
    """Note what came for one request; whether it was the last."""
    if output.finish_reason == "error":
        raise RequestError(output.error or "the engine refused the request")
    if output.new_token_ids:
        times.token_ids += output.new_token_ids
        times.arrivals.append((now_s, len(output.new_token_ids)))
    return output.finish_reason is not None


def _report(message: str) -> FailureReport:
    return FailureReport(process="EngineCore", phase="serving", kind="", message=message)
