"""The engine core's process: serving, calls, and every way to end.

Real child processes where the process matters; its loop in a thread where a test has to reach
into the executor.
"""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Queue
from typing import Any

import msgspec
import pytest

from tests.support.fake_executor import (
    FAULT_BUG,
    FAULT_DIE,
    FAULT_HANG,
    FAULT_RAISE,
    HANGING_START,
    FakeExecutor,
    fake_engine_config,
    killed_report,
)
from tests.support.fake_model import generate_alone
from vcli.runtime.config import DeadlineConfig, EngineConfig
from vcli.runtime.core.core_proc import EngineCoreProc
from vcli.runtime.errors import FailureReport, StartupError
from vcli.runtime.ipc.frames import FrameSocket, frame_pair
from vcli.runtime.messages import (
    AbortRequests,
    ChildMessage,
    ChildState,
    CoreMessage,
    EngineFailed,
    EngineOutput,
    EngineOutputs,
    EngineRequest,
    SchedulerStats,
    ShutdownCore,
    UtilityCall,
    UtilityReply,
)
from vcli.runtime.process.child import ChildSpec
from vcli.runtime.process.group import ChildGroup
from vcli.runtime.sampling_params import SamplingParams
from vcli.runtime.worker.call_messages import RankActivity
from vcli.topology.errors import ExitStatus

WAIT_S = 20.0
ROOT = Path(__file__).resolve().parents[3]


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


# ---- in a real child ------------------------------------------------------------------------


class CoreChild:
    def __init__(self, config: EngineConfig) -> None:
        ours, theirs = frame_pair()
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


@pytest.fixture(autouse=True)
def _children_find_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    # A child searches where its parent does; pytest itself finds the tests without the path.
    monkeypatch.syspath_prepend(str(ROOT))


@pytest.fixture
def child() -> Iterator[CoreChild]:
    child = CoreChild(fake_engine_config())
    try:
        child.ready = child.group.wait_ready(WAIT_S)[0]
        yield child
    finally:
        child.client.frames.close()
        child.group.shutdown(WAIT_S)


@pytest.mark.process
def test_ready_payload_describes_the_engine_and_states_of_workers_are_passed_on(
    child: CoreChild,
) -> None:
    assert child.ready["num_kv_blocks"] == 64
    assert child.ready["block_size"] == 4
    assert child.ready["max_model_len"] == 64
    assert child.ready["effective"]["spin"].startswith("spin_us: ")
    assert child.ready["worker_pids"] == {"Worker_TP0": 4241, "Worker_TP1": 4242}
    assert [report["kind"] for report in child.ready["group_reports"]] == ["TP"]
    workers = {m.process for m in child.messages if isinstance(m, ChildState)}
    assert workers == {"EngineCore", "Worker_TP0", "Worker_TP1"}


@pytest.mark.process
def test_requests_are_served_and_the_core_ends_when_asked(child: CoreChild) -> None:
    child.client.send(request("a", [1, 2, 3]))
    child.client.send(request("b", [4] * 40, max_tokens=9))

    outputs = child.client.outputs_of("a", "b")
    child.client.send(ShutdownCore(drain=False))

    assert tokens_of(outputs["a"]) == generate_alone([1, 2, 3], 4)
    assert tokens_of(outputs["b"]) == generate_alone([4] * 40, 9)
    assert child.exit_code() == 0


@pytest.mark.process
def test_idle_core_does_not_wake_up(child: CoreChild) -> None:
    assert child.client.call("ping").value == child.pid
    before = context_switches(child.pid)

    time.sleep(0.5)  # what is measured, not a wait for anything

    assert context_switches(child.pid) == before


