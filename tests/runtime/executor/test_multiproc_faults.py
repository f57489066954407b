"""Workers fail, die and hang: the first cause is named at once, and nothing is left behind."""

import os
import queue
import signal
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from tests.support import fake_worker
from tests.support.fake_worker import FAKE_WORKER, exists, fake_config, fake_step
from vcli.runtime.errors import (
    FailureReport,
    RpcTimeoutError,
    StartupError,
    WorkerDiedError,
    WorkerError,
)
from vcli.runtime.executor.multiproc import MultiprocExecutor
from vcli.topology.errors import ExitStatus

pytestmark = pytest.mark.process

Make = Callable[..., MultiprocExecutor]

#: A step may take 20 s here, and a stuck rank stays so for a minute.
LONG_BEFORE_S = 5.0


def step_failure(executor: MultiprocExecutor, order: int) -> FailureReport:
    """What a step with this order fails with, long before its deadline."""
    step = executor.execute_model(fake_step(number=order), non_block=True)
    with pytest.raises((WorkerError, WorkerDiedError)) as failed:
        step.result(LONG_BEFORE_S)
    return failed.value.report


# ---- while serving --------------------------------------------------------------------------


def test_exception_on_a_rank_that_does_not_reply_fails_the_step_at_once(
    started: MultiprocExecutor,
) -> None:
    report = step_failure(started, fake_worker.STEP_RAISES_ON_RANK_1)
    assert (report.rank, report.phase, report.kind) == (1, "execute_model", "ValueError")
    assert report.message == "device-side assert on rank 1"
    assert "_obey" in report.traceback
    assert report.exit_status == ExitStatus.DIED_SERVING


def test_nothing_can_be_called_after_a_failed_step(started: MultiprocExecutor) -> None:
    failures: queue.Queue[FailureReport] = queue.Queue()
    started.register_failure_callback(failures.put)
    report = step_failure(started, fake_worker.STEP_RAISES_ON_RANK_1)
    assert failures.get(timeout=1) == report
    assert started.is_failed
    with pytest.raises(WorkerError, match="device-side assert"):
        started.collective_rpc("echo", args=(1,))
    started.shutdown()
    assert failures.empty()


def test_kill_in_a_step_is_named_at_once(started: MultiprocExecutor) -> None:
    report = step_failure(started, fake_worker.STEP_KILLS_RANK_1)
    assert (report.process, report.rank, report.exit_code) == ("Worker_TP1", 1, -signal.SIGKILL)
    assert report.pid == started.worker_pids["Worker_TP1"]
    assert report.message == "killed by SIGKILL"


def test_kill_is_named_and_not_the_peer_that_lost_its_connection(
    started: MultiprocExecutor,
) -> None:
    report = step_failure(started, fake_worker.STEP_PEER_CLOSED_THEN_RANK_1_KILLED)
    assert (report.rank, report.message) == (1, "killed by SIGKILL")


def test_step_that_fails_after_its_reply_ends_the_executor(started: MultiprocExecutor) -> None:
    failures: queue.Queue[FailureReport] = queue.Queue()
    started.register_failure_callback(failures.put)
    assert started.execute_model(fake_step(number=fake_worker.STEP_RAISES_LATE_ON_RANK_1))
    assert failures.get(timeout=5).message == "late on rank 1"
    assert started.is_failed


def test_kill_while_idle_is_told_once_and_refuses_calls(started: MultiprocExecutor) -> None:
    failures: queue.Queue[FailureReport] = queue.Queue()
    started.register_failure_callback(failures.put)
    os.kill(started.worker_pids["Worker_TP0"], signal.SIGKILL)
    report = failures.get(timeout=5)
    assert (report.rank, report.phase) == (0, "serving")
    with pytest.raises(WorkerDiedError, match="SIGKILL"):
        started.execute_model(fake_step())
    late: list[FailureReport] = []
    started.register_failure_callback(late.append)
    assert late == [report]
    assert failures.empty()


def test_step_on_a_stuck_rank_ends_at_its_deadline_and_names_it(make: Make) -> None:
    executor = make(execute_model_s=0.3)
    executor.start()
    with pytest.raises(RpcTimeoutError) as late:
        executor.execute_model(fake_step(number=fake_worker.STEP_HANGS_ON_OUTPUT_RANK))
    assert "execute_model: no answer within 0.3 s from rank 0" in late.value.message
    assert "in execute_model for" in late.value.message
    assert executor.is_failed


def test_ring_that_a_stuck_rank_does_not_empty_is_told_with_its_name(
    started: MultiprocExecutor,
) -> None:
    stuck = started.collective_rpc("sleep_on", args=([1], 30), non_block=True)
    with pytest.raises(RpcTimeoutError, match=r"reader 1 .* in sleep_on"):
        started.collective_rpc("echo", args=(bytes(1 << 20),), timeout_s=0.3)
    assert not stuck.done()


