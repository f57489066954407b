"""A rank whose process is stopped is named and blamed; a clerk that was stopped blames nobody."""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.support.fake_worker import fake_config
from tests.support.processes import wait_until
from vcli.runtime.config import DeadlineConfig
from vcli.runtime.errors import FailureReport, RpcTimeoutError
from vcli.runtime.executor.multiproc import MultiprocExecutor
from vcli.runtime.executor.rpc import RpcClient
from vcli.runtime.process.held import describe_stop

ROOT = Path(__file__).resolve().parents[3]

STOPPED = "rank 1 (Worker_TP1) is stopped: kill -CONT 7"


@pytest.fixture
def make_client(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[..., RpcClient]]:
    monkeypatch.setattr("vcli.runtime.executor.rpc._LOOK_EVERY_S", 0.05)
    clients: list[RpcClient] = []

    def make(stopped: Callable[[], Mapping[int, str]], failures: list[FailureReport]) -> RpcClient:
        client = RpcClient(
            ["Worker_TP0", "Worker_TP1"],
            activity=lambda _: None,
            on_step_failure=failures.append,
            stopped=stopped,
        )
        client.start()
        clients.append(client)
        return client

    yield make
    for client in clients:
        client.close()


def test_stopped_rank_is_named_once_while_a_step_waits_and_again_when_it_stops_again(
    make_client, caplog: pytest.LogCaptureFixture
) -> None:
    stopped: dict[int, str] = {1: STOPPED}
    looks: list[int] = []
    client = make_client(lambda: looks.append(1) or dict(stopped), [])
    call = client.book("execute_model", timeout_s=60.0, reply_rank=0)
    with caplog.at_level(logging.ERROR, logger="vcli"):
        client.note_sent(call)
        wait_until(lambda: len(looks) > 6)
        assert [record.getMessage() for record in caplog.records] == [
            f"execute_model waits: {STOPPED}"
        ]
        stopped.clear()
        num_looks = len(looks)
        wait_until(lambda: len(looks) > num_looks + 2)
        stopped[1] = STOPPED
        wait_until(lambda: len(caplog.records) == 2)
    client.deliver(0, call.call_id, "a")


def test_rank_that_a_debugger_stops_for_a_moment_is_not_named(
    make_client, caplog: pytest.LogCaptureFixture
) -> None:
    looks: list[int] = []
    client = make_client(lambda: looks.append(1) or ({1: STOPPED} if len(looks) % 2 else {}), [])
    call = client.book("execute_model", timeout_s=60.0, reply_rank=0)
    with caplog.at_level(logging.ERROR, logger="vcli"):
        client.note_sent(call)
        wait_until(lambda: len(looks) > 6)
    assert caplog.records == []
    client.deliver(0, call.call_id, "a")


def test_stopped_rank_is_to_blame_and_not_the_one_that_was_to_reply(make_client) -> None:
    failures: list[FailureReport] = []
    client = make_client(lambda: {1: STOPPED}, failures)
    call = client.book("execute_model", timeout_s=0.1, reply_rank=0)
    client.note_sent(call)
    with pytest.raises(RpcTimeoutError, match=r"Worker_TP1\) is stopped"):
        call.future.result(10)
    assert [(each.process, each.rank) for each in failures] == [("Worker_TP1", 1)]


CLERK = """
import sys
from vcli.runtime.executor.rpc import RpcClient

client = RpcClient(["Worker_TP0"], activity=lambda _: None, on_step_failure=print, stall_s=2.0)
client.start()
call = client.book("execute_model", timeout_s=3.0, reply_rank=0)
client.note_sent(call)
print("sent", flush=True)
sys.stdin.readline()
client.deliver(0, call.call_id, "in time")
print(call.future.result(5), flush=True)
client.close()
"""


@pytest.mark.process
@pytest.mark.slow
def test_process_that_was_stopped_beyond_its_deadline_blames_nobody() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CLERK],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as clerk:
        assert clerk.stdout is not None
        try:
            assert clerk.stdout.readline() == "sent\n"
            os.kill(clerk.pid, signal.SIGSTOP)
            wait_until(lambda: describe_stop(clerk.pid) != "")
            time.sleep(7.0)  # what is measured, not a wait for anything
            os.kill(clerk.pid, signal.SIGCONT)
            wait_until(lambda: not describe_stop(clerk.pid))
            out, err = clerk.communicate("now\n", timeout=30)
        finally:
            clerk.kill()  # the end of the block waits for it, stopped or not
    assert out == "in time\n"
    assert "runs for over" not in err


@pytest.mark.process
def test_health_finds_a_stopped_worker_that_a_step_keeps_busy() -> None:
    config = fake_config(
        2, deadlines=DeadlineConfig(start_s=60.0, execute_model_s=60.0, shutdown_s=2.0)
    )
    executor = MultiprocExecutor(
        config, on_message=lambda _: None, worker_cls="tests.support.fake_worker:FakeWorker"
    )
    executor.start()
    try:
        pid = executor.worker_pids["Worker_TP1"]
        executor.collective_rpc("sleep_on", args=([1], 600.0), timeout_s=600.0, non_block=True)
        wait_until(lambda: executor.busy_with(1) is not None, 20)
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: describe_stop(pid) != "")
        assert executor.busy_with(1) is None
        with pytest.raises(RpcTimeoutError, match=rf"Worker_TP1\) is stopped .*kill -CONT {pid}"):
            executor.check_health(0.2)
    finally:
        executor.shutdown()
