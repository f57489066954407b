"""Who keeps others waiting, told when the ranks of a group live on two nodes."""

import contextlib
import logging
import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.executor.test_multinode import TOKEN, Pair
from tests.support.fake_worker import FakeWorker, fake_config, fake_step
from tests.support.processes import wait_until
from vcli.runtime.config import DeadlineConfig
from vcli.runtime.errors import WorkerDiedError
from vcli.runtime.executor.node_messages import NodeActivity
from vcli.runtime.messages import ModelRunnerOutput, SchedulerOutput
from vcli.runtime.process.held import describe_stop
from vcli.runtime.worker.progress import ProgressLine, RankProgress

pytestmark = pytest.mark.process

ALL_REDUCE = r"the all_reduce of TP \[0, 1, 2, 3\]"
OUTSIDE = "it is outside of a collective, after 0 collectives"
WHERE = {1: r"\(Worker_TP1 on node 0, here\)", 3: r"\(Worker_TP3 on node 1, there\)"}


class MeetsInStep(FakeWorker):
    """All ranks come to one place in each step, a folder, and wait there for the others."""

    def trace_collectives(self, line: ProgressLine) -> None:
        self._line = line

    def execute_model(self, output: SchedulerOutput) -> ModelRunnerOutput | None:
        self._line.enter("all_reduce", "TP")
        folder = self.config.model.path
        (folder / str(self.rank)).touch()
        deadline = time.monotonic() + 20
        # Nearly all the time in native code, as in a collective: stacks that are printed of a
        # thread that runs Python code may crash it.
        while len(os.listdir(folder)) < self.config.plan.world_size:  # noqa: PTH208
            assert time.monotonic() < deadline
            time.sleep(0.1)
        self._line.leave()
        return super().execute_model(output)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    folder = tmp_path / "place"
    folder.mkdir()
    made = Pair(
        TOKEN,
        worker_cls=f"{__name__}:MeetsInStep",
        model=replace(fake_config().model, path=folder),
        deadlines=DeadlineConfig(start_s=30.0, execute_model_s=20.0, shutdown_s=5.0, stall_s=2.0),
    )
    try:
        made.start()
        yield made
    finally:
        made.close()


@contextlib.contextmanager
def stopped(pair: Pair, rank: int) -> Iterator[None]:
    """The process of the rank runs no code."""
    pid = pair.executor.worker_pids[f"Worker_TP{rank}"]
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def in_another_method(pair: Pair, rank: int, fifo: Path) -> Iterator[None]:
    """The rank is in a call before the step."""
    os.mkfifo(fifo)
    call = pair.executor.collective_rpc(
        "wait_for_file_on", args=[[rank], str(fifo)], non_block=True
    )
    try:
        yield
    finally:
        fifo.write_text("go on")
        call.result(10)


def told(caplog: pytest.LogCaptureFixture) -> str:
    """What the log says of the step that does not end."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        for record in list(caplog.records):
            if "runs for over" in record.getMessage():
                return record.getMessage()
        time.sleep(0.01)
    raise AssertionError("nothing was told")


def finish(step: "Future[Any]") -> None:
    """The step ends well once everybody has come."""
    assert step.result(20) is not None


@pytest.mark.parametrize("late", [1, 3], ids=["here", "there"])
@pytest.mark.parametrize("way", ["stopped", "in-another-method"])
def test_the_rank_that_did_not_come_is_named_with_its_node(
    pair: Pair, late: int, way: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keeps_away = (
        stopped(pair, late)
        if way == "stopped"
        else in_another_method(pair, late, tmp_path / "fifo")
    )
    with caplog.at_level(logging.ERROR):
        with keeps_away:
            step = pair.executor.execute_model(fake_step(), non_block=True)
            text = told(caplog)
        finish(step)
    assert_found(
        f"over 2 s: rank {late} {WHERE[late]} has not come to {ALL_REDUCE}, {OUTSIDE};", text
    )
    assert text.count("has not come") == 1
    assert "not known" not in text


@pytest.mark.parametrize("late", [1, 3], ids=["here", "there"])
def test_ranks_of_a_node_that_does_not_answer_are_unknown_and_not_blamed(
    pair: Pair, late: int, caplog: pytest.LogCaptureFixture
) -> None:
    pair.node.answers = False
    with caplog.at_level(logging.ERROR):
        with stopped(pair, late):
            step = pair.executor.execute_model(fake_step(), non_block=True)
            text = told(caplog)
        finish(step)
    for rank in (2, 3):
        assert_found(
            rf"it is not known whether rank {rank} \(Worker_TP{rank} on node 1, there\) has come "
            f"to {ALL_REDUCE}: its node told nothing newer within 1 s",
            text,
        )
    assert text.count("has not come") == (1 if late == 1 else 0)
    if late == 1:
        assert_found(f"rank 1 {WHERE[1]} has not come to {ALL_REDUCE}", text)


def test_stopped_rank_of_another_node_is_named_as_soon_as_its_node_says_so(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        with stopped(pair, 3):
            pid = pair.executor.worker_pids["Worker_TP3"]
            step = pair.executor.execute_model(fake_step(), non_block=True)
            wait_until(lambda: describe_stop(pid) != "")
            pair.node.workers.tell_activity()
            wait_until(lambda: f"kill -CONT {pid}" in caplog.text, 10)
        finish(step)
    assert_found(f"execute_model waits: rank 3 {WHERE[3]} is stopped", caplog.text)


def test_an_answer_for_ranks_of_another_node_is_a_failure(pair: Pair) -> None:
    line = RankProgress(rank=1, num_entered=0, operation="", kind="", seconds=0.0)
    call = pair.executor.collective_rpc("sleep_on", args=[[0], 5], non_block=True)
    pair.node.link.say(NodeActivity(by_rank={}, progress=(line,), answers=1))
    with pytest.raises(WorkerDiedError, match=r"ranks \[1\] are not on node 1"):
        call.result(5)


def assert_found(pattern: str, text: str) -> None:
    assert re.search(pattern, text), text
