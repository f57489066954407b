"""Children are started together, and the first cause of a failure is named."""

import os
import pickle
import queue
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.support.child_targets import spec
from tests.support.processes import wait_until
from vcli.runtime.errors import FailureReport, StartupError
from vcli.runtime.messages import ChildMessage, ChildReady, ChildState
from vcli.runtime.process.child import ChildSpec
from vcli.runtime.process.group import ChildGroup
from vcli.topology.errors import ExitStatus

pytestmark = pytest.mark.process

STATE = msgspec.msgpack.encode(ChildState(process="Child", state="weights", seconds=1.0, pid=1))
STATE_FRAME = len(STATE).to_bytes(4, "little") + STATE


class Group(ChildGroup):
    """A group whose messages and failures are kept for the test."""

    def __init__(self) -> None:
        self.messages: list[ChildMessage] = []
        self.failures: queue.Queue[FailureReport] = queue.Queue()
        super().__init__(self.messages.append, self.failures.put)


@pytest.fixture
def group() -> Iterator[Group]:
    group = Group()
    yield group
    group.shutdown(1.0, asked=False)


def start_failure(group: Group, *specs: ChildSpec) -> FailureReport:
    group.start(specs)
    with pytest.raises(StartupError) as failed:
        group.wait_ready(20)
    return failed.value.report


def test_payloads_come_in_the_order_of_the_specs(group: Group) -> None:
    group.start([spec("wait", number) for number in range(3)])
    assert group.wait_ready(20) == [0, 1, 2]


def test_states_come_in_order_with_pid_and_rank(group: Group) -> None:
    group.start([spec("wait", rank=4, title="Worker_TP4")])
    group.wait_ready(20)
    states = [message.state for message in group.messages if isinstance(message, ChildState)]
    assert states == ["spawned", "imported"]
    first = group.messages[0]
    assert isinstance(first, ChildState)
    assert (first.process, first.rank, first.pid) == ("Worker_TP4", 4, group.pids[0])
    assert isinstance(group.messages[-1], ChildReady)


