"""Rank 0 in this process, the others in children: one executor, whoever fails."""

import os
import queue
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import fake_worker
from tests.support.child_targets import meet_in
from tests.support.fake_worker import FAKE_WORKER, fake_config, fake_step
from vcli.runtime.config import DeadlineConfig
from vcli.runtime.errors import RpcTimeoutError, StartupError, WorkerDiedError, WorkerError
from vcli.runtime.executor.backends import get_executor_class
from vcli.runtime.executor.base import RankReply
from vcli.runtime.executor.colocated import ColocatedExecutor
from vcli.runtime.messages import ChildMessage, ChildState
from vcli.runtime.process.fork_owner import ForkServer

pytestmark = pytest.mark.process


def make(
    num_ranks: int = 2, worker_cls: str = FAKE_WORKER, messages=None, **deadlines: float
) -> ColocatedExecutor:
    limits = {"start_s": 30.0, "execute_model_s": 20.0, "shutdown_s": 3.0, **deadlines}
    return ColocatedExecutor(
        fake_config(num_ranks, deadlines=DeadlineConfig(**limits), log_level="CRITICAL"),
        on_message=(messages or []).append,
        worker_cls=worker_cls,
        ring_bytes=1 << 18,
    )


@pytest.fixture
def executor() -> Iterator[ColocatedExecutor]:
    executor = make()
    executor.start()
    yield executor
    executor.shutdown()


def test_it_is_the_back_end_of_that_name() -> None:
    assert get_executor_class("colocated") is ColocatedExecutor


def test_rank_0_has_no_process_and_all_ranks_answer_in_order(
    executor: ColocatedExecutor,
) -> None:
    assert list(executor.worker_pids) == ["Worker_TP1"]
    pids = executor.collective_rpc(lambda worker: os.getpid())
    assert pids == [os.getpid(), executor.worker_pids["Worker_TP1"]]
    assert executor.collective_rpc("sleep_on", args=([0], 0.05)) == [0, 1]
    assert executor.collective_rpc("echo", args=("x",), unique_reply_rank=1) == "x"


def test_step_gives_the_result_of_rank_0(executor: ColocatedExecutor) -> None:
    futures = [executor.execute_model(fake_step(step), non_block=True) for step in range(20)]
    assert [future.result(5).step for future in futures] == list(range(20))


def test_both_kinds_of_ranks_report_their_states() -> None:
    messages: list[ChildMessage] = []
    executor = ColocatedExecutor(
        fake_config(2), on_message=messages.append, worker_cls=FAKE_WORKER, ring_bytes=1 << 18
    )
    executor.start()
    executor.shutdown()
    seen = {(m.process, m.state) for m in messages if isinstance(m, ChildState)}
    assert {("Worker_TP0", "weights"), ("Worker_TP1", "weights")} <= seen


def test_one_rank_alone_needs_no_child() -> None:
    executor = make(num_ranks=1)
    executor.start()
    assert executor.worker_pids == {}
    assert executor.collective_rpc("echo", args=(3,)) == [3]
    executor.shutdown()


@pytest.mark.parametrize(
    ("order", "words"),
    [
        (fake_worker.STEP_RAISES_ON_RANK_1, "device-side assert on rank 1"),
        (fake_worker.STEP_KILLS_RANK_1, "killed by SIGKILL"),
    ],
)
def test_failure_of_a_child_fails_the_step_though_rank_0_hangs(
    executor: ColocatedExecutor, order: int, words: str
) -> None:
    step = executor.execute_model(fake_step(number=order), non_block=True)
    with pytest.raises((WorkerError, WorkerDiedError), match=words):
        step.result(5.0)  # long before its deadline
    executor.shutdown()  # rank 0 itself sleeps for a minute


def test_failure_of_rank_0_in_a_call_is_told_and_survived(executor: ColocatedExecutor) -> None:
    with pytest.raises(WorkerError, match="ordered on rank 0"):
        executor.collective_rpc("raise_on", args=([0],))
    assert executor.collective_rpc("echo", args=(1,)) == [1, 1]


def test_deadline_names_rank_0_too(executor: ColocatedExecutor) -> None:
    with pytest.raises(RpcTimeoutError, match=r"rank 0 \(Worker_TP0, in sleep_on for"):
        executor.collective_rpc("sleep_on", args=([0], 0.4), timeout_s=0.1)


