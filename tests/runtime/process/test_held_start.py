"""A start that a stopped or stuck process holds up: who that is, and what lets it go on."""

import contextlib
import itertools
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.child_targets import spec
from tests.support.processes import wait_until
from vcli.runtime.errors import StartupError
from vcli.runtime.process.fork_client import ForkServerClient, ForkServerStarter
from vcli.runtime.process.fork_owner import ForkServer
from vcli.runtime.process.fork_protocol import link_pair
from vcli.runtime.process.group import ChildGroup
from vcli.runtime.process.held import HELD_AFTER_S, Hold, HoldWatch, describe_holds, describe_stop
from vcli.topology.errors import ExitStatus

pytestmark = pytest.mark.process

#: A parent by vfork waits in the kernel until its child has ended; clone's number is for x86-64.
_VFORK = """
import ctypes, signal, time
if ctypes.CDLL(None).syscall(56, 0x4000 | signal.SIGCHLD, 0, 0, 0, 0) == 0:
    time.sleep(60)
"""


@pytest.fixture
def group() -> Iterator[ChildGroup]:
    messages: queue.Queue[object] = queue.Queue()
    group = ChildGroup(messages.put, messages.put)
    yield group
    group.shutdown(1.0, asked=False)


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: describe_stop(pid) != "")


def test_a_process_that_runs_or_is_gone_is_not_held() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert describe_holds([os.getpid(), ended.pid]) == ["", ""]


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the number of a system call")
def test_a_process_in_the_kernel_is_held_by_what_does_not_answer() -> None:
    process = subprocess.Popen([sys.executable, "-c", _VFORK], start_new_session=True)
    try:
        watch = HoldWatch(process.pid)
        assert "(state D)" not in watch.look().text
        wait_until(lambda: "(state D)" in watch.look().text)
        (hold,) = describe_holds([process.pid])
        assert f"/proc/{process.pid}/task/{process.pid}/stack" in hold
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.parametrize(
    ("state", "num_switches", "read_bytes", "is_held"),
    [("D (disk sleep)", 5, 4096, True), ("D (disk sleep)", 6, 4096, False),
     ("D (disk sleep)", 5, 8192, False), ("S (sleeping)", 5, 4096, False)],
    ids=["stands-still", "was-woken", "another-reads", "waits"],
)  # fmt: skip
def test_a_thread_that_reads_a_slow_disk_is_not_held(
    tmp_path: Path, state: str, num_switches: int, read_bytes: int, is_held: bool
) -> None:
    task = tmp_path / "7" / "task" / "9"
    task.mkdir(parents=True)
    now_s = 0.0
    watch = HoldWatch(7, clock=lambda: now_s, proc=tmp_path)

    def look(state: str, num_switches: int, read_bytes: int) -> str:
        (task / "status").write_text(f"State:\t{state}\nvoluntary_ctxt_switches:\t{num_switches}\n")
        (tmp_path / "7" / "io").write_text(f"rchar: 1\nread_bytes: {read_bytes}\n")
        return watch.look().text

    assert look("D (disk sleep)", 5, 4096) == ""
    now_s = HELD_AFTER_S
    assert ("thread 9 is in the kernel" in look(state, num_switches, read_bytes)) is is_held
    now_s = 1.5 * HELD_AFTER_S
    assert bool(look(state, num_switches, read_bytes)) is is_held


def test_a_stopped_child_is_the_one_that_is_blamed(group: ChildGroup) -> None:
    group.start([spec("hang_in", "joined", title="A"), spec("hang_in", "joined", title="B")])
    stop(group.pids[1])
    with pytest.raises(StartupError) as failed:
        group.wait_ready(1.0)
    report = failed.value.report
    assert (report.process, report.pid) == ("B", group.pids[1])
    assert f"stopped (SIGSTOP or a debugger): kill -CONT {group.pids[1]}" in report.message
    assert "2 of 2 processes not ready after 1 s" in report.message
    assert "longer --start-timeout does not help" in report.hint


def test_patience_is_for_children_that_run(group: ChildGroup) -> None:
    group.start([spec("hang_in", "joined")])
    stop(group.pids[0])
    with pytest.raises(StartupError, match="kill -CONT"):
        group.wait_ready(0.5, patience_s=3600.0)


