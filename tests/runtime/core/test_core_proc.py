"""The engine core's process: serving and every way to end, in real child processes."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.core_ends import WAIT_S, CoreChild, CoreThread, request, tokens_of
from tests.support.fake_executor import (
    FAULT_BUG,
    FAULT_DIE,
    FAULT_HANG,
    FAULT_RAISE,
    HANGING_START,
    fake_engine_config,
)
from tests.support.fake_model import generate_alone
from tests.support.processes import wait_until
from vcli.runtime.config import DeadlineConfig
from vcli.runtime.errors import StartupError
from vcli.runtime.messages import (
    ChildSignalled,
    ChildState,
    ShutdownCore,
)
from vcli.runtime.process.lifeline import PARENT_GONE_EXIT_CODE, STOP_SIGNALS
from vcli.topology.errors import ExitStatus

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def _children_find_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    # A child searches where its parent does; pytest itself finds the tests without the path.
    monkeypatch.syspath_prepend(str(ROOT))


@pytest.fixture
def child() -> Iterator[CoreChild]:
    child = CoreChild(fake_engine_config())
    try:
        child.ready = child.group.wait_ready(WAIT_S)[0]
        yield child
    finally:
        child.client.frames.close()
        child.group.shutdown(WAIT_S)


@pytest.mark.process
def test_ready_payload_describes_the_engine_and_states_of_workers_are_passed_on(
    child: CoreChild,
) -> None:
    assert child.ready["num_kv_blocks"] == 64
    assert child.ready["block_size"] == 4
    assert child.ready["max_model_len"] == 64
    assert child.ready["effective"]["spin"].startswith("spin_us: ")
    assert child.ready["worker_pids"] == {"Worker_TP0": 4241, "Worker_TP1": 4242}
    assert [report["kind"] for report in child.ready["group_reports"]] == ["TP"]
    workers = {m.process for m in child.messages if isinstance(m, ChildState)}
    assert workers == {"EngineCore", "Worker_TP0", "Worker_TP1"}


@pytest.mark.process
def test_requests_are_served_and_the_core_ends_when_asked(child: CoreChild) -> None:
    child.client.send(request("a", [1, 2, 3]))
    child.client.send(request("b", [4] * 40, max_tokens=9))

    outputs = child.client.outputs_of("a", "b")
    child.client.send(ShutdownCore(drain=False))

    assert tokens_of(outputs["a"]) == generate_alone([1, 2, 3], 4)
    assert tokens_of(outputs["b"]) == generate_alone([4] * 40, 9)
    assert child.exit_code() == 0


@pytest.mark.process
def test_idle_core_does_not_wake_up(child: CoreChild) -> None:
    assert child.client.call("ping").value == child.pid
    before = context_switches(child.pid)

    time.sleep(0.5)  # what is measured, not a wait for anything

    assert context_switches(child.pid) == before


def context_switches(pid: int) -> int:
    """Of all threads; once they have all gone to sleep."""
    tasks = Path(f"/proc/{pid}/task")
    deadline = time.monotonic() + WAIT_S
    while any(" S " not in (task / "stat").read_text() for task in tasks.iterdir()):
        assert time.monotonic() < deadline
    return sum(
        int(line.split()[1])
        for task in tasks.iterdir()
        for line in (task / "status").read_text().splitlines()
        if "voluntary_ctxt_switches" in line
    )


@pytest.mark.process
@pytest.mark.parametrize("how", ["shutdown", "close"])
def test_core_ends_with_status_0_while_requests_run(child: CoreChild, how: str) -> None:
    child.client.send(request("a", [FAULT_HANG, 1, 2]))
    child.client.send(request("b", [1, 2, 3]))
    stats = child.client.call("stats").value  # answered although the step hangs
    assert stats["num_running"] + stats["num_waiting"] == 2

    if how == "shutdown":
        child.client.send(ShutdownCore(drain=False))
    else:
        child.client.frames.close()

    if how != "close":
        outputs = child.client.outputs_of("a", "b")
        assert [output.finish_reason for output in outputs["a"] + outputs["b"]] == [
            "abort",
            "abort",
        ]
        assert child.client.recv() is None
    assert child.exit_code() == 0


@pytest.mark.process
def test_rank_that_raises_in_a_step_ends_the_core_with_its_traceback(child: CoreChild) -> None:
    child.client.send(request("a", [FAULT_RAISE, 1]))

    report = child.client.failure()

    assert (report.rank, report.kind, report.message) == (1, "ValueError", "ordered")
    assert report.traceback == "Traceback (fake)"
    assert child.failures.get(timeout=WAIT_S).message == "ordered"
    assert child.exit_code() == ExitStatus.DIED_SERVING


@pytest.mark.process
def test_rank_that_dies_while_its_step_is_awaited_ends_the_core(child: CoreChild) -> None:
    child.client.send(request("a", [FAULT_DIE, 1]))

    report = child.client.failure()

    assert (report.rank, report.message, report.exit_code) == (1, "killed by SIGKILL", -9)
    assert child.failures.get(timeout=WAIT_S).process == "Worker_TP1"
    assert child.exit_code() == ExitStatus.DIED_SERVING


@pytest.mark.process
def test_bug_in_the_loop_is_told_with_its_traceback_as_status_7(child: CoreChild) -> None:
    child.client.send(request("a", [FAULT_BUG, 1]))

    report = child.client.failure()

    assert "does not answer step" in report.message
    assert "update_from_output" in report.traceback
    assert child.failures.get(timeout=WAIT_S).exit_status == ExitStatus.BUG
    assert child.exit_code() == ExitStatus.BUG


@pytest.mark.process
def test_step_beyond_every_deadline_ends_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vcli.runtime.core.core_proc._STEP_GRACE_S", 0.1)
    with CoreThread(fake_engine_config(deadlines=DeadlineConfig(execute_model_s=0.1))) as core:
        core.client.send(request("a", [FAULT_HANG, 1]))

        report = core.client.failure()

    assert report.kind == "RpcTimeoutError"
    assert "0.2 s" in report.message
    assert core.status == ExitStatus.DIED_SERVING


@pytest.mark.process
def test_too_small_cache_is_a_usage_error_before_ready() -> None:
    child = CoreChild(fake_engine_config(num_kv_blocks=3))

    with pytest.raises(StartupError) as caught:
        child.group.wait_ready(WAIT_S)

    assert caught.value.exit_status == ExitStatus.USAGE
    assert "max_model_len=64" in caught.value.report.message
    assert "--max-model-len 12" in caught.value.hint
    assert child.exit_code() == ExitStatus.USAGE
    child.client.frames.close()


@pytest.mark.process
@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_signal_to_all_is_left_to_the_client_and_requests_are_finished(
    child: CoreChild, number: signal.Signals
) -> None:
    child.client.send(request("a", [1, 2, 3], max_tokens=50))
    os.kill(child.pid, number)

    outputs = child.client.outputs_of("a")

    assert tokens_of(outputs["a"]) == generate_alone([1, 2, 3], 50)
    wait_until(lambda: any(isinstance(message, ChildSignalled) for message in child.messages))
    child.client.send(ShutdownCore(drain=False))
    assert child.exit_code() == 0


@pytest.mark.process
def test_start_that_takes_long_goes_on_after_a_signal_and_ends_with_its_parent() -> None:
    child = CoreChild(fake_engine_config(served_name=HANGING_START))
    wait_until(lambda: any(each.process == "Worker_TP1" for each in child.messages), WAIT_S)

    os.kill(child.pid, signal.SIGTERM)
    wait_until(lambda: any(isinstance(each, ChildSignalled) for each in child.messages), WAIT_S)

    assert child.group.exit_codes == (None,)
    child.group.shutdown(WAIT_S, asked=False)
    assert child.group.exit_codes == (PARENT_GONE_EXIT_CODE,)
    child.client.frames.close()
