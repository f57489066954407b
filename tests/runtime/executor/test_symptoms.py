"""Known faults of other engines, each by its symptom, and the right behaviour here.

The numbers are those of the list of known faults: 1 hang after an error on a silent rank, 2 old
data after a failed call, 3 workers outlive the process above, 18 groups used before they are
made, 24 start fails without a cause, 32 health says 200 with dead workers, 33 a wrong rank is
taken for another one, 34 ranks that were planned do nothing.
"""

import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import fake_worker
from tests.support.fake_worker import fake_config, fake_step
from tests.support.tiny_model import tiny_checkpoint
from tests.support.worker_steps import engine_config, kv_config
from vcli.runtime.config import DeadlineConfig
from vcli.runtime.errors import (
    RpcTimeoutError,
    StartupError,
    WorkerDiedError,
    WorkerError,
)
from vcli.runtime.executor.base import RankReply
from vcli.runtime.executor.multiproc import MultiprocExecutor
from vcli.runtime.worker.worker import PhaseError, Worker
from vcli.topology.config import ParallelConfig
from vcli.topology.errors import ConfigError

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[3]
Make = Callable[..., MultiprocExecutor]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[MultiprocExecutor] = []

    def make(worker_cls: str = "FakeWorker", **deadlines: float) -> MultiprocExecutor:
        limits = {"start_s": 30.0, "execute_model_s": 20.0, "shutdown_s": 3.0, **deadlines}
        executor = MultiprocExecutor(
            fake_config(2, deadlines=DeadlineConfig(**limits), log_level="CRITICAL"),
            on_message=lambda _: None,
            worker_cls=f"tests.support.fake_worker:{worker_cls}",
            ring_bytes=1 << 18,
        )
        made.append(executor)
        return executor

    yield make
    for executor in made:
        executor.shutdown()


@pytest.fixture
def started(make: Make) -> MultiprocExecutor:
    executor = make()
    executor.start()
    return executor


def test_1_error_on_a_rank_that_does_not_reply_does_not_hang_until_the_deadline(
    started: MultiprocExecutor,
) -> None:
    begin_s = time.monotonic()
    with pytest.raises(WorkerError, match="device-side assert on rank 1"):
        started.execute_model(fake_step(number=fake_worker.STEP_RAISES_ON_RANK_1))
    assert time.monotonic() - begin_s < 1.0


def test_2_call_after_a_failed_and_a_late_one_does_not_get_their_data(
    started: MultiprocExecutor,
) -> None:
    with pytest.raises(WorkerError):
        started.collective_rpc("raise_on", args=([1],))
    with pytest.raises(RpcTimeoutError):
        started.collective_rpc("sleep_on", args=([0, 1], 0.3), timeout_s=0.1)
    assert started.collective_rpc("echo", args=("new",)) == ["new", "new"]


def test_3_workers_do_not_outlive_the_process_that_started_them() -> None:
    script = (
        "import sys\n"
        "from tests.support.fake_worker import FAKE_WORKER, fake_config\n"
        "from vcli.runtime.executor.colocated import ColocatedExecutor\n"
        "executor = ColocatedExecutor(\n"
        "    fake_config(3), on_message=lambda _: None, worker_cls=FAKE_WORKER)\n"
        "executor.start()\n"
        "print(*executor.worker_pids.values(), flush=True)\n"
        "sys.stdin.read()\n"
    )
    driver = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert driver.stdout is not None
    pids = [int(word) for word in driver.stdout.readline().split()]
    watched = [os.pidfd_open(pid) for pid in pids]
    driver.kill()
    driver.communicate()
    assert len(pids) == 2
    deadline = time.monotonic() + 3.0
    while any(fake_worker.exists(pid) for pid in pids):
        assert time.monotonic() < deadline, "a worker lives on"
        threading.Event().wait(0.02)
    for descriptor in watched:
        os.close(descriptor)


def test_18_groups_can_not_be_used_before_they_are_made() -> None:
    worker = Worker(engine_config(tiny_checkpoint()), 0, rendezvous=None, report=lambda *_: None)
    for method in (worker.load_model, worker.kv_bytes_per_block):
        with pytest.raises(PhaseError):
            method()
    with pytest.raises(PhaseError):
        worker.initialize_from_config(kv_config())


