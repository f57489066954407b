"""Of several reports about one failure, the cause is told, once."""

import queue

from vcli.runtime.errors import FailureReport
from vcli.runtime.process.first_cause import FirstCause

LOST_PEER = FailureReport(
    process="Worker_TP0", phase="execute_model", kind="RuntimeError",
    message="[gloo] Connection closed by peer", rank=0,
)  # fmt: skip
KILLED = FailureReport(
    process="Worker_TP1", phase="serving", kind="", message="killed by SIGKILL", rank=1,
    exit_code=-9,
)  # fmt: skip


def test_a_cause_is_told_at_once_and_only_once() -> None:
    told: queue.Queue[FailureReport] = queue.Queue()
    cause = FirstCause(told.put, wait_s=60)
    cause.observe(KILLED)
    assert told.get_nowait() == KILLED
    assert cause.told.result(0) == KILLED
    cause.observe(LOST_PEER)
    cause.observe(KILLED)
    assert told.empty()


def test_a_consequence_waits_for_its_cause() -> None:
    told: queue.Queue[FailureReport] = queue.Queue()
    cause = FirstCause(told.put, wait_s=60)
    cause.observe(LOST_PEER)
    assert told.empty()
    cause.observe(KILLED)
    assert told.get_nowait() == KILLED


def test_a_consequence_alone_is_told_after_the_wait() -> None:
    told: queue.Queue[FailureReport] = queue.Queue()
    FirstCause(told.put, wait_s=0.05).observe(LOST_PEER)
    assert told.get(timeout=5) == LOST_PEER


def test_nothing_is_told_after_close() -> None:
    told: queue.Queue[FailureReport] = queue.Queue()
    cause = FirstCause(told.put, wait_s=0.01)
    cause.observe(LOST_PEER)
    cause.close()
    cause.observe(KILLED)
    assert not cause.told.done()
    assert told.empty()
