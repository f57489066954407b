"""Signals to stop are the parent's business while it lives, whenever and however they come."""

import logging
import os
import queue
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.child_targets import spec
from tests.support.processes import seconds_until_all_ended, wait_until
from vcli.runtime.messages import ChildMessage, ChildReady, ChildSignalled
from vcli.runtime.process.fork_owner import ForkServer
from vcli.runtime.process.group import ChildGroup
from vcli.runtime.process.left_signals import LeftSignals
from vcli.runtime.process.lifeline import PARENT_GONE_EXIT_CODE, STOP_SIGNALS
from vcli.runtime.process.starter import SpawnStarter, Starter

pytestmark = pytest.mark.process

WAIT_S = 20.0


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    server = ForkServer.start(preload=())
    yield server
    server.close()


@pytest.fixture(params=["spawn", "forkserver"])
def starter(request: pytest.FixtureRequest, server: ForkServer) -> Starter:
    return SpawnStarter() if request.param == "spawn" else server.starter


class Group(ChildGroup):
    """Keeps what its children say and what it blames."""

    def __init__(self) -> None:
        self.messages: queue.Queue[ChildMessage] = queue.Queue()
        self.failures: list[object] = []
        super().__init__(self.messages.put, self.failures.append)

    def until(self, wanted: Callable[[ChildMessage], bool]) -> ChildMessage:
        while not wanted(message := self.messages.get(timeout=WAIT_S)):
            pass
        return message

    def signalled(self) -> ChildSignalled:
        message = self.until(lambda message: isinstance(message, ChildSignalled))
        assert isinstance(message, ChildSignalled)
        return message


@pytest.fixture
def group() -> Iterator[Group]:
    group = Group()
    yield group
    group.shutdown(2.0, asked=False)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_child_tells_its_parent_and_runs_on(
    group: Group, starter: Starter, number: signal.Signals
) -> None:
    group.start([spec("wait", title="Worker_TP1", rank=1)], starter=starter)
    group.wait_ready(WAIT_S)
    for _ in range(3):
        os.kill(group.pids[0], number)
        told = group.signalled()
        assert (told.process, told.rank, told.pid) == ("Worker_TP1", 1, group.pids[0])
        assert told.signal_name == number.name
    with pytest.raises(AssertionError, match="still run"):
        seconds_until_all_ended(group.pids, 1.5)  # the alarm that SIGHUP set was taken back
    group.shutdown(5.0, asked=False)
    assert group.exit_codes == (PARENT_GONE_EXIT_CODE,)
    assert group.failures == []


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_child_that_was_started_a_moment_ago_gets_ready(
    group: Group, starter: Starter, number: signal.Signals
) -> None:
    group.start([spec("wait")], starter=starter)
    os.kill(group.pids[0], number)
    group.wait_ready(WAIT_S)
    with pytest.raises(AssertionError, match="still run"):
        seconds_until_all_ended(group.pids, 1.5)


@pytest.mark.parametrize("with_lock", [False, True])
def test_child_in_c_code_that_got_signals_ends_with_its_parent(
    group: Group, with_lock: bool
) -> None:
    """The thread that takes them may not run: the kernel's watcher must not depend on it."""
    inner = spec("sleep_in_libc", with_lock, False)
    group.start([spec("be_parent", [inner], title="EngineCore")])
    (pids,) = group.wait_ready(WAIT_S)
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(pids[0], number)
    os.kill(group.pids[0], signal.SIGKILL)
    seconds_until_all_ended(pids, 2.0)


def test_program_that_a_child_starts_takes_its_signals(group: Group, tmp_path: Path) -> None:
    note = tmp_path / "note"
    group.start([spec("run_program", str(note))])
    pid = int(group.wait_ready(WAIT_S)[0])
    os.kill(pid, signal.SIGTERM)
    wait_until(note.exists, WAIT_S)
    assert note.read_text() == str(-signal.SIGTERM)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_fork_server_goes_on(server: ForkServer, group: Group, number: signal.Signals) -> None:
    os.kill(server.pid, number)
    group.start([spec("wait")], starter=server.starter)
    group.wait_ready(WAIT_S)
    assert Path(f"/proc/{group.pids[0]}/status").read_text().count(f"PPid:\t{server.pid}\n") == 1


def test_fork_server_that_still_imports_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: Group
) -> None:
    importing = tmp_path / "importing"
    os.mkfifo(importing)
    (tmp_path / "slow_preload.py").write_text(f"open({str(importing)!r}).read()\n")
    monkeypatch.syspath_prepend(tmp_path)
    server = ForkServer.start(preload=("slow_preload",))
    try:
        for number in STOP_SIGNALS:
            os.kill(server.pid, number)  # its first instruction may still be to come
        importing.write_text("")
        group.start([spec("wait")], starter=server.starter)
        group.wait_ready(WAIT_S)
        group.shutdown(2.0, asked=False)
    finally:
        server.close()


def signalled(process: str, pid: int) -> ChildSignalled:
    return ChildSignalled(process=process, pid=pid, signal_name="SIGTERM")


def test_lone_signal_is_told_once_with_what_stops_the_instance(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vcli.runtime.process.left_signals._WINDOW_S", 0.1)
    left = LeftSignals(lambda: False)
    ready = ChildReady(process="EngineCore", seconds=1.0, pid=7)
    with caplog.at_level(logging.WARNING, logger="vcli"):
        assert [left.take(message) for message in (ready, signalled("EngineCore", 7))] == [0, 1]
        assert left.take(signalled("Worker_TP0", 8))
        wait_until(lambda: bool(caplog.records), WAIT_S)
    (record,) = caplog.records
    text = record.getMessage()
    assert "EngineCore (pid 7), Worker_TP0 (pid 8) got SIGTERM" in text
    assert f"kill {os.getpid()}" in text


def test_signal_that_came_to_the_parent_too_is_not_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vcli.runtime.process.left_signals._WINDOW_S", 0.05)
    asked: list[float] = []
    left = LeftSignals(lambda: asked.append(time.monotonic()) is None)
    with caplog.at_level(logging.WARNING, logger="vcli"):
        left.take(signalled("EngineCore", 7))
        wait_until(lambda: bool(asked), WAIT_S)
    assert caplog.records == []