def test_24_failed_start_tells_rank_phase_type_and_traceback(make: Make) -> None:
    with pytest.raises(StartupError) as failed:
        make("FailsToLoadAlone").start()
    report = failed.value.report
    assert (report.rank, report.phase, report.kind) == (1, "weights", "ValueError")
    assert "model.norm.weight" in report.message
    assert "in load_model" in report.traceback


def test_32_health_fails_with_a_dead_and_with_a_stuck_worker(started: MultiprocExecutor) -> None:
    started.check_health(timeout_s=5)
    stuck = started.collective_rpc("sleep_on", args=([1], 0.5), non_block=True)
    with pytest.raises(RpcTimeoutError, match="rank 1"):
        started.check_health(timeout_s=0.1)
    assert stuck.result(5) == [0, 1]
    os.kill(started.worker_pids["Worker_TP1"], signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match="SIGKILL"):
        started.check_health(timeout_s=5)


def test_33_rank_that_does_not_exist_is_not_taken_for_rank_0(started: MultiprocExecutor) -> None:
    for rank in (-1, 2):
        with pytest.raises(ConfigError, match=f"unique_reply_rank={rank}"):
            started.collective_rpc("echo", args=(1,), unique_reply_rank=rank)


def test_33_rank_that_two_processes_claim_is_refused(tmp_path: Path) -> None:
    from vcli.runtime.distributed.rendezvous import JoinError, RendezvousTarget, join_world

    store = tmp_path / "store"
    store.touch()
    target = RendezvousTarget(path=str(store))
    failures: queue.Queue[JoinError] = queue.Queue()

    def join() -> None:
        try:
            join_world("gloo", 0, 2, target, timeout_s=1.0)
        except JoinError as error:
            failures.put(error)

    threads = [threading.Thread(target=join) for _ in range(2)]
    for thread in threads:
        thread.start()
    messages = {failures.get(timeout=10).message for _ in threads}
    for thread in threads:
        thread.join()
    assert any("rank 0 is taken" in message for message in messages)


def test_34_rank_that_was_planned_and_never_comes_fails_the_start_by_name(make: Make) -> None:
    with pytest.raises(StartupError, match=r"1 of 2 processes not ready.*Worker_TP1.*weights"):
        make("NeverLoads", start_s=2.0).start()


# ---- behaviours that go with them -----------------------------------------------------------


def test_start_that_is_ended_from_another_thread_ends_at_once(make: Make) -> None:
    executor = make("NeverLoadsAnywhere")
    ended: queue.Queue[BaseException] = queue.Queue()

    def start() -> None:
        try:
            executor.start()
        except BaseException as error:  # noqa: BLE001 - handed to the test's thread
            ended.put(error)

    thread = threading.Thread(target=start)
    thread.start()
    while not executor.worker_pids:
        threading.Event().wait(0.01)
    begin_s = time.monotonic()
    executor.shutdown()
    assert isinstance(ended.get(timeout=5), StartupError)
    thread.join(5)
    assert time.monotonic() - begin_s < 4.0


@pytest.mark.parametrize("timeout_s", [0.0, -1.0])
def test_deadline_that_has_passed_already_is_a_timeout_and_nothing_else(
    started: MultiprocExecutor, timeout_s: float
) -> None:
    with pytest.raises(RpcTimeoutError):
        started.collective_rpc("sleep_on", args=([0, 1], 0.2), timeout_s=timeout_s)
    assert started.collective_rpc("echo", args=(1,)) == [1, 1]


@pytest.mark.parametrize("timeout_s", [1e12, float("inf")])
def test_deadline_beyond_what_the_system_can_wait_is_no_error(
    started: MultiprocExecutor, timeout_s: float
) -> None:
    assert started.collective_rpc("echo", args=(1,), timeout_s=timeout_s) == [1, 1]


def test_failure_callbacks_run_in_their_order_and_before_the_step_fails(
    started: MultiprocExecutor,
) -> None:
    order: list[str] = []
    started.register_failure_callback(lambda _: order.append("first"))
    started.register_failure_callback(lambda _: order.append("second"))
    future = started.execute_model(
        fake_step(number=fake_worker.STEP_RAISES_ON_RANK_1), non_block=True
    )
    future.add_done_callback(lambda _: order.append("step"))
    with pytest.raises(WorkerError):
        future.result(5)
    assert order == ["first", "second", "step"]


