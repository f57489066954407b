"""Symptoms, as in `test_symptoms.py`, that need workers with torch and groups."""

import logging
import re
import threading
import time
from pathlib import Path

import pytest

from tests.support.processes import opened_files
from tests.support.tiny_model import tiny_checkpoint
from tests.support.worker_steps import engine_config, kv_config
from vcli.runtime.config import DeadlineConfig
from vcli.runtime.executor.multiproc import MultiprocExecutor
from vcli.runtime.process.fork_owner import ForkServer
from vcli.runtime.worker.worker import Worker
from vcli.topology.config import ParallelConfig

pytestmark = pytest.mark.process

TP2 = ParallelConfig(tensor_parallel_size=2)


def test_7_engines_that_start_at_once_find_no_address_in_use() -> None:
    """Their ranks meet in memory: no port is chosen first and taken later."""
    fork_server = ForkServer.start()
    executors = [
        MultiprocExecutor(engine_config(tiny_checkpoint(), parallel=TP2), on_message=lambda _: None)
        for _ in range(2)
    ]
    errors: list[BaseException] = []

    def start(executor: MultiprocExecutor) -> None:
        executor.use_starter(fork_server.starter)
        try:
            executor.start()
        except BaseException as error:  # noqa: BLE001 - for the test's thread
            errors.append(error)

    threads = [threading.Thread(target=start, args=(executor,)) for executor in executors]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert errors == []
        for executor in executors:
            executor.initialize_from_config(kv_config())
            assert executor.execute_model(one_request_step()) is not None
            for pid in executor.worker_pids.values():
                # What torch listens on to connect its ranks has numbers that the kernel chose.
                assert listened_addresses(pid) <= {"127.0.0.1"}
                assert names_in_dev_shm(pid) == []
    finally:
        for executor in executors:
            executor.shutdown()
        fork_server.close()


def listened_addresses(pid: int) -> set[str]:
    """Addresses on which a process listens for TCP."""
    sockets = {
        number for target in opened_files(pid) for number in re.findall(r"socket:\[(\d+)\]", target)
    }
    found = set()
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and fields[9] in sockets:
            word = bytes.fromhex(fields[1].split(":")[0])[::-1]
            found.add(".".join(str(byte) for byte in word))
    return found


def names_in_dev_shm(pid: int) -> list[str]:
    maps = Path(f"/proc/{pid}/maps").read_text()
    return [line for line in maps.splitlines() if "/dev/shm" in line]


class SleepsInStep(Worker):
    """Rank 1 does not come to the first collective of a step."""

    def execute_model(self, output):
        if self.rank == 1:
            time.sleep(3)
        return super().execute_model(output)


def test_5_stall_names_the_rank_that_did_not_come_and_dumps_all_stacks(
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
        worker_cls="tests.runtime.executor.test_symptoms_workers:SleepsInStep",
    )
    fork_server = ForkServer.start()  # here, so that it prints to where this test reads
    executor.use_starter(fork_server.starter)
    try:
        executor.start()
        executor.initialize_from_config(kv_config())
        with caplog.at_level(logging.ERROR):
            step = one_request_step()
            result = executor.execute_model(step)
    finally:
        executor.shutdown()
        fork_server.close()
    assert result is not None
    messages = [record.getMessage() for record in caplog.records]
    told = [message for message in messages if "runs for over" in message]
    assert len(told) == 1
    assert "rank 1 (Worker_TP1) has not come to the all_reduce of TP [0, 1]" in told[0]
    assert re.search(r"it is outside of a collective, after \d+ collectives?\b", told[0])
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