def test_child_has_its_own_set_up(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    monkeypatch.setenv("NVSHMEM_DISABLE_NVLS", "1")
    names = [
        "OMP_NUM_THREADS",
        "PYTHONPATH",
        "ADDED",
        "NCCL_NVLS_ENABLE",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST",
        "NVSHMEM_DISABLE_NVLS",
    ]
    group.start(
        [
            spec(
                "tell_about_itself",
                names,
                title="vcli::Worker_TP0",
                environ={"ADDED": "yes", "NCCL_NVLS_ENABLE": "1"},
                omp_num_threads=3,
                cpu_affinity=(0,),
            )
        ]
    )
    (told,) = group.wait_ready(20)
    descriptors = told.pop("descriptors")
    assert told == {
        "environ": {
            "OMP_NUM_THREADS": "3",
            "PYTHONPATH": None,
            "ADDED": "yes",
            "NCCL_NVLS_ENABLE": "0",
            "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
            "NVSHMEM_DISABLE_NVLS": "1",
        },
        "affinity": [0],
        "stdin": "/dev/null",
        "has_one_output": True,
        "group": group.pids[0],
        "parent_pid": os.getpid(),
        "torch": False,
        "title": "vcli::Worker_TP0",
        "line_buffering": True,
    }
    # Three standard streams, control, lifeline, the pipe of signals, the page that
    # `doctor --instance` reads and its mapping, and the folder that was just listed.
    assert descriptors == 10
    assert "ADDED" not in os.environ


def test_children_of_a_ray_actor_find_its_cluster(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Context:
        gcs_address = "10.0.0.1:6379"

        def get_actor_id(self) -> str:
            return "abc"

    ray = type(sys)("ray")
    vars(ray).update(is_initialized=lambda: True, get_runtime_context=Context)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    grandchild = spec("tell_about_itself", ["RAY_ADDRESS"])
    group.start([spec("tell_about_itself", ["RAY_ADDRESS"]), spec("be_parent", [grandchild])])
    told, _ = group.wait_ready(20)
    assert told["environ"] == {"RAY_ADDRESS": "10.0.0.1:6379"}

    def found() -> list[dict[str, str]]:
        ready = [message for message in group.messages if isinstance(message, ChildReady)]
        return [each.payload["environ"] for each in ready if isinstance(each.payload, dict)]

    # An engine core, and its worker; the group may know that a child is ready before this does.
    wait_until(lambda: len(found()) == 2, 10)
    assert found() == [{"RAY_ADDRESS": "10.0.0.1:6379"}] * 2


def test_child_imports_what_only_its_parent_can_find(
    group: Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_here.py").write_text(
        "from tests.support.child_targets import wait\n"
        "def go(context):\n"
        "    wait(context, 'found')\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    group.start([ChildSpec(target="only_here:go", arguments=(), title="Child")])
    assert group.wait_ready(20) == ["found"]


def test_all_children_are_started_before_any_is_waited_for(group: Group, tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    code = f"import pathlib\npathlib.Path({str(flag)!r}).touch()\n"
    (tmp_path / "touches.py").write_text(
        code + "from tests.support.child_targets import wait as go\n"
    )
    sys.path.append(str(tmp_path))
    try:
        needs_the_other = spec("fail_when_file_exists", str(flag), "ValueError", 0.0, title="A")
        group.start([needs_the_other, ChildSpec(target="touches:go", arguments=(), title="B")])
    finally:
        sys.path.remove(str(tmp_path))
    # A fails only because B, the later one, ran as well.
    assert group_failure(group).process == "A"


def group_failure(group: Group) -> FailureReport:
    try:
        group.wait_ready(20)
    except StartupError as error:
        return error.report
    return group.failures.get(timeout=10)


def test_exception_in_the_start_is_reported_with_its_body(group: Group) -> None:
    report = start_failure(
        group,
        spec("wait"),
        spec("fail_in", "weights", 0.0, "ValueError", "no such tensor", title="Worker_TP1", rank=1),
    )
    assert (report.process, report.rank, report.phase) == ("Worker_TP1", 1, "weights")
    assert (report.kind, report.message) == ("ValueError", "no such tensor")
    assert "in fail_in" in report.traceback
    assert report.pid == group.pids[1]
    assert report.exit_status == ExitStatus.START_FAILED


def test_error_of_the_user_keeps_its_exit_status(group: Group) -> None:
    report = start_failure(group, spec("fail_in", "device", 0.0, "ConfigError", "no such flag"))
    assert report.exit_status == ExitStatus.USAGE


def test_failure_of_a_grandchild_is_passed_on_as_it_was(group: Group) -> None:
    report = start_failure(group, spec("fail_for_another", title="EngineCore"))
    assert (report.process, report.rank) == ("Worker_TP3", 3)


@pytest.mark.parametrize(("follower_s", "cause_s"), [(0.0, 0.05), (0.05, 0.0)])
def test_cause_is_named_and_not_the_follower(
    group: Group, tmp_path: Path, follower_s: float, cause_s: float
) -> None:
    folder, both = str(tmp_path), 2
    report = start_failure(
        group,
        spec(
            *("fail_together", folder, both, follower_s, "ConnectionResetError", "by peer"),
            title="Follower",
        ),
        spec("fail_together", folder, both, cause_s, "ValueError", "bad shape", title="Cause"),
    )
    assert report.process == "Cause"


def test_kill_in_the_start_is_named_with_signal_phase_and_hint(group: Group) -> None:
    report = start_failure(
        group, spec("hang_in", "groups"), spec("kill_itself", False, title="Worker_TP1", rank=1)
    )
    assert (report.process, report.rank, report.phase) == ("Worker_TP1", 1, "weights")
    assert (report.message, report.exit_code) == ("killed by SIGKILL", -signal.SIGKILL)
    assert "out-of-memory" in report.hint
    assert report.exit_status == ExitStatus.START_FAILED


def test_target_that_does_not_exist_is_reported(group: Group) -> None:
    report = start_failure(
        group, ChildSpec(target="no.such:thing", arguments=(), title="Child", log_level="CRITICAL")
    )
    assert (report.kind, report.phase) == ("ModuleNotFoundError", "spawned")


def test_end_in_order_before_ready_is_a_failure(group: Group) -> None:
    report = start_failure(group, spec("return_unready"))
    assert report.message == "exited with status 0"


def test_deadline_names_who_is_missing_in_which_state(group: Group) -> None:
    group.start([spec("wait", title="Worker_TP0"), spec("hang_in", "weights", title="Worker_TP1")])
    with pytest.raises(StartupError, match="1 of 2 processes not ready") as failed:
        group.wait_ready(1.5)
    assert f"Worker_TP1 (pid {group.pids[1]}) in state weights 40%" in failed.value.report.message
    assert "Worker_TP0" not in failed.value.report.message


def test_kill_while_serving_is_known_at_once_and_told_once(group: Group) -> None:
    group.start([spec("wait", title="Worker_TP0"), spec("wait", title="Worker_TP1", rank=1)])
    group.wait_ready(20)
    os.kill(group.pids[1], signal.SIGKILL)
    report = group.failures.get(timeout=5)
    assert (report.process, report.rank, report.pid) == ("Worker_TP1", 1, group.pids[1])
    assert (report.message, report.phase) == ("killed by SIGKILL", "serving")
    assert report.exit_status == ExitStatus.DIED_SERVING
    os.kill(group.pids[0], signal.SIGKILL)
    group.shutdown(2.0)
    assert group.failures.empty()


def test_exception_while_serving_outweighs_the_follower_that_came_first(
    group: Group, tmp_path: Path
) -> None:
    flag = str(tmp_path / "flag")
    group.start(
        [
            spec("fail_when_file_exists", flag, "BrokenPipeError", 0.0, title="Follower"),
            spec("fail_when_file_exists", flag, "ValueError", 0.05, title="Cause"),
        ]
    )
    group.wait_ready(20)
    Path(flag).touch()
    report = group.failures.get(timeout=5)
    assert (report.process, report.exit_status) == ("Cause", ExitStatus.DIED_SERVING)


@pytest.mark.parametrize(
    ("data", "count", "words"),
    [(b"print() into the wrong file\n", 1, "garbage"), (STATE_FRAME, 5000, "floods")],
)
def test_child_that_breaks_the_protocol_is_a_failure(
    group: Group, data: bytes, count: int, words: str
) -> None:
    group.start([spec("write_raw", data, count), spec("wait")])
    report = group_failure(group)
    assert (report.process, report.kind) == ("Child", "ControlProtocolError")
    assert words in report.message


def test_start_is_refused_the_second_time(group: Group) -> None:
    group.start([spec("wait")])
    with pytest.raises(RuntimeError, match="once"):
        group.start([spec("wait")])


def test_arguments_that_can_not_be_pickled_end_what_was_started(group: Group) -> None:
    with pytest.raises((TypeError, AttributeError, pickle.PicklingError)):
        group.start([spec("wait"), spec("wait", lambda: None)])
    assert group.exit_codes != (None,)


def test_broken_message_callback_does_not_end_the_watch() -> None:
    failures: queue.Queue[FailureReport] = queue.Queue()
    group = ChildGroup(lambda message: {}[message], failures.put)
    group.start([spec("wait")])
    group.wait_ready(20)
    os.kill(group.pids[0], signal.SIGKILL)
    assert failures.get(timeout=5).exit_code == -signal.SIGKILL
    group.shutdown(1.0)


def test_states_after_ready_do_not_change_the_phase_of_a_failure(group: Group) -> None:
    group.start([spec("fail_after_late_state")])
    assert group_failure(group).phase == "serving"
