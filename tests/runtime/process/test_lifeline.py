"""No child outlives its parent, whatever the child does, also when the grandparent lives on."""

import os
import queue
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.child_targets import spec
from tests.support.processes import seconds_until_all_ended
from vcli.runtime.messages import ChildMessage, ChildState
from vcli.runtime.process.child import ChildSpec
from vcli.runtime.process.group import ChildGroup

pytestmark = pytest.mark.process

#: What is promised is 3 s; the lifeline needs a second at most.
LIMIT_S = 2.0


class Family:
    """A parent, child of this test, with children of its own."""

    def __init__(self) -> None:
        self.messages: queue.Queue[ChildMessage] = queue.Queue()
        self.group = ChildGroup(self.messages.put, lambda report: None)
        self.children: list[int] = []

    def start(self, *specs: ChildSpec) -> None:
        self.group.start([spec("be_parent", list(specs), title="EngineCore")])
        self.wait_for("EngineCore", "device")

    def wait_for(self, process: str, state: str) -> None:
        while True:
            message = self.messages.get(timeout=20)
            if isinstance(message, ChildState):
                if message.process == "EngineCore" and message.state == "device":
                    self.children = [int(pid) for pid in message.detail.split(",")]
                if (message.process, message.state) == (process, state):
                    return

    def kill_parent(self) -> float:
        os.kill(self.group.pids[0], signal.SIGKILL)
        return seconds_until_all_ended(self.children, LIMIT_S)


@pytest.fixture
def family() -> Iterator[Family]:
    family = Family()
    yield family
    family.group.shutdown(1.0, asked=False)


def test_idle_children_end_at_once(family: Family) -> None:
    family.start(spec("wait"), spec("wait"))
    family.group.wait_ready(20)
    assert family.kill_parent() < 0.5


@pytest.mark.parametrize("with_callback", [False, True])
@pytest.mark.parametrize("with_lock", [False, True])
def test_child_stuck_in_c_code_ends(family: Family, with_lock: bool, with_callback: bool) -> None:
    family.start(spec("sleep_in_libc", with_lock, with_callback))
    family.group.wait_ready(20)
    family.kill_parent()


def test_child_that_still_imports_ends(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    importing = tmp_path / "importing"
    os.mkfifo(importing)
    (tmp_path / "slow_import.py").write_text(
        "from tests.support.fake_worker import sleep_in_c_with_the_lock\n"
        f"open({str(importing)!r}, 'w').close()\n"
        "sleep_in_c_with_the_lock(60)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    family.start(
        ChildSpec(target="slow_import:go", arguments=(), title="Importing", log_level="CRITICAL")
    )
    importing.read_text()
    family.kill_parent()


def test_child_that_was_started_a_moment_ago_ends(family: Family) -> None:
    family.start(spec("wait"), spec("wait"), spec("wait"))
    family.kill_parent()


def test_stopped_parent_does_not_end_its_children(family: Family) -> None:
    family.start(spec("wait"))
    family.group.wait_ready(20)
    os.kill(family.group.pids[0], signal.SIGSTOP)
    with pytest.raises(AssertionError, match="still run"):
        seconds_until_all_ended(family.children, 0.3)
    family.kill_parent()


def test_callback_runs_before_the_end(family: Family, tmp_path: Path) -> None:
    note = tmp_path / "note"
    family.start(spec("note_parent_death", str(note)))
    family.group.wait_ready(20)
    family.kill_parent()
    assert note.read_text() == "parent gone"


def test_interrupt_of_the_parents_process_group_does_not_reach_children(family: Family) -> None:
    family.start(spec("wait"))
    family.group.wait_ready(20)
    # EngineCore ignores SIGINT itself, so what is left to die would be its child.
    os.killpg(family.group.pids[0], signal.SIGINT)
    os.kill(family.children[0], signal.SIGINT)
    with pytest.raises(AssertionError, match="still run"):
        seconds_until_all_ended(family.children, 0.3)


def test_program_of_a_test_run_ends_with_it() -> None:
    """Of the tests' own support: a killed test run leaves no server behind."""
    script = (
        "import subprocess, sys\n"
        "from tests.support.bound import bound\n"
        "program = [sys.executable, '-c', 'import time; print(flush=True); time.sleep(60)']\n"
        "child = subprocess.Popen(bound(program), stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\n"
        "print(child.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[3],
    ) as test_run:
        assert test_run.stdout is not None
        pid = int(test_run.stdout.readline())
        test_run.kill()
    seconds_until_all_ended([pid], 10.0)


def test_parent_that_was_gone_before_the_kernel_was_armed_is_noticed() -> None:
    """The kernel signals the moment of the end of file, which is long over here."""
    script = (
        "import os, signal\n"
        "from vcli.runtime.process.lifeline import arm_kernel\n"
        "read_end, write_end = os.pipe()\n"
        "os.close(write_end)\n"
        "arm_kernel(read_end)\n"
        "signal.pause()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], timeout=30, check=False)
    assert done.returncode == -signal.SIGALRM
