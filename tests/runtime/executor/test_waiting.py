"""The thread that has the waiter takes the replies; nobody else does, and no call hangs for it."""

import os
import threading
from collections.abc import Iterator

import pytest

from tests.support.fake_worker import STEP_KILLS_RANK_1, fake_step
from vcli.runtime.errors import WorkerDiedError
from vcli.runtime.executor.multiproc import MultiprocExecutor

pytestmark = pytest.mark.process

WAIT_S = 20.0


def receivers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "rpc-replies"]


@pytest.fixture
def bell() -> Iterator[int]:
    fd = os.eventfd(0)
    yield fd
    os.close(fd)


def test_replies_settle_calls_in_the_thread_that_waits(
    started: MultiprocExecutor, bell: int
) -> None:
    assert len(receivers()) == 1
    waiter = started.waiter([bell])
    assert receivers() == []
    settled_in: list[str] = []
    future = started.collective_rpc("echo", args=("a",), non_block=True)
    future.add_done_callback(lambda _: settled_in.append(threading.current_thread().name))
    while not future.done():
        assert waiter.wait(WAIT_S) == []
    assert future.result(0) == ["a", "a"]
    assert settled_in == [threading.current_thread().name]
    waiter.close()
    assert len(receivers()) == 1
    assert started.collective_rpc("echo", args=("b",)) == ["b", "b"]


def test_blocking_call_in_the_thread_that_waits_takes_its_own_reply(
    started: MultiprocExecutor, bell: int
) -> None:
    waiter = started.waiter([bell])
    os.eventfd_write(bell, 1)  # readable all the time, and no reason to come back without a result
    result = started.execute_model(fake_step(number=5))
    assert result is not None
    assert result.token_ids == [6]
    assert started.collective_rpc("echo", args=("a",)) == ["a", "a"]
    assert waiter.wait(WAIT_S) == [bell]
    waiter.close()


def test_blocking_call_of_another_thread_is_settled_by_the_one_that_waits(
    started: MultiprocExecutor, bell: int
) -> None:
    waiter = started.waiter([bell])
    results: list[object] = []

    def call() -> None:
        results.append(started.collective_rpc("echo", args=("a",)))
        os.eventfd_write(bell, 1)

    thread = threading.Thread(target=call)
    thread.start()
    while waiter.wait(WAIT_S) != [bell]:
        pass
    thread.join()
    assert results == [["a", "a"]]
    waiter.close()


def test_blocking_call_ends_when_a_rank_is_killed(started: MultiprocExecutor, bell: int) -> None:
    waiter = started.waiter([bell])
    with pytest.raises(WorkerDiedError, match="SIGKILL"):
        started.execute_model(fake_step(number=STEP_KILLS_RANK_1))
    waiter.close()


def test_end_of_a_rank_is_no_error_for_a_wait_that_began_before_another_one_saw_it(
    started: MultiprocExecutor, bell: int
) -> None:
    waiter = started.waiter([bell])
    rings = started._rings
    assert rings is not None
    waits = [rings.reader_set([]) for _ in range(2)]
    with pytest.raises(WorkerDiedError):
        started.execute_model(fake_step(number=STEP_KILLS_RANK_1))
    for each in waits:
        ready, _ = each.wait(WAIT_S)
        assert ready
        assert not rings.take(ready)
        each.close()
    waiter.close()


def test_decision_about_spinning_counts_the_processes_of_the_plan(
    started: MultiprocExecutor,
) -> None:
    assert started.spin.name == "spin_us"
    assert "for 4 processes" in started.spin.reasons[0]