def test_aggregator_gets_what_ranks_of_both_kinds_hand_on(executor: ColocatedExecutor) -> None:
    def values(replies: list[RankReply]) -> list[object]:
        return [(reply.value, reply.failure and reply.failure.rank) for reply in replies]

    for failed in ([0], [1], [0, 1]):
        assert executor.collective_rpc("fail_and_hand_on", args=(failed,), aggregate=values) == [
            ({"saved": rank}, rank) if rank in failed else (f"done on rank {rank}", None)
            for rank in range(2)
        ]
    with pytest.raises(WorkerError, match="failed on rank 0"):
        executor.collective_rpc("fail_and_hand_on", args=([0],))
    assert executor.collective_rpc("echo", args=(1,)) == [1, 1]


def test_kill_of_a_child_while_idle_is_told_once(executor: ColocatedExecutor) -> None:
    failures: queue.Queue[object] = queue.Queue()
    executor.register_failure_callback(failures.put)
    os.kill(executor.worker_pids["Worker_TP1"], signal.SIGKILL)
    assert failures.get(timeout=5).rank == 1
    assert executor.is_failed


class MeetsLoading(fake_worker.FakeWorker):
    """Gets ready when all ranks are there, as in a world that they join."""

    def load_model(self) -> None:
        self._report("weights", 0.0, "")
        meet_in(Path(os.environ["TEST_MEETING"]), str(self.rank), self.config.plan.world_size)


@pytest.mark.parametrize("is_forked", [True, False], ids=["forkserver", "spawn"])
def test_all_ranks_start_at_once_the_one_here_included(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_forked: bool
) -> None:
    monkeypatch.setenv("TEST_MEETING", str(tmp_path))
    executor = make(num_ranks=3, worker_cls=f"{__name__}:MeetsLoading")
    server = ForkServer.start(preload=()) if is_forked else None
    if server is not None:
        executor.use_starter(server.starter)
    try:
        executor.start()
        assert executor.collective_rpc("echo", args=(1,)) == [1, 1, 1]
    finally:
        executor.shutdown()
        if server is not None:
            server.close()


class FailsOnRank0(fake_worker.FakeWorker):
    """Rank 0 raises in its weights; rank 1 waits for it."""

    def load_model(self) -> None:
        self._report("weights", 0.5, "")
        if self.rank == 0:
            raise ValueError("tensor model.norm.weight is missing")
        time.sleep(30)


class LosesItsPeer(fake_worker.FakeWorker):
    """Rank 1 is killed, which rank 0 sees first, as a connection that ended."""

    def load_model(self) -> None:
        self._report("weights", 0.5, "")
        marker = Path(os.environ["TEST_MARKER"])
        if self.rank == 1:
            marker.symlink_to(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)
        while not marker.is_symlink() or fake_worker.exists(int(str(marker.readlink()))):
            time.sleep(0.01)
        raise RuntimeError("[gloo] Connection closed by peer")


@pytest.mark.parametrize(
    ("name", "rank", "words"),
    [
        ("FailsOnRank0", 0, "model.norm.weight is missing"),
        ("LosesItsPeer", 1, "killed by SIGKILL"),
    ],
)
def test_failed_start_names_its_cause(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, rank: int, words: str
) -> None:
    monkeypatch.setenv("TEST_MARKER", str(tmp_path / "dying"))
    executor = make(worker_cls=f"tests.runtime.executor.test_colocated:{name}")
    with pytest.raises(StartupError, match=words) as failed:
        executor.start()
    assert failed.value.report.rank == rank


def test_rank_0_that_never_gets_ready_is_named_at_the_deadline() -> None:
    executor = make(worker_cls="tests.runtime.executor.test_colocated:NeverReadyHere", start_s=3.0)
    with pytest.raises(StartupError, match=r"Worker_TP0 .*not ready after 3 s"):
        executor.start()


class NeverReadyHere(fake_worker.FakeWorker):
    """Rank 0 stays in its weights."""

    def load_model(self) -> None:
        self._report("weights", 0.5, "")
        if self.rank == 0:
            time.sleep(6)
