"""The ladder ends every child, in time, from any thread, and leaves nothing open."""

import logging
import os
import signal
import threading
import time

import pytest

from tests.support.child_targets import spec
from vcli.runtime.errors import StartupError
from vcli.runtime.messages import ChildMessage
from vcli.runtime.process.child import ChildSpec
from vcli.runtime.process.group import ChildGroup
from vcli.runtime.process.lifeline import PARENT_GONE_EXIT_CODE

pytestmark = pytest.mark.process


def ready_group(*specs: ChildSpec, failures: list[object] | None = None) -> ChildGroup:
    kept: list[object] = [] if failures is None else failures
    group = ChildGroup(lambda message: None, kept.append)
    group.start(specs)
    group.wait_ready(20)
    return group


def open_descriptors() -> list[int]:
    return [number for number in range(1024) if is_open(number)]


def is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def test_child_ends_when_its_lifeline_is_closed() -> None:
    group = ready_group(spec("wait"))
    group.shutdown(10.0, asked=False)
    assert group.exit_codes == (PARENT_GONE_EXIT_CODE,)


def test_child_that_ignores_everything_is_killed_at_the_end_of_the_grace_window() -> None:
    group = ready_group(spec("ignore_everything"))
    begin_s = time.monotonic()
    group.shutdown(1.0)
    assert 0.9 <= time.monotonic() - begin_s < 10.0
    assert group.exit_codes == (-signal.SIGKILL,)


def test_shutdown_is_idempotent_and_works_from_several_threads() -> None:
    group = ready_group(spec("wait"), spec("wait"))
    threads = [
        threading.Thread(target=group.shutdown, args=(5.0,), kwargs={"asked": False})
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    group.shutdown(5.0)
    assert group.exit_codes == (PARENT_GONE_EXIT_CODE,) * 2


def test_shutdown_from_the_failure_callback_ends_the_rest() -> None:
    ended = threading.Event()
    group = ChildGroup(
        lambda message: None, lambda report: (group.shutdown(5.0, asked=False), ended.set())
    )
    group.start([spec("wait"), spec("wait")])
    group.wait_ready(20)
    os.kill(group.pids[0], signal.SIGKILL)
    assert ended.wait(10)
    assert group.exit_codes == (-signal.SIGKILL, PARENT_GONE_EXIT_CODE)


def test_shutdown_in_the_message_callback_is_refused() -> None:
    refused: list[RuntimeError] = []

    def on_message(message: ChildMessage) -> None:
        with pytest.raises(RuntimeError, match="on_message") as raised:
            group.shutdown(1.0)
        refused.append(raised.value)

    group = ChildGroup(on_message, lambda report: None)
    group.start([spec("wait")])
    group.wait_ready(20)
    group.shutdown(5.0, asked=False)
    assert refused


def test_shutdown_ends_a_wait_for_ready() -> None:
    group = ChildGroup(lambda message: None, lambda report: None)
    group.start([spec("hang_in", "weights")])
    timer = threading.Timer(0.2, group.shutdown, args=(5.0,), kwargs={"asked": False})
    timer.start()
    with pytest.raises(StartupError):
        group.wait_ready(20)
    timer.join()


def test_nothing_stays_open_or_unreaped() -> None:
    before = open_descriptors()
    group = ready_group(spec("wait"), spec("wait"))
    pids = group.pids
    group.shutdown(5.0, asked=False)
    assert open_descriptors() == before
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert not [thread for thread in threading.enumerate() if thread.name == "child-monitor"]


def test_exit_statuses_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    group = ready_group(spec("wait", title="Worker_TP0", rank=0))
    with caplog.at_level(logging.INFO, logger="vcli"):
        group.shutdown(5.0, asked=False)
    assert f"Worker_TP0 (rank 0, pid {group.pids[0]})" in caplog.text
    assert "parent was gone" in caplog.text


def test_end_that_was_asked_for_is_no_failure() -> None:
    failures: list[object] = []
    group = ready_group(spec("wait"), spec("wait"), failures=failures)
    group.shutdown(5.0, asked=False)
    assert failures == []


def test_child_that_ends_as_expected_is_not_called_a_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failures: list[object] = []
    group = ready_group(spec("wait"), failures=failures)
    group.expect_end()
    with caplog.at_level(logging.INFO, logger="vcli"):
        os.kill(group.pids[0], signal.SIGKILL)
        group.shutdown(20.0)
    assert "killed by SIGKILL" in caplog.text
    assert "unexpectedly" not in caplog.text
    assert failures == []