def test_step_that_can_not_even_be_sent_ends_the_executor(make: Make) -> None:
    executor = make(execute_model_s=0.3)
    executor.start()
    executor.collective_rpc("sleep_on", args=([1], 30), timeout_s=30, non_block=True)
    step = msgspec.structs.replace(fake_step(), removed=list(range(10**6, 10**6 + 2**17)))
    with pytest.raises(RpcTimeoutError, match=r"execute_model: .* reader 1 .* in sleep_on"):
        executor.execute_model(step)
    assert executor.is_failed


# ---- start ----------------------------------------------------------------------------------


def test_exception_in_the_start_is_named_and_not_the_peers_that_fell_over_it(make: Make) -> None:
    executor = make("FailsToLoad")
    with pytest.raises(StartupError) as failed:
        executor.start()
    report = failed.value.report
    assert (report.process, report.rank, report.phase) == ("Worker_TP1", 1, "weights")
    assert report.message == "tensor model.norm.weight is missing"
    assert "in load_model" in report.traceback
    assert failed.value.exit_status is ExitStatus.START_FAILED


def test_kill_in_the_start_is_named_and_the_others_are_ended(make: Make) -> None:
    executor = make("DiesLoading")
    with pytest.raises(StartupError) as failed:
        executor.start()
    report = failed.value.report
    assert (report.rank, report.phase, report.exit_code) == (1, "weights", -signal.SIGKILL)
    assert not any(exists(pid) for pid in executor.worker_pids.values())


def test_start_ends_at_its_deadline_and_names_the_missing_rank(make: Make) -> None:
    executor = make("NeverLoads", start_s=2.0)
    with pytest.raises(StartupError, match="1 of 2 processes not ready after 2 s") as failed:
        executor.start()
    assert "Worker_TP1 (rank 1" in failed.value.message
    assert "in state weights 40%" in failed.value.message


def test_worker_class_that_does_not_exist_is_the_users_error(make: Make) -> None:
    with pytest.raises(StartupError, match="Nothing") as failed:
        make("Nothing", num_ranks=1).start()
    assert failed.value.exit_status is ExitStatus.USAGE


# ---- end ------------------------------------------------------------------------------------


@pytest.fixture
def left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """What is new since the test began; temporary files would go to a folder of this test.

    What an earlier test left may end meanwhile.
    """
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def things() -> Counter[str]:
        return Counter(
            [
                *("descriptor" for _ in Path("/proc/self/fd").iterdir()),
                *(f"thread {thread.name}" for thread in threading.enumerate()),
                *(str(path) for path in Path("/dev/shm").glob("*vcli*")),
                *(str(path) for path in tmp_path.rglob("*")),
            ]
        )

    before = things()
    return lambda: sorted((things() - before).elements())


def test_shutdown_leaves_no_process_descriptor_thread_or_file(
    make: Make, left_behind: Callable[[], list[str]]
) -> None:
    executor = make(num_ranks=4)
    executor.start()
    executor.execute_model(fake_step())
    pids = list(executor.worker_pids.values())
    assert left_behind()
    executor.shutdown()
    assert not any(exists(pid) for pid in pids)
    assert left_behind() == []


def test_failed_start_leaves_nothing_either(
    make: Make, left_behind: Callable[[], list[str]]
) -> None:
    with pytest.raises(StartupError):
        make("FailsToLoad").start()
    assert left_behind() == []


def test_idle_workers_leave_in_order_when_asked(started: MultiprocExecutor) -> None:
    started.shutdown()
    started.shutdown()
    assert started._group.exit_codes == (0, 0)


def test_worker_stuck_in_c_code_is_ended_in_time(
    started: MultiprocExecutor,
) -> None:
    call = started.collective_rpc("sleep_in_c_on", args=([1], 60), non_block=True)
    started.shutdown()  # the worker itself sleeps for a minute
    assert not any(exists(pid) for pid in started.worker_pids.values())
    with pytest.raises(WorkerDiedError, match="shut down"):
        call.result(1)


def test_call_after_shutdown_is_refused(started: MultiprocExecutor) -> None:
    started.shutdown()
    with pytest.raises(WorkerDiedError, match="shut down"):
        started.execute_model(fake_step())


def test_shutdown_without_start_does_nothing(left_behind: Callable[[], list[str]]) -> None:
    executor = MultiprocExecutor(fake_config(2), on_message=lambda _: None, worker_cls=FAKE_WORKER)
    executor.shutdown()
    assert left_behind() == []
