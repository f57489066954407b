"""What real workers write to their stderr: their log under their titles, stacks only when stuck."""

import contextlib
import os
import re
import select
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.fake_worker import FAKE_WORKER, SPEC, FakeWorker, fake_config, fake_step
from vcli.runtime.config import DeadlineConfig
from vcli.runtime.errors import WorkerError
from vcli.runtime.executor.multiproc import MultiprocExecutor
from vcli.topology.config import ParallelConfig
from vcli.topology.planner import plan_topology

pytestmark = pytest.mark.process

STALL_S = 2.0
HELD_STEP = 77


class HoldsSteps(FakeWorker):
    """A certain step lasts until somebody writes into the fifo."""

    def execute_model(self, output):
        if output.running.numbers == [HELD_STEP]:
            Path(os.environ["TEST_GATE"]).read_text()
        return super().execute_model(output)


class Stderr:
    """The stderr of children that are started in `of_children`."""

    def __init__(self) -> None:
        self._read_fd, self._write_fd = os.pipe()

    @contextlib.contextmanager
    def of_children(self) -> Iterator[None]:
        own = os.dup(2)
        os.dup2(self._write_fd, 2)
        try:
            yield
        finally:
            os.dup2(own, 2)
            os.close(own)

    def comes_within(self, timeout_s: float) -> bool:
        return bool(select.select([self._read_fd], [], [], timeout_s)[0])

    def read_until(self, pattern: str, timeout_s: float = 20.0) -> str:
        text, end_s = "", time.monotonic() + timeout_s
        while not re.search(pattern, text):
            assert self.comes_within(max(0.0, end_s - time.monotonic())), text
            text += os.read(self._read_fd, 1 << 16).decode()
        return text

    def close(self) -> None:
        os.close(self._read_fd)
        os.close(self._write_fd)


@pytest.fixture
def stderr() -> Iterator[Stderr]:
    stderr = Stderr()
    yield stderr
    stderr.close()


def test_watchdog_is_silent_while_workers_are_idle_for_longer_than_a_stall(
    stderr: Stderr,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    monkeypatch.setenv("TEST_GATE", str(gate))
    executor = MultiprocExecutor(
        fake_config(1, deadlines=DeadlineConfig(stall_s=STALL_S), log_level="CRITICAL"),
        on_message=lambda _: None,
        worker_cls=f"{__name__}:HoldsSteps",
        ring_bytes=1 << 18,
    )
    try:
        with stderr.of_children():
            executor.start()
        for step in range(3):
            executor.execute_model(fake_step(step))
        assert not stderr.comes_within(1.5 * STALL_S)
        assert caplog.messages == []
        # The same worker does speak when a step hangs, so the silence above says something.
        held = executor.execute_model(fake_step(9, number=HELD_STEP), non_block=True)
        told = stderr.read_until(r"execute_model[^\n]*\n(.*\n)*.*worker_main")
        assert told.startswith("Timeout (0:00:02)!")
        gate.write_text("")
        assert held.result(10) is not None
    finally:
        executor.shutdown()


def test_each_line_of_a_workers_log_has_its_title(capfd: pytest.CaptureFixture[str]) -> None:
    parallel = ParallelConfig(
        tensor_parallel_size=2,
        pipeline_parallel_size=2,
        data_parallel_size=2,
    )
    executor = MultiprocExecutor(
        fake_config(
            parallel=replace(parallel, data_parallel_rank=1),
            plan=plan_topology(parallel, model=SPEC, dtype="float32"),
            log_level="INFO",
        ),
        on_message=lambda _: None,
        worker_cls=FAKE_WORKER,
        ring_bytes=1 << 18,
    )
    try:
        executor.start()
        with pytest.raises(WorkerError):
            executor.collective_rpc("raise_on", args=([3],))
    finally:
        executor.shutdown()
    lines = capfd.readouterr().err.splitlines()
    titles = [f"Worker_DP1_PP{stage}_TP{rank}" for stage in range(2) for rank in range(2)]
    assert titles_of(lines, "INFO", "left the loop") == titles
    assert titles_of(lines, "INFO", "call failed method=raise_on") == [titles[3]]


def titles_of(lines: list[str], level: str, message: str) -> list[str]:
    """The titles of the lines that say `message`, sorted."""
    pattern = rf"\d\d:\d\d:\d\d {level} (\S+) vcli\.[\w.]+: {re.escape(message)}"
    return sorted(found[1] for line in lines if (found := re.fullmatch(pattern, line)))
