"""The process that drives the workers is killed or interrupted: they end, or stay, as they must."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import seconds_until_all_ended

pytestmark = pytest.mark.process

#: What is promised for every process after the SIGKILL of another.
LIMIT_S = 3.0

DRIVER = """
import signal, sys
from tests.support.fake_worker import FAKE_WORKER, fake_config, fake_step
from vcli.runtime.executor.multiproc import MultiprocExecutor

def on_message(message):
    if LOADING and getattr(message, "state", "") == "weights":
        print(message.pid, flush=True)

LOADING = sys.argv[1] == "loading"
worker_cls = "tests.support.fake_worker:NeverLoadsAnywhere" if LOADING else FAKE_WORKER
executor = MultiprocExecutor(fake_config(2), on_message=on_message, worker_cls=worker_cls)
executor.start()
if sys.argv[1] == "stuck":
    executor.collective_rpc("sleep_in_c_on", args=([0, 1], 60), non_block=True)
if sys.argv[1] == "in_step":
    executor.execute_model(fake_step(number=903), non_block=True)
try:
    for pid in executor.worker_pids.values():
        print(pid, flush=True)
    sys.stdin.read()
except KeyboardInterrupt:
    results = executor.collective_rpc("echo", args=("alive",))
    executor.shutdown()
    print(results, executor._group.exit_codes, flush=True)
"""


class Driver:
    """A process of its own group, as a shell starts it, with two workers."""

    def __init__(self, mode: str) -> None:
        root = Path(__file__).parents[3]
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, mode],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=root,
            text=True,
            process_group=0,
        )
        assert self.process.stdout is not None
        self.pids = [int(self.process.stdout.readline()) for _ in range(2)]

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def driver(request: pytest.FixtureRequest) -> Iterator[Driver]:
    driver = Driver(request.param)
    yield driver
    driver.close()


@pytest.mark.parametrize("driver", ["idle", "stuck", "in_step", "loading"], indirect=True)
def test_no_worker_outlives_a_killed_driver(driver: Driver) -> None:
    os.kill(driver.process.pid, signal.SIGKILL)
    seconds_until_all_ended(driver.pids, LIMIT_S)


@pytest.mark.parametrize("driver", ["idle"], indirect=True)
def test_interrupt_from_the_terminal_reaches_the_driver_alone(driver: Driver) -> None:
    os.killpg(driver.process.pid, signal.SIGINT)
    output, _ = driver.process.communicate(timeout=20)
    assert output.splitlines()[-1] == "['alive', 'alive'] (0, 0)"
    seconds_until_all_ended(driver.pids, LIMIT_S)
