"""The back end without processes behaves like the one with them."""

import threading
import time
from collections.abc import Iterator

import pytest

from tests.support.fake_worker import (
    FAKE_WORKER,
    FakeWorker,
    Payload,
    fake_config,
    fake_step,
    rank_of,
)
from tests.support.processes import wait_until
from vcli.runtime.config import DeadlineConfig
from vcli.runtime.errors import RpcTimeoutError, StartupError, WorkerError
from vcli.runtime.executor.backends import get_executor_class
from vcli.runtime.executor.base import Executor, RankReply
from vcli.runtime.executor.uniproc import UniProcExecutor
from vcli.runtime.messages import ChildMessage, ChildState, KVCacheConfig
from vcli.topology.errors import ConfigError, ExitStatus


class FailsAtOnce(FakeWorker):
    def load_model(self) -> None:
        raise ConfigError("no such model", hint="name another")


class BreaksInStep(FakeWorker):
    def execute_model(self, output):
        raise ValueError("device-side assert")


class HangsLoading(FakeWorker):
    def load_model(self) -> None:
        self._report("weights", 0.1, "")
        time.sleep(3)


HANGS_LOADING = f"{__name__}:HangsLoading"
FAILS_AT_ONCE = f"{__name__}:FailsAtOnce"
BREAKS_IN_STEP = f"{__name__}:BreaksInStep"


@pytest.fixture
def executor() -> Iterator[UniProcExecutor]:
    executor = UniProcExecutor(fake_config(), on_message=lambda _: None, worker_cls=FAKE_WORKER)
    executor.start()
    yield executor
    executor.shutdown()


def test_start_states_are_reported_in_order() -> None:
    messages: list[ChildMessage] = []
    executor = UniProcExecutor(fake_config(), on_message=messages.append, worker_cls=FAKE_WORKER)
    executor.start()
    states = [message.state for message in messages if isinstance(message, ChildState)]
    assert states == ["device", "joined", "groups", "weights"]


def test_reports_of_the_start_have_the_deadline_of_the_start() -> None:
    asked: dict[str, float] = {}

    class Recording(UniProcExecutor):
        def _submit(self, call):
            asked[call.name] = call.timeout_s
            return super()._submit(call)

    limits = DeadlineConfig(start_s=30.0, execute_model_s=20.0)
    executor = Recording(
        fake_config(deadlines=limits), on_message=lambda _: None, worker_cls=FAKE_WORKER
    )
    executor.start()
    try:
        executor.group_reports()
        executor.memory_reports()
        executor.execute_model(fake_step())
    finally:
        executor.shutdown()
    assert asked == {"group_reports": 30.0, "memory_report": 30.0, "execute_model": 20.0}


def test_step_gives_the_output(executor: UniProcExecutor) -> None:
    result = executor.execute_model(fake_step(7, number=3))
    assert result is not None
    assert (result.step, result.token_ids) == (7, [4])


def test_non_block_returns_while_the_step_runs(executor: UniProcExecutor) -> None:
    busy = executor.collective_rpc("sleep_on", args=([0], 0.2), non_block=True)
    future = executor.execute_model(fake_step(7), non_block=True)
    assert not busy.done()
    assert not future.done()
    assert future.result(5).step == 7
    assert busy.done()


def test_deadline_is_kept_though_the_worker_hangs(executor: UniProcExecutor) -> None:
    with pytest.raises(RpcTimeoutError, match=r"rank 0 \(Worker, in sleep_on for"):
        executor.collective_rpc("sleep_on", args=([0], 0.4), timeout_s=0.1)
    assert executor.collective_rpc("echo", args=("next",)) == ["next"]


def test_worker_that_hangs_in_its_start_is_told_at_the_deadline() -> None:
    config = fake_config(deadlines=DeadlineConfig(start_s=0.2))
    executor = UniProcExecutor(config, on_message=lambda _: None, worker_cls=HANGS_LOADING)
    with pytest.raises(StartupError, match=r"not ready after 0\.2 s") as late:
        executor.start()
    assert late.value.report.phase == "weights"


def test_rpc_gives_a_list_and_with_a_reply_rank_the_value(executor: UniProcExecutor) -> None:
    assert executor.collective_rpc("echo", args=("a",), kwargs={"times": 2}) == ["aa"]
    assert executor.collective_rpc("echo", args=("a",), unique_reply_rank=0) == "a"
    assert executor.collective_rpc(rank_of, args=(5,)) == [5]


def test_start_calls_reach_the_worker(executor: UniProcExecutor) -> None:
    assert executor.determine_available_memory() == [1000]
    executor.initialize_from_config(KVCacheConfig(num_blocks=3, block_size=16))
    executor.compile_or_warm_up_model()
    executor.check_health()
    assert [report.kind for report in executor.group_reports()] == ["TP"]


def test_rank_that_is_only_busy_is_healthy_until_it_counts_as_stuck() -> None:
    executor = UniProcExecutor(
        fake_config(deadlines=DeadlineConfig(stall_s=1.5)),
        on_message=lambda _: None,
        worker_cls=FAKE_WORKER,
    )
    executor.start()
    gate = threading.Event()
    busy = executor.collective_rpc(lambda _: gate.wait(30), non_block=True)
    executor.check_health(timeout_s=0.1)
    wait_until(lambda: executor.busy_with(0) is None, 20)
    with pytest.raises(RpcTimeoutError, match=r"rank 0 .*, in .* for "):
        executor.check_health(timeout_s=0.01)
    gate.set()
    assert busy.result(5) == [True]
    executor.shutdown()


