"""Calls are booked and settled by id, without any process."""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tests.support.processes import wait_until
from vcli.runtime.errors import FailureReport, RpcTimeoutError, WorkerDiedError, WorkerError
from vcli.runtime.executor.pending_call import PendingCall
from vcli.runtime.executor.rpc import RpcClient
from vcli.runtime.worker.call_messages import RankActivity


class Client(RpcClient):
    """A client of two ranks, the second of which is busy; keeps the failures of steps."""

    def __init__(self, **options) -> None:
        self.step_failures: list[FailureReport] = []
        super().__init__(
            ["Worker_TP0", "Worker_TP1"],
            activity=lambda rank: RankActivity("load", 3.0) if rank == 1 else None,
            on_step_failure=self.step_failures.append,
            **options,
        )

    def call(self, method: str = "echo", timeout_s: float = 10.0, reply_rank=None) -> PendingCall:
        call = self.book(method, timeout_s=timeout_s, reply_rank=reply_rank)
        self.note_sent(call)
        return call


@pytest.fixture
def client() -> Iterator[Client]:
    client = Client()
    client.start()
    yield client
    client.close()


def failure(phase: str = "echo", kind: str = "ValueError", message: str = "no") -> FailureReport:
    return FailureReport(process="Worker_TP1", phase=phase, kind=kind, message=message, rank=1)


KILLED = FailureReport(
    process="Worker_TP1", phase="serving", kind="", message="killed by SIGKILL", exit_code=-9
)


def test_results_are_in_the_order_of_ranks_not_of_arrival(client: Client) -> None:
    call = client.call()
    client.deliver(1, call.call_id, "b")
    assert not call.future.done()
    client.deliver(0, call.call_id, "a")
    assert call.future.result(0) == ["a", "b"]


def test_result_of_the_reply_rank_stands_alone(client: Client) -> None:
    call = client.call(reply_rank=1)
    client.deliver(1, call.call_id, "b")
    assert call.future.result(0) == "b"


def test_reply_to_an_old_call_is_dropped(client: Client) -> None:
    old, new = client.call(), client.call()
    client.deliver_failure(old.call_id, failure())
    client.deliver(0, old.call_id, "stale")
    client.deliver(1, old.call_id, "stale")
    client.deliver(0, new.call_id, "a")
    client.deliver(1, new.call_id, "b")
    assert new.future.result(0) == ["a", "b"]


def test_failure_of_a_rank_that_was_not_to_reply_fails_the_call_at_once(client: Client) -> None:
    call = client.call(reply_rank=0)
    client.deliver_failure(call.call_id, failure())
    with pytest.raises(WorkerError) as failed:
        call.future.result(0)
    assert failed.value.report.rank == 1
    assert client.step_failures == []


def test_failed_step_fails_every_call_in_flight_and_later(client: Client) -> None:
    step, other = client.call("execute_model", reply_rank=0), client.call()
    client.deliver_failure(step.call_id, failure("execute_model"))
    for call in (step, other):
        with pytest.raises(WorkerError):
            call.future.result(0)
    with pytest.raises(WorkerError):
        client.call()
    assert client.step_failures == [failure("execute_model")]


def test_step_that_fails_after_its_reply_is_still_the_end(client: Client) -> None:
    step = client.call("execute_model", reply_rank=0)
    client.deliver(0, step.call_id, "tokens")
    client.deliver_failure(step.call_id, failure("execute_model"))
    assert step.future.result(0) == "tokens"
    with pytest.raises(WorkerError):
        client.call()
    assert client.step_failures == [failure("execute_model")]


def test_consequence_waits_for_the_cause(client: Client) -> None:
    step = client.call("execute_model", reply_rank=0)
    client.deliver_failure(
        step.call_id, failure("execute_model", "RuntimeError", "Connection closed by peer")
    )
    assert not step.future.done()
    client.fail(WorkerDiedError(KILLED))
    with pytest.raises(WorkerDiedError, match="SIGKILL"):
        step.future.result(0)