def context_switches(pid: int) -> int:
    """Of all threads; once they have all gone to sleep."""
    tasks = Path(f"/proc/{pid}/task")
    deadline = time.monotonic() + WAIT_S
    while any(" S " not in (task / "stat").read_text() for task in tasks.iterdir()):
        assert time.monotonic() < deadline
    return sum(
        int(line.split()[1])
        for task in tasks.iterdir()
        for line in (task / "status").read_text().splitlines()
        if "voluntary_ctxt_switches" in line
    )


@pytest.mark.process
@pytest.mark.parametrize("how", ["shutdown", "close", "sigterm"])
def test_core_ends_with_status_0_while_requests_run(child: CoreChild, how: str) -> None:
    child.client.send(request("a", [FAULT_HANG, 1, 2]))
    child.client.send(request("b", [1, 2, 3]))
    stats = child.client.call("stats").value  # answered although the step hangs
    assert stats["num_running"] + stats["num_waiting"] == 2

    if how == "shutdown":
        child.client.send(ShutdownCore(drain=False))
    elif how == "sigterm":
        os.kill(child.pid, signal.SIGTERM)
    else:
        child.client.frames.close()

    if how != "close":
        outputs = child.client.outputs_of("a", "b")
        assert [output.finish_reason for output in outputs["a"] + outputs["b"]] == [
            "abort",
            "abort",
        ]
        assert child.client.recv() is None
    assert child.exit_code() == 0


@pytest.mark.process
def test_rank_that_raises_in_a_step_ends_the_core_with_its_traceback(child: CoreChild) -> None:
    child.client.send(request("a", [FAULT_RAISE, 1]))

    report = child.client.failure()

    assert (report.rank, report.kind, report.message) == (1, "ValueError", "ordered")
    assert report.traceback == "Traceback (fake)"
    assert child.failures.get(timeout=WAIT_S).message == "ordered"
    assert child.exit_code() == ExitStatus.DIED_SERVING


@pytest.mark.process
def test_rank_that_dies_while_its_step_is_awaited_ends_the_core(child: CoreChild) -> None:
    child.client.send(request("a", [FAULT_DIE, 1]))

    report = child.client.failure()

    assert (report.rank, report.message, report.exit_code) == (1, "killed by SIGKILL", -9)
    assert child.failures.get(timeout=WAIT_S).process == "Worker_TP1"
    assert child.exit_code() == ExitStatus.DIED_SERVING


@pytest.mark.process
def test_bug_in_the_loop_is_told_with_its_traceback_as_status_7(child: CoreChild) -> None:
    child.client.send(request("a", [FAULT_BUG, 1]))

    report = child.client.failure()

    assert "does not answer step" in report.message
    assert "update_from_output" in report.traceback
    assert child.failures.get(timeout=WAIT_S).exit_status == ExitStatus.BUG
    assert child.exit_code() == ExitStatus.BUG


@pytest.mark.process
def test_step_beyond_every_deadline_ends_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vcli.runtime.core.core_proc._STEP_GRACE_S", 0.1)
    with CoreThread(fake_engine_config(deadlines=DeadlineConfig(execute_model_s=0.1))) as core:
        core.client.send(request("a", [FAULT_HANG, 1]))

        report = core.client.failure()

    assert report.kind == "RpcTimeoutError"
    assert "0.2 s" in report.message
    assert core.status == ExitStatus.DIED_SERVING


@pytest.mark.process
def test_too_small_cache_is_a_usage_error_before_ready() -> None:
    child = CoreChild(fake_engine_config(num_kv_blocks=3))

    with pytest.raises(StartupError) as caught:
        child.group.wait_ready(WAIT_S)

    assert caught.value.exit_status == ExitStatus.USAGE
    assert "max_model_len=64" in caught.value.report.message
    assert "--max-model-len 12" in caught.value.hint
    assert child.exit_code() == ExitStatus.USAGE
    child.client.frames.close()