class GatedResult:
    """A result that the device has once the gate is open."""

    def __init__(self, gate: threading.Event) -> None:
        self._gate = gate

    def resolve(self) -> bool:
        return self._gate.wait(30)


def test_rank_is_busy_until_its_device_is_done(executor: UniProcExecutor) -> None:
    gate = threading.Event()
    result = executor.collective_rpc(lambda _: GatedResult(gate), non_block=True)
    # The rank's thread has left the call when it answers the next one.
    assert executor.collective_rpc("echo", args=(1,)) == [1]
    busy = executor.busy_with(0)
    assert busy is not None
    gate.set()
    assert result.result(5) == [True]
    wait_until(lambda: executor.busy_with(0) is None, 20)


class HasNoDevice(FakeWorker):
    def bind_thread(self) -> None:
        raise RuntimeError("no CUDA device in this thread")


def test_a_thread_that_gets_no_device_fails_each_call_that_waits_for_it() -> None:
    executor = UniProcExecutor(
        fake_config(),
        on_message=lambda _: None,
        worker_cls="tests.runtime.executor.test_uniproc:HasNoDevice",
    )
    executor.start()
    gate = threading.Event()
    for _ in range(2):
        with pytest.raises(WorkerError, match="no CUDA device in this thread"):
            executor.collective_rpc(lambda _: GatedResult(gate), timeout_s=20)
    executor.shutdown()


def test_arguments_do_not_live_until_the_next_call(executor: UniProcExecutor) -> None:
    payload = Payload()
    executor.collective_rpc("remember", args=(payload,))
    del payload
    assert executor.collective_rpc("still_has_payload") == [False]


def test_error_of_an_rpc_is_told_and_survived(executor: UniProcExecutor) -> None:
    with pytest.raises(WorkerError, match="ordered on rank 0") as failed:
        executor.collective_rpc("raise_on", args=([0],))
    assert failed.value.report.kind == "ValueError"
    assert "raise_on" in failed.value.report.traceback
    assert not executor.is_failed
    assert executor.collective_rpc("echo", args=(1,)) == [1]


def test_aggregator_gets_what_the_rank_hands_on_though_it_failed(executor: UniProcExecutor) -> None:
    def values(replies: list[RankReply]) -> list[object]:
        return [(reply.rank, reply.value, reply.failure) for reply in replies]

    (reply,) = executor.collective_rpc("fail_and_hand_on", args=([0],), aggregate=values)
    assert reply[:2] == (0, {"saved": 0})
    assert "failed on rank 0" in reply[2].message
    done = executor.collective_rpc("fail_and_hand_on", args=([],), aggregate=values)
    assert done == [(0, "done on rank 0", None)]
    with pytest.raises(WorkerError, match="failed on rank 0"):
        executor.collective_rpc("fail_and_hand_on", args=([0],))
    with pytest.raises(WorkerError, match="ordered on rank 0"):
        executor.collective_rpc("raise_on", args=([0],), aggregate=len)
    assert executor.collective_rpc("echo", args=(1,)) == [1]


@pytest.mark.parametrize("name", ["_private", "__init__", "config", "nothing"])
def test_only_public_methods_can_be_called(executor: UniProcExecutor, name: str) -> None:
    with pytest.raises(ConfigError, match=name) as refused:
        executor.collective_rpc(name)
    assert "execute_model" in refused.value.hint


def test_methods_of_the_extension_can_be_called() -> None:
    config = fake_config(worker_extension_cls="tests.support.fake_worker:FakeExtension")
    executor = UniProcExecutor(config, on_message=lambda _: None, worker_cls=FAKE_WORKER)
    executor.start()
    assert executor.collective_rpc("doubled_rank") == [0]


def test_failed_start_keeps_the_status_of_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = UniProcExecutor(fake_config(), on_message=lambda _: None, worker_cls=FAILS_AT_ONCE)
    with pytest.raises(StartupError, match="no such model") as failed:
        executor.start()
    assert failed.value.exit_status is ExitStatus.USAGE
    assert failed.value.hint == "name another"


def test_failed_step_is_the_end_and_everybody_is_told() -> None:
    executor = UniProcExecutor(fake_config(), on_message=lambda _: None, worker_cls=BREAKS_IN_STEP)
    executor.start()
    early: list[object] = []
    late: list[object] = []
    executor.register_failure_callback(early.append)
    with pytest.raises(WorkerError, match="device-side assert"):
        executor.execute_model(fake_step())
    executor.register_failure_callback(late.append)
    assert executor.is_failed
    assert len(early) == 1
    assert late == early
    with pytest.raises(WorkerError):
        executor.collective_rpc("echo", args=(1,))


def test_back_ends_are_found_by_the_value_of_the_decision() -> None:
    assert get_executor_class("uni") is UniProcExecutor
    assert get_executor_class("mp").__name__ == "MultiprocExecutor"
    assert get_executor_class("vcli.runtime.executor.uniproc.UniProcExecutor") is UniProcExecutor


def test_back_end_that_is_only_planned_is_refused() -> None:
    with pytest.raises(ConfigError, match="serve does not run it yet"):
        get_executor_class("ray")


@pytest.mark.parametrize("path", ["pathlib.Path", "no.such.module", "vcli.runtime.config.Nothing"])
def test_path_without_an_executor_is_refused(path: str) -> None:
    with pytest.raises(ConfigError):
        get_executor_class(path)


def test_interface_can_not_be_made_itself() -> None:
    with pytest.raises(TypeError):
        Executor(fake_config(), on_message=lambda _: None)
