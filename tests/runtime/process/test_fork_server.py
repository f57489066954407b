"""The fork server starts children that are as good as fresh ones, for every client."""

import errno
import os
import resource
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.child_targets import spec
from tests.support.processes import wait_until
from vcli.runtime.errors import FailureReport, StartupError
from vcli.runtime.messages import ChildMessage, ChildState
from vcli.runtime.process.child import ChildSpec
from vcli.runtime.process.environ import RANK_DEFAULTS
from vcli.runtime.process.fork_client import StartCancelledError
from vcli.runtime.process.fork_owner import ForkServer
from vcli.runtime.process.group import ChildGroup
from vcli.topology.errors import UnfitError

pytestmark = pytest.mark.process

#: As a worker's, without the model: torch is what takes time and starts threads.
PRELOAD = ("tests.support.fork_children", "numpy")


def fork_spec(function: str, *arguments: object, **fields: object) -> ChildSpec:
    return ChildSpec(
        target=f"tests.support.fork_children:{function}",
        arguments=arguments,
        log_level="CRITICAL",
        **{"title": "Child", **fields},
    )


class Group(ChildGroup):
    def __init__(self) -> None:
        self.messages: list[ChildMessage] = []
        self.failures: list[FailureReport] = []
        self.has_failed = threading.Event()
        super().__init__(self.messages.append, self._note)

    def _note(self, report: FailureReport) -> None:
        self.failures.append(report)
        self.has_failed.set()


@pytest.fixture
def server() -> Iterator[ForkServer]:
    server = ForkServer.start(preload=PRELOAD)
    yield server
    server.close()
    assert not Path(f"/proc/{server.pid}").exists()


@pytest.fixture
def group() -> Iterator[Group]:
    group = Group()
    yield group
    group.shutdown(1.0, asked=False)


def run(server: ForkServer, group: ChildGroup, *specs: ChildSpec) -> list:
    group.start(specs, starter=server.starter)
    return group.wait_ready(30)