def test_consequence_without_a_cause_counts_itself_soon(client: Client) -> None:
    step = client.call("execute_model", reply_rank=0)
    client.deliver_failure(
        step.call_id, failure("execute_model", "RuntimeError", "Connection closed by peer")
    )
    with pytest.raises(WorkerError, match="closed by peer"):
        step.future.result(2)


def test_step_behind_a_suspect_waits_for_the_cause_too(client: Client) -> None:
    first, second = client.call("execute_model"), client.call("execute_model")
    client.deliver_failure(first.call_id, failure("execute_model", "ConnectionResetError"))
    client.deliver_failure(
        second.call_id, failure("execute_model", "BatchStateError", "did not keep request 3")
    )
    assert client.step_failures == []
    client.fail(WorkerDiedError(KILLED))
    for call in (first, second):
        with pytest.raises(WorkerDiedError, match="SIGKILL"):
            call.future.result(0)


def test_step_behind_a_call_that_may_fail_alone_is_not_held_back(client: Client) -> None:
    other, step = client.call("echo"), client.call("execute_model")
    client.deliver_failure(other.call_id, failure("echo", "ConnectionResetError"))
    client.deliver_failure(step.call_id, failure("execute_model"))
    assert [report.kind for report in client.step_failures] == ["ValueError"]


def test_deadline_names_the_missing_rank_and_what_it_does(client: Client) -> None:
    call = client.call(timeout_s=0.05)
    client.deliver(0, call.call_id, "a")
    with pytest.raises(RpcTimeoutError) as late:
        call.future.result(2)
    assert "rank 1 (Worker_TP1, in load for 3.0 s)" in late.value.message
    assert "rank 0" not in late.value.message


def test_deadline_of_a_step_tells_what_the_others_do_and_is_the_end(client: Client) -> None:
    call = client.call("execute_model", timeout_s=0.05, reply_rank=0)
    with pytest.raises(RpcTimeoutError, match=r"no answer within 0\.05 s from rank 0") as late:
        call.future.result(2)
    assert "meanwhile rank 1 (Worker_TP1, in load for 3.0 s)" in late.value.message
    with pytest.raises(WorkerDiedError):
        client.call()


def test_shorter_deadline_of_a_later_call_is_kept(client: Client) -> None:
    client.call(timeout_s=100)
    late = client.call(timeout_s=0.05)
    begin_s = time.monotonic()
    with pytest.raises(RpcTimeoutError):
        late.future.result(5)
    assert time.monotonic() - begin_s < 1.0


def test_first_failure_is_the_one_that_later_calls_see(client: Client) -> None:
    client.fail(WorkerDiedError(KILLED))
    client.fail(WorkerDiedError(failure()))
    with pytest.raises(WorkerDiedError, match="SIGKILL"):
        client.call()


def test_callback_of_a_future_may_book_the_next_call(client: Client) -> None:
    first, booked = client.call(reply_rank=0), []
    first.future.add_done_callback(lambda _: booked.append(client.call()))
    settle: Callable[[], None] = lambda: client.deliver(0, first.call_id, "a")  # noqa: E731
    thread = threading.Thread(target=settle)
    thread.start()
    thread.join(5)
    assert len(booked) == 1


def test_steps_behind_a_stuck_one_are_told_when_it_is_done_and_they_are_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    causes = iter(f"cause {number}" for number in range(9))
    looked = threading.Semaphore(0)

    def diagnose() -> str:
        looked.release()
        return next(causes)

    def told() -> list[str]:
        return [record.getMessage().split(";")[0] for record in caplog.records]

    client = Client(stall_s=0.1, diagnose=diagnose)
    first, second = client.call("execute_model", reply_rank=0), client.call("execute_model")
    with caplog.at_level(logging.ERROR):
        client.start()
        assert looked.acquire(timeout=5)
        due_s = second.stalls_at_s
        wait_until(lambda: math.inf > second.stalls_at_s > due_s)
        assert told() == ["execute_model runs for over 0.1 s: cause 0"]
        client.deliver(0, first.call_id, "tokens")
        assert looked.acquire(timeout=5)
        client.close()
    assert told()[1:] == ["execute_model runs for over 0.1 s: cause 1"]