@pytest.mark.process
def test_sigterm_ends_a_start_that_takes_long() -> None:
    child = CoreChild(fake_engine_config(served_name=HANGING_START))
    deadline = time.monotonic() + WAIT_S
    while not any(message.process == "Worker_TP1" for message in child.messages):
        assert time.monotonic() < deadline
        time.sleep(0.01)  # between looks, with a deadline

    os.kill(child.pid, signal.SIGTERM)

    with pytest.raises(StartupError, match="SIGTERM"):
        child.group.wait_ready(WAIT_S)
    assert child.exit_code() == ExitStatus.TERMINATED
    child.client.frames.close()


# ---- in a thread ----------------------------------------------------------------------------


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


@pytest.fixture
def core() -> Iterator[CoreThread]:
    with CoreThread() as core:
        yield core


def test_worker_that_dies_while_the_core_is_idle_is_told_at_once(core: CoreThread) -> None:
    assert core.client.call("stats").error == ""
    begin_s = time.monotonic()
    core.executor.kill_rank(1)

    report = core.client.failure()

    assert time.monotonic() - begin_s < 1.0
    assert report == killed_report()
    core._thread.join(WAIT_S)
    assert core.status == ExitStatus.DIED_SERVING
    assert core.context.failures == [report]
    assert core.executor.num_shutdowns > 0


def test_drain_refuses_what_comes_and_finishes_what_runs(core: CoreThread) -> None:
    core.executor.gate.clear()
    core.client.send(request("a", [1, 2, 3], max_tokens=50))
    core.client.until_running(1)
    core.client.send(ShutdownCore(drain=True))
    core.client.send(request("b", [1, 2, 3]))

    refused = core.client.outputs_of("b")["b"]
    core.executor.gate.set()
    finished = core.client.outputs_of("a")["a"]

    assert "shutting down" in refused[0].error
    assert tokens_of(finished) == generate_alone([1, 2, 3], 50)
    core._thread.join(WAIT_S)
    assert core.status == ExitStatus.OK


def test_drain_that_lasts_too_long_can_be_cut_short(core: CoreThread) -> None:
    core.client.send(request("a", [FAULT_HANG]))
    core.client.until_running(1)
    core.client.send(ShutdownCore(drain=True))
    core.client.send(ShutdownCore(drain=False))

    assert core.client.outputs_of("a")["a"][0].finish_reason == "abort"
    core._thread.join(WAIT_S)
    assert core.status == ExitStatus.OK


def test_abort_with_nothing_else_running_tells_the_new_state(core: CoreThread) -> None:
    core.client.send(request("a", [FAULT_HANG, 1, 2, 3, 4]))
    core.client.until_running(1)

    core.client.send(AbortRequests(request_ids=["a", "unknown"]))
    core.client.until(lambda message: isinstance(message, EngineOutputs))

    assert core.client.stats.num_running == 0
    assert core.client.stats.num_free_kv_blocks == core.client.stats.num_kv_blocks


def test_request_that_cannot_run_is_answered_and_the_next_one_served(core: CoreThread) -> None:
    core.client.send(request("long", [1] * 64))
    core.client.send(request("wild", [10**6]))
    core.client.send(request("good", [1, 2]))

    outputs = core.client.outputs_of("long", "wild", "good")

    assert "context of 64" in outputs["long"][0].error
    assert "vocabulary" in outputs["wild"][0].error
    assert tokens_of(outputs["good"]) == generate_alone([1, 2], 4)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode([1, 2]),
        msgspec.msgpack.encode({"type": "add"}),
        msgspec.msgpack.encode({"type": "unheard-of", "call_id": "x"}),
    ],
)
def test_unreadable_frame_is_answered_and_not_fatal(core: CoreThread, frame: bytes) -> None:
    core.client.frames.send(frame)

    reply = core.client.until(lambda message: isinstance(message, UtilityReply))

    assert reply.call_id == -1
    assert "cannot read" in reply.error
    assert core.client.call("ping").error == ""


