"""Results that are still on their way from a device do not hold up the next call."""

import os
import queue
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fake_worker import DeviceFakeWorker, fake_config
from vcli.runtime.errors import FailureReport, WorkerDiedError, WorkerError
from vcli.runtime.executor.multiproc import MultiprocExecutor
from vcli.topology.errors import ExitStatus

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def executor() -> Iterator[MultiprocExecutor]:
    executor = MultiprocExecutor(
        fake_config(1),
        on_message=lambda _: None,
        worker_cls="tests.support.fake_worker:DeviceFakeWorker",
        ring_bytes=1 << 18,
    )
    executor.start()
    yield executor
    executor.shutdown()


def test_next_call_runs_while_the_result_of_the_last_one_is_awaited(
    executor: MultiprocExecutor,
) -> None:
    begin_s = time.monotonic()
    slow = executor.collective_rpc("later", args=("a", 0.4), non_block=True)
    ran_at_s = executor.collective_rpc(lambda worker: time.monotonic(), unique_reply_rank=0)
    # It ran at once; its reply came after the slow one, in the order of the calls.
    assert ran_at_s - begin_s < 0.3
    assert slow.done()
    assert slow.result() == ["a"]


def test_replies_come_in_the_order_of_the_calls(executor: MultiprocExecutor) -> None:
    order: list[int] = []
    futures = []
    for index in range(20):
        method = "later" if index % 3 == 0 else "echo"
        future = executor.collective_rpc(method, args=(index,), non_block=True)
        future.add_done_callback(lambda _, index=index: order.append(index))
        futures.append(future)
    assert [future.result(5) for future in futures] == [[index] for index in range(20)]
    assert order == list(range(20))


def test_device_is_set_in_the_thread_that_waits_for_it(executor: MultiprocExecutor) -> None:
    executor.collective_rpc("later", args=(1,))
    ((bound, resolved),) = executor.collective_rpc("threads")
    assert bound == ["worker-replies"]
    assert set(resolved) == {"worker-replies"}


def test_failure_of_the_device_is_the_failure_of_its_call(executor: MultiprocExecutor) -> None:
    with pytest.raises(WorkerError, match="device-side assert") as failed:
        executor.collective_rpc("fail_later", args=("device-side assert",))
    assert failed.value.report.phase == "fail_later"
    assert executor.collective_rpc("later", args=("next",)) == ["next"]


def test_result_that_can_not_be_sent_does_not_end_the_thread(executor: MultiprocExecutor) -> None:
    with pytest.raises(WorkerError, match="pickle"):
        executor.collective_rpc(lambda worker: worker.later(n for n in range(3)))
    assert executor.collective_rpc("later", args=("next",)) == ["next"]


class LosesItsDevice(DeviceFakeWorker):
    """The thread that waits for the device of rank 1 can't use it."""

    def bind_thread(self) -> None:
        if self.rank == 1:
            raise RuntimeError("device 1 fell off the bus")


@pytest.mark.parametrize(("reply_rank", "busy_s"), [(0, 60.0), (1, 0.0)])
def test_end_of_the_thread_that_replies_ends_all_calls_at_once_with_rank_and_cause(
    reply_rank: int, busy_s: float
) -> None:
    executor = MultiprocExecutor(
        fake_config(2, log_level="CRITICAL"),
        on_message=lambda _: None,
        worker_cls=f"{__name__}:LosesItsDevice",
        ring_bytes=1 << 18,
    )
    failures: queue.Queue[FailureReport] = queue.Queue()
    executor.register_failure_callback(failures.put)
    try:
        executor.start()
        late = executor.collective_rpc(
            "later", args=("a", busy_s), non_block=True, unique_reply_rank=reply_rank
        )
        with pytest.raises(WorkerDiedError, match="device 1 fell off the bus") as failed:
            late.result(10)  # of the 20 s that a call may take here
        report = failures.get(timeout=5)
        assert report == failed.value.report
        assert (report.process, report.rank, report.kind) == ("Worker_TP1", 1, "RuntimeError")
        assert report.exit_status == ExitStatus.DIED_SERVING
        assert "in bind_thread" in report.traceback
        with pytest.raises(WorkerDiedError, match="fell off the bus"):
            executor.collective_rpc("echo", args=(1,))
    finally:
        executor.shutdown()


def test_title_of_a_worker_that_takes_calls_says_no_longer_that_it_starts(
    executor: MultiprocExecutor,
) -> None:
    (pid,) = executor.worker_pids.values()
    title = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0")
    assert title == b"vcli::Worker"


def test_title_says_that_a_worker_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    monkeypatch.setenv("TEST_GATE", str(gate))
    seen: list[bytes] = []

    def on_message(message: object) -> None:
        if getattr(message, "state", "") == "weights" and not seen:
            seen.append(Path(f"/proc/{message.pid}/cmdline").read_bytes().rstrip(b"\0"))
            gate.write_text("")

    executor = MultiprocExecutor(
        fake_config(1),
        on_message=on_message,
        worker_cls="tests.runtime.executor.test_replies:AsksWhileLoading",
        ring_bytes=1 << 18,
    )
    executor.start()
    executor.shutdown()
    assert seen[0] == b"vcli::Worker (starting)"


class AsksWhileLoading(DeviceFakeWorker):
    """Stays in its weights until the test has looked."""

    def load_model(self) -> None:
        self._report("weights", 0.0, "")
        Path(os.environ["TEST_GATE"]).read_text()