def test_the_deadline_that_is_told_is_the_whole_one(group: ChildGroup) -> None:
    group.start([spec("hang_in", "joined")])
    with pytest.raises(StartupError, match="not ready after 60 s") as failed:
        group.wait_ready(60.0, left_s=0.1, patience_s=0.1)
    assert "needs a longer --start-timeout" in failed.value.report.hint


def test_a_stopped_fork_server_is_named_at_the_deadline(
    server: ForkServer, group: ChildGroup
) -> None:
    stop(server.pid)
    with pytest.raises(StartupError) as failed:
        group.start([spec("wait", 1, title="EngineCore")], starter=server.starter, timeout_s=0.5)
    report = failed.value.report
    assert (report.process, report.pid) == ("ForkServer", server.pid)
    assert report.phase == "start of EngineCore"
    assert f"kill -CONT {server.pid}" in report.message
    assert report.exit_status == ExitStatus.START_FAILED
    assert group.pids == ()


def test_a_fork_server_that_hangs_in_an_import_is_named_at_the_deadline(
    group: ChildGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "endless_import.py").write_text("import threading\nthreading.Event().wait()\n")
    monkeypatch.syspath_prepend(tmp_path)
    server = ForkServer.start(preload=("endless_import",))
    try:
        with pytest.raises(StartupError, match="it is importing") as failed:
            group.start([spec("wait", 1)], starter=server.starter, timeout_s=0.5)
        assert "--start-method spawn" in failed.value.report.hint
    finally:
        server.close()


def test_a_client_that_did_not_start_the_server_can_name_it_too(
    server: ForkServer, group: ChildGroup
) -> None:
    client = ForkServerClient(server.new_link())
    try:
        wait_until(lambda: client.preloaded is not None)
        stop(server.pid)
        with pytest.raises(StartupError, match=f"ForkServer pid {server.pid} .*kill -CONT"):
            group.start([spec("wait", 1)], starter=ForkServerStarter(client), timeout_s=0.5)
    finally:
        client.close()


def test_a_stopped_server_is_warned_of_before_the_deadline_and_serves_when_it_goes_on(
    server: ForkServer,
    group: ChildGroup,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("vcli.runtime.process.fork_client._LOOK_EVERY_S", 0.05)
    stop(server.pid)
    starting = threading.Thread(
        target=lambda: group.start([spec("wait", 1)], starter=server.starter, timeout_s=60.0)
    )
    starting.start()
    wait_until(lambda: f"kill -CONT {server.pid}" in caplog.text)
    os.kill(server.pid, signal.SIGCONT)
    starting.join(20)
    assert group.wait_ready(20) == [1]
    assert len([line for line in caplog.messages if "starts no Child" in line]) == 1


def test_threads_that_are_stuck_by_turns_are_warned_of_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = itertools.count(1)
    monkeypatch.setattr(HoldWatch, "look", lambda _: Hold(f"thread {next(threads)} is held"))
    monkeypatch.setattr("vcli.runtime.process.fork_client._LOOK_EVERY_S", 0.01)
    ours, theirs = link_pair()
    client = ForkServerClient(ours, server_pid=os.getpid())
    with theirs, contextlib.closing(client), pytest.raises(StartupError, match="is held"):
        client.fork([], [], title="Child", end_s=time.monotonic() + 0.3)
    assert next(threads) > 3
    assert len([line for line in caplog.messages if "starts no Child" in line]) == 1


def test_a_request_that_was_given_up_leaves_no_child(server: ForkServer, group: ChildGroup) -> None:
    given_up = ChildGroup(lambda _: None, lambda _: None)
    stop(server.pid)
    with pytest.raises(StartupError):
        given_up.start([spec("wait", 1)], starter=server.starter, timeout_s=0.3)
    os.kill(server.pid, signal.SIGCONT)
    # Asked later, so the late child was forked before it; it ends as its edge was let go of.
    group.start([spec("wait", 1)], starter=server.starter)
    assert group.wait_ready(20) == [1]
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children")
    wait_until(lambda: children.read_text().split() == [str(group.pids[0])])