def test_unreadable_request_is_answered_under_its_id(core: CoreThread) -> None:
    core.client.send({"type": "add", "request_id": "a", "prompt_token_ids": "text"})

    outputs = core.client.outputs_of("a")

    assert outputs["a"][0].finish_reason == "error"
    assert core.client.call("ping").error == ""


def test_unreadable_call_is_answered_under_its_id(core: CoreThread) -> None:
    core.client.send({"type": "call", "call_id": 3, "method": 5})

    reply = core.client.until(lambda message: isinstance(message, UtilityReply))

    assert reply.call_id == 3
    assert reply.error


@pytest.mark.parametrize(
    ("method", "arguments", "said"),
    [
        ("no_such", [], "unknown method"),
        ("_serve", [], "unknown method"),
        ("stats", [1, 2], "TypeError"),
        ("collective_rpc", ["load_model"], "may not be called"),
        ("collective_rpc", ["_run"], "may not be called"),
        ("check_health", [0], "timeout_s"),
        ("check_health", ["soon"], "TypeError"),
    ],
)
def test_call_that_is_wrong_is_answered_with_an_error(
    core: CoreThread, method: str, arguments: list[Any], said: str
) -> None:
    reply = core.client.call(method, *arguments)

    assert said in reply.error
    assert core.client.call("ping").error == ""


def test_health_names_the_ranks_that_did_not_answer(core: CoreThread) -> None:
    assert core.client.call("check_health", 0.2).value["answered"] == [0, 1]
    core.executor.stuck_ranks = {1}

    health = core.client.call("check_health", 0.2).value

    assert health["is_healthy"] is False
    assert health["answered"] == [0]
    assert health["missing"] == [1]
    assert "no answer from 1" in health["errors"]["1"]


def test_rank_that_is_only_busy_is_not_missing(core: CoreThread) -> None:
    core.executor.stuck_ranks = {0, 1}
    core.executor.busy_ranks = {1: RankActivity("execute_model", 2.0)}

    health = core.client.call("check_health", 0.2).value

    assert (health["answered"], health["missing"]) == ([], [0])
    assert health["busy"] == {"1": "in execute_model for 2.0 s"}

    core.executor.busy_ranks[0] = RankActivity("check_health", 0.2)
    assert core.client.call("check_health", 0.2).value["missing"] == [0]
    core.executor.busy_ranks[0] = RankActivity("execute_model", 3.0)
    assert core.client.call("check_health", 0.2).value["is_healthy"] is True


def test_requests_go_on_while_health_is_asked(core: CoreThread) -> None:
    core.executor.stuck_ranks = {1}
    core.client.send(UtilityCall(call_id=1, method="check_health", arguments=[30.0]))
    core.client.send(request("a", [1, 2]))

    assert tokens_of(core.client.outputs_of("a")["a"]) == generate_alone([1, 2], 4)


def test_allowed_worker_method_gives_the_values_of_all_ranks(core: CoreThread) -> None:
    assert core.client.call("collective_rpc", "kv_bytes_per_block").value == [1024, 1024]
    reports = core.client.call("collective_rpc", "group_reports").value
    assert reports[1][0]["transport"] == "fake"


def test_second_equal_prompt_computes_only_what_is_new(core: CoreThread) -> None:
    prompt = list(range(1, 22))
    core.client.send(request("a", prompt))
    core.client.outputs_of("a")
    first = core.client.stats

    core.client.send(request("b", prompt))
    outputs = core.client.outputs_of("b")["b"]

    second = core.client.stats
    assert outputs[0].num_cached_tokens == 20
    assert all(output.num_cached_tokens == 0 for output in outputs[1:])
    assert second.computed_prompt_tokens_total - first.computed_prompt_tokens_total == 1
    assert second.prefix_cache_hit_tokens_total == 20
    assert second.prefix_cache_query_tokens_total == 42
    assert core.client.call("reset_prefix_cache").value > 0
    assert core.client.call("check_integrity").value is True
