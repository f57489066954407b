"""An engine core with fake ranks, in a child or a thread, and the client at its other end."""

import socket
import threading
import time
from collections.abc import Callable
from queue import Queue
from typing import Any

import msgspec

from tests.support.fake_executor import (
    FakeExecutor,
    fake_engine_config,
)
from vcli.runtime.config import EngineConfig
from vcli.runtime.core.core_proc import EngineCoreProc
from vcli.runtime.errors import FailureReport
from vcli.runtime.ipc.frames import FrameSocket, frame_pair
from vcli.runtime.messages import (
    ChildMessage,
    CoreMessage,
    EngineFailed,
    EngineOutput,
    EngineOutputs,
    EngineRequest,
    SchedulerStats,
    UtilityCall,
    UtilityReply,
)
from vcli.runtime.process.child import ChildSpec
from vcli.runtime.process.group import ChildGroup
from vcli.runtime.sampling_params import SamplingParams
from vcli.topology.errors import ExitStatus

WAIT_S = 20.0


def request(request_id: str, prompt: list[int], **sampling: Any) -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling=SamplingParams(**{"max_tokens": 4, **sampling}),
    )


class Client:
    """The other end of the core's socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.frames = FrameSocket(sock)
        self.decoder = msgspec.msgpack.Decoder(CoreMessage)
        self.stats = SchedulerStats()

    def send(self, message: Any) -> None:
        self.frames.send(msgspec.msgpack.encode(message))

    def recv(self) -> CoreMessage | None:
        frame = self.frames.recv(WAIT_S)
        if frame is None:
            return None
        message = self.decoder.decode(frame)
        if isinstance(message, EngineOutputs):
            self.stats = message.stats
        return message

    def until(self, wanted: Callable[[CoreMessage], bool]) -> CoreMessage:
        while True:
            message = self.recv()
            assert message is not None, "the core closed its socket"
            if wanted(message):
                return message

    def outputs_of(self, *request_ids: str) -> dict[str, list[EngineOutput]]:
        """All outputs until each of the requests has ended."""
        found: dict[str, list[EngineOutput]] = {name: [] for name in request_ids}
        missing = set(request_ids)
        while missing:
            message = self.until(lambda message: isinstance(message, EngineOutputs))
            for output in message.outputs:
                found[output.request_id].append(output)
                if output.finish_reason is not None:
                    missing.remove(output.request_id)
        return found

    def call(self, method: str, *arguments: Any) -> UtilityReply:
        self.send(UtilityCall(call_id=7, method=method, arguments=list(arguments)))
        reply = self.until(lambda message: isinstance(message, UtilityReply))
        assert reply.call_id == 7
        return reply

    def until_running(self, num_running: int) -> None:
        """Wait until a step with this many requests has been handed to the workers."""
        deadline = time.monotonic() + WAIT_S
        while self.call("stats").value["num_running"] != num_running:
            assert time.monotonic() < deadline

    def failure(self) -> FailureReport:
        failed = self.until(lambda message: isinstance(message, EngineFailed))
        assert self.recv() is None, "a failure is the last message"
        return failed.report


def tokens_of(outputs: list[EngineOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.new_token_ids]


class CoreChild:
    def __init__(self, config: EngineConfig) -> None:
        ours, theirs = frame_pair()
        self.socket = ours
        self.client = Client(ours)
        self.messages: list[ChildMessage] = []
        self.failures: Queue[FailureReport] = Queue()
        self.group = ChildGroup(self.messages.append, self.failures.put)
        self.group.start(
            [
                ChildSpec(
                    target="tests.support.fake_executor:fake_core_main",
                    arguments=(config, theirs.fileno()),
                    title="EngineCore",
                    pass_fds=(theirs.fileno(),),
                    log_level="WARNING",
                )
            ]
        )
        theirs.close()

    @property
    def pid(self) -> int:
        return self.group.pids[0]

    def exit_code(self) -> int | None:
        """Of a core that was asked to end, or ends by itself."""
        self.group.shutdown(WAIT_S)
        return self.group.exit_codes[0]


class FakeContext:
    """What the core needs of its ChildContext."""

    title = "EngineCore"

    def __init__(self) -> None:
        self.ready_payloads: Queue[Any] = Queue()
        self.failures: list[FailureReport] = []

    def ready(self, payload: Any = None) -> None:
        self.ready_payloads.put(payload)

    def fail(self, report: FailureReport) -> None:
        self.failures.append(report)

    def forward(self, message: ChildMessage) -> None:
        pass

    def set_phase(self, name: str) -> None:
        pass

    def seconds(self) -> float:
        return 0.0


class CoreThread:
    """The core's loop in a thread of the test; `executor` is its executor."""

    def __init__(self, config: EngineConfig | None = None) -> None:
        ours, theirs = frame_pair()
        self.client = Client(ours)
        self.context = FakeContext()
        self.status: ExitStatus | None = None
        core = EngineCoreProc(self.context, config or fake_engine_config(), theirs, FakeExecutor)
        self.executor: FakeExecutor = core._executor
        self._thread = threading.Thread(target=self._run, args=(core,), daemon=True)

    def _run(self, core: EngineCoreProc) -> None:
        self.status = core.run()

    def __enter__(self) -> "CoreThread":
        self._thread.start()
        self.context.ready_payloads.get(timeout=WAIT_S)
        return self

    def __exit__(self, *_: object) -> None:
        self.client.frames.close()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