def test_aggregator_gets_the_replies_of_all_ranks(started: MultiprocExecutor) -> None:
    def total(replies: list[RankReply]) -> int:
        assert [reply.rank for reply in replies] == [0, 1]
        return sum(reply.value for reply in replies)

    assert started.collective_rpc("sleep_on", args=([], 0), aggregate=total) == 1
    future = started.collective_rpc("echo", args=(4,), aggregate=total, non_block=True)
    assert future.result(5) == 8


def test_aggregator_gets_what_a_failed_rank_hands_on(started: MultiprocExecutor) -> None:
    def values(replies: list[RankReply]) -> list[object]:
        return [(reply.value, reply.failure and reply.failure.rank) for reply in replies]

    assert started.collective_rpc("fail_and_hand_on", args=([1],), aggregate=values) == [
        ("done on rank 0", None),
        ({"saved": 1}, 1),
    ]


def test_what_a_failed_rank_hands_on_does_not_hide_its_failure(
    started: MultiprocExecutor,
) -> None:
    with pytest.raises(WorkerError, match="failed on rank 1"):
        started.collective_rpc("fail_and_hand_on", args=([1],))
    with pytest.raises(WorkerError, match="ordered on rank 1"):
        started.collective_rpc("raise_on", args=([1],), aggregate=len)
    assert started.collective_rpc("echo", args=(1,)) == [1, 1]


def test_error_of_an_aggregator_is_the_error_of_its_call(started: MultiprocExecutor) -> None:
    def refuse(replies: list[RankReply]) -> None:
        raise KeyError("nothing to merge")

    with pytest.raises(KeyError, match="nothing to merge"):
        started.collective_rpc("echo", args=(1,), aggregate=refuse)
    assert started.collective_rpc("echo", args=(1,)) == [1, 1]
    with pytest.raises(ConfigError, match="not both"):
        started.collective_rpc("echo", args=(1,), aggregate=refuse, unique_reply_rank=0)


# ---- stalls ---------------------------------------------------------------------------------


class SleepsInStep(Worker):
    """Rank 1 does not come to the first collective of a step."""

    def execute_model(self, output):
        if self.rank == 1:
            time.sleep(6)
        return super().execute_model(output)


@pytest.mark.slow
def test_stall_dumps_all_stacks_and_names_the_rank_that_did_not_come(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    config = engine_config(
        tiny_checkpoint(),
        parallel=ParallelConfig(tensor_parallel_size=2),
        deadlines=DeadlineConfig(stall_s=1.0, execute_model_s=60.0, shutdown_s=3.0),
    )
    executor = MultiprocExecutor(
        config,
        on_message=lambda _: None,
        worker_cls="tests.runtime.executor.test_symptoms:SleepsInStep",
    )
    try:
        executor.start()
        executor.initialize_from_config(kv_config())
        with caplog.at_level(logging.ERROR):
            step = one_request_step()
            result = executor.execute_model(step)
    finally:
        executor.shutdown()
    assert result is not None
    messages = [record.getMessage() for record in caplog.records]
    told = [message for message in messages if "runs for over" in message]
    assert len(told) == 1
    assert "rank 1 (Worker_TP1) has not come to the all_reduce of TP [0, 1]" in told[0]
    assert "it is outside of a collective" in told[0]
    stacks = capfd.readouterr().err
    assert stacks.count("Timeout (0:00:01)!") == 2
    assert "execute_model" in stacks


def one_request_step():
    from vcli.runtime.messages import NewRequestData, RunningRequests, SchedulerOutput
    from vcli.runtime.sampling_params import SamplingParams

    data = NewRequestData(
        number=1,
        token_ids=[5, 6, 7],
        num_prompt_tokens=3,
        num_computed_tokens=0,
        block_ids=[0],
        sampling=SamplingParams(temperature=0.0),
    )
    return SchedulerOutput(step=0, new=[data], running=RunningRequests(), num_scheduled_tokens=[3])
