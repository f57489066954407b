"""What the flags alone make impossible is refused before any process of the engine is started."""

import io
import os
import sys
from pathlib import Path

import pytest

from vcli.cli.environment import Environment
from vcli.cli.main import main
from vcli.cli.serve_session import ServeSession
from vcli.runtime.process.fork_owner import ForkServer
from vcli.runtime.process.group import ChildGroup

_MODULES = {
    "fine_code": "class Fine:\n    def hello(self): ...\nnumber = 3\n",
    "printing_code": "import os\nprint('printed')\nos.system('echo echoed')\nclass Fine: ...\n",
    "raising_code": "raise RuntimeError('boom at import')\n",
    "leaving_code": "import sys\nsys.exit(3)\n",
    "dying_code": "import os\nos._exit(9)\n",
    "broken_code": "def (\n",
    "hanging_code": "import threading\nthreading.Event().wait()\n",
    "slow_executor": "from vcli.runtime.executor.uniproc import UniProcExecutor\n"
    "class Slow(UniProcExecutor):\n    can_overlap_steps = False\n",
}
EXTENSION, BACKEND = "--worker-extension-cls", "--distributed-executor-backend"


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in _MODULES.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What of an engine was started: it must stay empty."""
    started: list[str] = []

    def note(session: ServeSession, *_: object, **__: object) -> int:
        started.append("session")
        return 0

    monkeypatch.setattr(ServeSession, "run", note)
    monkeypatch.setattr(ForkServer, "start", lambda *_, **__: started.append("fork server"))
    return started


def run(*arguments: str) -> tuple[int, str]:
    stderr = io.StringIO()
    environment = Environment(
        argv=arguments, environ={}, cwd=Path.cwd(), stdout=io.StringIO(), stderr=stderr
    )
    return main(environment), stderr.getvalue()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([BACKEND, "ray"], "ray: topo plans this; serve does not run it yet"),
        ([BACKEND, ""], "distributed_executor_backend='' is unknown"),
        ([BACKEND, "a:b"], "distributed_executor_backend='a:b' is unknown"),
        (["--async-scheduling", "-pp", "2"], "the 2 pipeline stages overlap steps of different"),
    ],
)
@pytest.mark.parametrize("command", [["serve"], ["bench", "offline"]], ids=["serve", "bench"])
def test_flags_that_exclude_each_other_start_nothing(
    started: list[str],
    monkeypatch: pytest.MonkeyPatch,
    command: list[str],
    arguments: list[str],
    said: str,
) -> None:
    monkeypatch.setattr(ChildGroup, "start", lambda *_, **__: started.append("child"))
    status, error = run(*command, *arguments)
    assert (status, started) == (2, [])
    assert said in error
    assert error.count("error: ") == 1
    assert "-> " in error


@pytest.mark.process
@pytest.mark.parametrize(
    ("flag", "name", "said"),
    [
        (EXTENSION, "no_such_code.Class", "No module named 'no_such_code'"),
        (EXTENSION, "fine_code.Missing", "fine_code has no class Missing"),
        (EXTENSION, "fine_code:number", "fine_code has no class number, it is a int"),
        (EXTENSION, "builtins.dict", "builtins.dict can't be added to the worker"),
        (EXTENSION, "raising_code.X", "RuntimeError: boom at import"),
        (EXTENSION, "leaving_code.X", "SystemExit: 3"),
        (EXTENSION, "dying_code.X", f"{EXTENSION} dying_code.X can't be imported: exited with"),
        (EXTENSION, "broken_code.X", "SyntaxError"),
        (EXTENSION, "", "names no class"),
        (BACKEND, "no_such_code.Class", "No module named 'no_such_code'"),
        (BACKEND, "fine_code.Missing", "fine_code has no Missing"),
        (BACKEND, "fine_code.Fine", "is no subclass of vcli.runtime.executor.base.Executor"),
        (BACKEND, "fine_code.number", "is no subclass of vcli.runtime.executor.base.Executor"),
        (BACKEND, "raising_code.X", "RuntimeError: boom at import"),
        (BACKEND, "leaving_code.X", "SystemExit: 3"),
        (BACKEND, "dying_code.X", f"{BACKEND} dying_code.X can't be imported: exited with"),
        (BACKEND, "broken_code.X", "SyntaxError"),
    ],
)
def test_a_class_that_cannot_be_used_is_refused_before_the_start(
    started: list[str], flag: str, name: str, said: str
) -> None:
    status, error = run("serve", flag, name)
    assert (status, started) == (2, [])
    assert said in error
    assert error.count("error: ") == 1
    assert "Traceback" not in error
    assert not set(_MODULES) & set(sys.modules)


@pytest.mark.process
def test_a_back_end_that_takes_one_step_at_a_time_cannot_be_asked_for_two(
    started: list[str],
) -> None:
    status, error = run("serve", BACKEND, "slow_executor.Slow", "--async-scheduling")
    assert (status, started) == (2, [])
    assert "slow_executor.Slow takes one step at a time" in error


@pytest.mark.process
def test_a_class_that_can_be_used_starts_the_engine(started: list[str]) -> None:
    status, error = run("serve", EXTENSION, "fine_code.Fine", BACKEND, "slow_executor.Slow")
    assert (status, started, error) == (0, ["session"], "")


@pytest.mark.process
def test_an_import_that_does_not_end_is_named_at_the_start_s_deadline(started: list[str]) -> None:
    status, error = run("serve", BACKEND, "hanging_code.Class", "--start-timeout", "3")
    assert (status, started) == (5, [])
    assert f"StartTimeout: {BACKEND} hanging_code.Class: 1 of 1 processes not ready" in error
    assert "import it with python -c to see what it waits for" in error


@pytest.mark.process
def test_a_class_is_judged_without_torch(
    started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "TORCH_LOGS", "zz")  # its import would fail
    assert run("serve", EXTENSION, "fine_code.Fine") == (0, "")
    assert started == ["session"]


@pytest.mark.process
def test_what_a_class_prints_at_its_import_is_no_result(
    started: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert run("serve", EXTENSION, "printing_code.Fine") == (0, "")
    assert tuple(capfd.readouterr()) == ("", "printed\nechoed\n")
