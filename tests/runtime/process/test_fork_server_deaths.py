"""Whoever is killed, the fork server, its owner or a client: the others do what they must."""

import os
import queue
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.child_targets import spec
from tests.support.processes import seconds_until_all_ended, wait_until
from vcli.runtime.errors import FailureReport
from vcli.runtime.exit_status import kernel_exit_code
from vcli.runtime.messages import ChildMessage, ChildState
from vcli.runtime.process.child import ChildSpec
from vcli.runtime.process.failures import LOST_EXIT_CODE
from vcli.runtime.process.fork_owner import ForkServer
from vcli.runtime.process.group import ChildGroup

pytestmark = pytest.mark.process

LIMIT_S = 3.0


class Group(ChildGroup):
    def __init__(self) -> None:
        self.messages: queue.Queue[ChildMessage] = queue.Queue()
        self.failures: queue.Queue[FailureReport] = queue.Queue()
        super().__init__(self.messages.put, self.failures.put)


@pytest.fixture
def group() -> Iterator[Group]:
    group = Group()
    yield group
    group.shutdown(1.0, asked=False)


def kill_server(server: ForkServer) -> None:
    os.kill(server.pid, signal.SIGKILL)
    seconds_until_all_ended([server.pid], 5)


def test_killed_server_is_named_and_its_children_live_on(
    server: ForkServer, group: Group, caplog: pytest.LogCaptureFixture
) -> None:
    group.start([spec("wait", 1), spec("wait", 2)], starter=server.starter)
    group.wait_ready(30)
    kill_server(server)
    wait_until(lambda: f"fork server (pid {server.pid}) killed by SIGKILL" in caplog.text)
    with pytest.raises(AssertionError, match="still run"):
        seconds_until_all_ended(group.pids, 0.3)
    assert group.exit_codes == (None, None)
    assert group.failures.empty()


def test_end_of_a_child_after_the_servers_is_no_mystery(server: ForkServer, group: Group) -> None:
    group.start([spec("wait", 1), spec("wait", 2)], starter=server.starter)
    group.wait_ready(30)
    kill_server(server)
    os.kill(group.pids[1], signal.SIGKILL)
    report = group.failures.get(timeout=5)
    assert report.pid == group.pids[1]
    # The kernel tells since 6.15, once whoever inherited the child has reaped it.
    assert report.exit_code in (-signal.SIGKILL, LOST_EXIT_CODE)
    assert report.message in (
        "killed by SIGKILL",
        "ended; its exit status was lost with the fork server",
    )
    assert group.exit_codes[0] is None


def test_after_the_servers_death_children_are_spawned(
    server: ForkServer, group: Group, caplog: pytest.LogCaptureFixture
) -> None:
    kill_server(server)
    group.start([spec("wait", 1), spec("wait", 2)], starter=server.starter)
    assert group.wait_ready(30) == [1, 2]
    for pid in group.pids:
        assert f"PPid:\t{os.getpid()}\n" in Path(f"/proc/{pid}/status").read_text()
    told = [line for line in caplog.messages if "no fork for Child" in line]
    assert len(told) == 1
    assert "the fork server is gone" in told[0]


def test_server_killed_in_the_import_costs_time_and_nothing_else(
    group: Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    importing = tmp_path / "importing"
    os.mkfifo(importing)
    (tmp_path / "slow_preload.py").write_text(
        f"import time\nopen({str(importing)!r}, 'w').close()\ntime.sleep(60)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    server = ForkServer.start(preload=("slow_preload",))
    importing.read_text()
    starting = threading.Thread(
        target=lambda: group.start([spec("wait", 1)], starter=server.starter)
    )
    starting.start()
    os.kill(server.pid, signal.SIGKILL)
    starting.join(20)
    assert group.wait_ready(30) == [1]
    server.close()


class Family:
    """An owner, child of this test, with a fork server and children; see `be_owner`."""

    def __init__(self, group: Group, *, target: str = "be_owner", **fields: object) -> None:
        self.group = group
        group.start(
            [
                ChildSpec(
                    target=f"tests.support.fork_owners:{target}",
                    arguments=(),
                    title="Owner",
                    log_level="CRITICAL",
                    **fields,
                )
            ]
        )
        self.pids: dict[str, int] = {}
        while "all" not in self.pids:
            message = group.messages.get(timeout=30)
            if isinstance(message, ChildState) and message.state == "device":
                name, pid = message.detail.split("=")
                self.pids[name] = int(pid)


def test_killed_owner_takes_the_server_and_everybody_along(group: Group) -> None:
    family = Family(group)
    os.kill(group.pids[0], signal.SIGKILL)
    assert set(family.pids) == {"server", "core", "worker0", "worker1", "all"}
    del family.pids["all"]
    seconds_until_all_ended(family.pids.values(), LIMIT_S)


def test_owner_killed_while_the_server_imports_takes_it_along(
    group: Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hung_preload.py").write_text(
        "from tests.support.fake_worker import sleep_in_c_with_the_lock\n"
        "sleep_in_c_with_the_lock(60)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    family = Family(group, target="be_owner_of_hung_server")
    os.kill(group.pids[0], signal.SIGKILL)
    seconds_until_all_ended([family.pids["server"]], LIMIT_S)


def test_killed_client_ends_its_own_children_and_nobody_elses(group: Group) -> None:
    family = Family(group)
    os.kill(family.pids["core"], signal.SIGKILL)
    seconds_until_all_ended([family.pids["worker0"], family.pids["worker1"]], LIMIT_S)
    # The owner heard how its child ended, from the server, which lives on.
    while True:
        message = group.messages.get(timeout=10)
        if isinstance(message, ChildState) and message.state == "weights":
            break
    assert message.detail == f"core {family.pids['core']} exit -9, server lives True"


def test_kernel_tells_nothing_of_a_process_that_runs() -> None:
    pidfd = os.pidfd_open(os.getpid())
    try:
        assert kernel_exit_code(pidfd) is None
    finally:
        os.close(pidfd)