def test_child_has_the_set_up_of_a_spawned_one(
    server: ForkServer, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    names = ["OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "ADDED", "NCCL_NVLS_ENABLE"]
    (told,) = run(
        server,
        group,
        spec(
            "tell_about_itself",
            names,
            title="vcli::Worker_TP0",
            environ={"ADDED": "yes", "NCCL_NVLS_ENABLE": "1"},
            omp_num_threads=3,
            cpu_affinity=(0,),
        ),
    )
    assert told.pop("torch") is False
    assert told == {
        "environ": {
            "OMP_NUM_THREADS": "3",
            "OPENBLAS_NUM_THREADS": os.environ.get("OPENBLAS_NUM_THREADS"),
            "ADDED": "yes",
            "NCCL_NVLS_ENABLE": "0",
        },
        "affinity": [0],
        "stdin": "/dev/null",
        "has_one_output": True,
        "group": group.pids[0],
        "parent_pid": os.getpid(),
        "title": "vcli::Worker_TP0",
        "line_buffering": True,
        "descriptors": 10,
    }
    states = [message.state for message in group.messages if isinstance(message, ChildState)]
    assert states == ["spawned", "imported"]


def test_a_rank_multiplies_by_cublaslt_forked_or_spawned_unless_the_user_says_otherwise(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCH_BLAS_PREFER_CUBLASLT", raising=False)
    rank = fork_spec("tell_library", environ=RANK_DEFAULTS)
    server = ForkServer.start(preload=("torch",))
    try:
        assert run(server, group, rank) == ["Cublaslt"]
    finally:
        group.shutdown(1.0, asked=False)
        server.close()
    for value, library in ((None, "Cublaslt"), ("0", "Cublas")):
        if value is not None:
            monkeypatch.setenv("TORCH_BLAS_PREFER_CUBLASLT", value)
        spawned = Group()
        spawned.start([rank])
        try:
            assert spawned.wait_ready(60) == [library]
        finally:
            spawned.shutdown(1.0, asked=False)


def test_child_stands_where_its_parent_stands_now(
    server: ForkServer, group: Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # All of this changes after the server was started.
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "modules")
    monkeypatch.setenv("ONLY_HERE", "yes")
    (place,) = run(server, group, fork_spec("tell_place"))
    assert place == [str(tmp_path), str(tmp_path / "modules"), "yes", server.pid]


def test_child_has_exactly_the_descriptors_that_were_passed_under_their_numbers(
    server: ForkServer, group: Group, tmp_path: Path
) -> None:
    files = []
    for name in ("a", "b", "c"):
        (tmp_path / name).write_text(name)
        files.append(os.open(tmp_path / name, os.O_RDONLY))
    # Numbers in another order than the server's own, one of them far away.
    far = os.dup2(files[2], 200)
    passed = (files[1], far, files[0])
    try:
        first, second = run(
            server,
            group,
            fork_spec("tell_descriptors", [str(number) for number in passed], pass_fds=passed),
            fork_spec("tell_descriptors", []),
        )
    finally:
        for number in (*files, far):
            os.close(number)
    assert first[1] == {str(passed[0]): "b", "200": "c", str(passed[2]): "a"}
    own = {number: target for number, target in first[0] if number > 2}
    assert {number: own.pop(number) for number in passed} == {
        number: str(tmp_path / name) for number, name in zip(passed, "bca", strict=True)
    }
    # Control socket, lifeline, both ends of the pipe for signals, and the page of live facts with
    # its mapping; nothing of the server, of its clients or of other children.
    kinds = ["/memfd", "/memfd", "pipe", "pipe", "pipe", "socket"]
    assert sorted(target.split(":")[0] for target in own.values()) == kinds
    others = [target for number, target in second[0] if number > 2]
    assert sorted(target.split(":")[0] for target in others) == kinds


def test_server_has_one_thread_and_no_device(server: ForkServer, group: Group) -> None:
    run(server, group, spec("wait"))
    assert len(list(Path(f"/proc/{server.pid}/task").iterdir())) == 1
    assert "libcuda.so" not in Path(f"/proc/{server.pid}/maps").read_text()
    assert Path(f"/proc/{server.pid}/cmdline").read_bytes().strip(b"\0") == b"vcli::ForkServer"


def test_copies_draw_different_random_numbers(server: ForkServer, group: Group) -> None:
    draws = run(server, group, *[fork_spec("draw") for _ in range(4)])
    assert len({numbers[0] for numbers in draws}) == 4
    assert len({numbers[1] for numbers in draws}) == 4


def test_start_failure_keeps_its_body(server: ForkServer, group: Group) -> None:
    group.start(
        [spec("fail_in", "weights", 0.0, "ValueError", "no tensor")], starter=server.starter
    )
    with pytest.raises(StartupError) as failed:
        group.wait_ready(30)
    report = failed.value.report
    assert (report.kind, report.message, report.phase) == ("ValueError", "no tensor", "weights")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_signal_that_ended_a_child_is_known_though_its_client_is_no_parent(
    server: ForkServer, group: Group, number: signal.Signals
) -> None:
    run(server, group, spec("wait", title="Worker_TP1", rank=1))
    pid = group.pids[0]
    os.kill(pid, number)
    assert group.has_failed.wait(5)
    assert group.failures[0].exit_code == -number
    assert group.failures[0].pid == pid
    assert server.exit_code(pid) == -number


def test_grandchildren_come_from_the_same_server(server: ForkServer, group: Group) -> None:
    with server.new_link() as link:
        core = fork_spec(
            "start_own_children", 2, pass_fds=(link.fileno(),), fork_server_fd=link.fileno()
        )
        (payload,) = run(server, group, core)
    pids, payloads = payload
    assert payloads == [0, 1]
    for pid in pids:
        assert f"PPid:\t{server.pid}\n" in Path(f"/proc/{pid}/status").read_text()
    # The exit status is sent to every client, whoever's child it was.
    os.kill(pids[0], signal.SIGKILL)
    wait_until(lambda: server.exit_code(pids[0]) == -signal.SIGKILL)
    assert server.exit_code(pids[1]) is None


def test_too_many_descriptors_for_one_packet_are_spawned(
    server: ForkServer, group: Group, caplog: pytest.LogCaptureFixture
) -> None:
    numbers = [os.open("/dev/null", os.O_RDONLY) for _ in range(260)]
    try:
        assert run(server, group, spec("wait", 1, pass_fds=tuple(numbers))) == [1]
    finally:
        for number in numbers:
            os.close(number)
    parent = f"PPid:\t{os.getpid()}\n"
    assert parent in Path(f"/proc/{group.pids[0]}/status").read_text()


def test_module_that_can_not_be_imported_means_spawn_with_the_reason(
    group: Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    (tmp_path / "broken_torch.py").write_text("raise ImportError('libfoo.so.3 is missing')\n")
    monkeypatch.syspath_prepend(tmp_path)
    server = ForkServer.start(preload=("broken_torch",))
    try:
        assert run(server, group, spec("wait", 1), spec("wait", 2)) == [1, 2]
        assert server.preloaded is not None
        assert "broken_torch can't be imported" in server.preloaded.problem
        assert "libfoo.so.3" in server.preloaded.problem
        assert f"PPid:\t{os.getpid()}\n" in Path(f"/proc/{group.pids[0]}/status").read_text()
    finally:
        server.close()


def test_variable_that_a_module_does_not_take_is_named_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "raise ValueError('\\nbad FAKE_LOG_LEVEL: zz\\nall of:\\n' + 'name, ' * 500)\n"
    (tmp_path / "broken_torch.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(os.environ, "FAKE_LOG_LEVEL", "zz")
    server = ForkServer.start(preload=("broken_torch",))
    try:
        wait_until(lambda: server.preloaded is not None)
        assert server.preloaded is not None
        problem = server.preloaded.problem
        assert "broken_torch can't be imported: ValueError: bad FAKE_LOG_LEVEL: zz all" in problem
        assert problem.endswith(" ... (unset FAKE_LOG_LEVEL)")
        assert len(problem) < 400
    finally:
        server.close()


def test_thread_that_a_module_starts_means_spawn_and_is_named(
    group: Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "busy_module.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    server = ForkServer.start(preload=("busy_module",))
    try:
        assert run(server, group, spec("wait", 1)) == [1]
        assert server.preloaded is not None
        assert "2 threads are alive" in server.preloaded.problem
    finally:
        server.close()


def test_two_instances_do_not_know_of_each_other(group: Group) -> None:
    first, second = ForkServer.start(preload=()), ForkServer.start(preload=())
    others, third = Group(), Group()
    try:
        run(first, group, spec("wait", 1))
        run(second, others, spec("wait", 2))
        first.close()
        run(second, third, spec("wait", 3))
        os.kill(others.pids[0], signal.SIGKILL)
        assert others.has_failed.wait(5)
        assert others.failures[0].exit_code == -signal.SIGKILL
    finally:
        others.shutdown(1.0, asked=False)
        third.shutdown(1.0, asked=False)
        second.close()


def test_starts_that_wait_for_the_import_can_be_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    importing = tmp_path / "importing"
    os.mkfifo(importing)
    (tmp_path / "slow_preload.py").write_text(
        f"import time\nopen({str(importing)!r}, 'w').close()\ntime.sleep(60)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    server = ForkServer.start(preload=("slow_preload",))
    errors = []

    def start() -> None:
        with pytest.raises(StartCancelledError) as caught:
            server.starter.start(spec("wait"))
        errors.append(caught.value)

    importing.read_text()
    thread = threading.Thread(target=start)
    thread.start()
    server.close()
    thread.join(5)
    assert len(errors) == 1
    assert not Path(f"/proc/{server.pid}").exists()


@pytest.mark.parametrize("limit", [32, 64])
def test_too_many_open_files_are_told_with_what_raises_the_limit(group: Group, limit: int) -> None:
    server = ForkServer.start(preload=())
    wait_until(lambda: server.preloaded is not None)
    resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (limit, limit))
    numbers = [os.open("/dev/null", os.O_RDONLY) for _ in range(limit)]
    try:
        with pytest.raises(UnfitError, match="open files") as caught:
            group.start([spec("wait", pass_fds=tuple(numbers))], starter=server.starter)
        assert "ulimit -n" in caught.value.hint
    finally:
        for number in numbers:
            os.close(number)
    # It was one start that did not fit: the server is well.
    others = Group()
    assert run(server, others, spec("wait", 5)) == [5]
    others.shutdown(1.0, asked=False)
    server.close()


def test_limit_of_processes_is_named(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    server = ForkServer.start(preload=("tests.support.forks_fail",))
    try:
        with pytest.raises(UnfitError, match=os.strerror(errno.EAGAIN)) as caught:
            group.start([spec("wait")], starter=server.starter)
        assert "ulimit -u" in caught.value.hint
    finally:
        server.close()
