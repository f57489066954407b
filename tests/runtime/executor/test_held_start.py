"""The start's one deadline: who holds it up is named; a load that leaves its thread is told."""

import os
import signal
import threading
import time
from collections.abc import Callable

import pytest

from tests.support.fake_worker import FakeWorker, fake_config
from tests.support.processes import wait_until
from vcli.runtime.errors import RpcTimeoutError, StartupError
from vcli.runtime.executor.multiproc import MultiprocExecutor
from vcli.runtime.executor.uniproc import UniProcExecutor
from vcli.runtime.process.held import describe_stop

pytestmark = pytest.mark.process

Make = Callable[..., MultiprocExecutor]


class Leaves(FakeWorker):
    """Its load ends the thread that runs it."""

    def load_model(self) -> None:
        """As a library may do it."""
        raise SystemExit(3)


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: describe_stop(pid) != "")


def test_a_rank_that_is_stopped_in_the_start_is_the_one_that_is_blamed(make: Make) -> None:
    executor = make("NeverLoadsAnywhere", start_s=2.0, shutdown_s=60.0)
    failures: list[StartupError] = []

    def start() -> None:
        try:
            executor.start()
        except StartupError as error:
            failures.append(error)

    starting = threading.Thread(target=start)
    starting.start()
    wait_until(lambda: len(executor.worker_pids) == 2)
    pid = executor.worker_pids["Worker_TP1"]
    stop(pid)
    # Far less than the shutdown's own time: nobody has anything to finish.
    starting.join(20)
    (failure,) = failures
    assert (failure.report.rank, failure.report.pid) == (1, pid)
    assert f"kill -CONT {pid}" in failure.report.message
    assert "2 of 2 processes not ready after 2 s" in failure.report.message


def test_a_rank_that_is_stopped_in_a_call_of_the_start_is_named_with_its_state(make: Make) -> None:
    executor = make(start_s=600.0, start_end_s=time.monotonic() + 4.0)
    executor.start()
    pid = executor.worker_pids["Worker_TP1"]
    stop(pid)
    with pytest.raises(RpcTimeoutError, match="determine_available_memory") as late:
        executor.determine_available_memory()
    assert late.value.ranks == (1,)
    assert late.value.message.count(f"stopped (SIGSTOP or a debugger): kill -CONT {pid}") == 1
    assert "rank 1 (Worker_TP1)" in late.value.message


def test_a_start_that_has_begun_has_what_is_left_of_its_deadline(make: Make) -> None:
    executor = make("NeverLoads", start_s=600.0, start_end_s=time.monotonic() + 1.0)
    with pytest.raises(StartupError, match="not ready after 600 s"):
        executor.start()


def test_a_load_that_leaves_its_thread_is_a_failure_and_no_wait_for_the_deadline() -> None:
    executor = UniProcExecutor(
        fake_config(), on_message=lambda _: None, worker_cls=f"{__name__}:Leaves"
    )
    with pytest.raises(StartupError, match="SystemExit: 3"):
        executor.start()
