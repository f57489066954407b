"""Deadlines, callbacks and aggregators of calls to all ranks, and a start that is called off."""

import queue
import threading
from collections.abc import Callable

import pytest

from tests.support import fake_worker
from tests.support.fake_worker import fake_step
from vcli.runtime.errors import RpcTimeoutError, StartupError, WorkerError
from vcli.runtime.executor.base import RankReply
from vcli.runtime.executor.multiproc import MultiprocExecutor
from vcli.topology.errors import ConfigError

pytestmark = pytest.mark.process

Make = Callable[..., MultiprocExecutor]


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
    executor.shutdown()
    assert isinstance(ended.get(timeout=5), StartupError)  # the start itself may take 30 s
    thread.join(5)


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
