"""What is told of a worker class that can't be loaded: a wrong name, or a broken machine."""

import os
from pathlib import Path

import pytest

from tests.support.fake_worker import fake_config
from vcli.runtime.worker.dispatch import WorkerLoadError, make_worker
from vcli.topology.errors import ConfigError, ExitStatus


def make(worker_cls: str) -> object:
    return make_worker(worker_cls, fake_config(), 0, rendezvous_path=None, report=lambda *_: None)


@pytest.mark.parametrize(
    ("worker_cls", "missing"),
    [
        ("no_such_package.workers:Worker", "No module named 'no_such_package'"),
        ("tests.no_such_module:Worker", "No module named 'tests.no_such_module'"),
        ("tests.support.fake_worker:Absent", "tests.support.fake_worker has no 'Absent'"),
    ],
)
def test_name_of_no_class_is_bad_input(worker_cls: str, missing: str) -> None:
    with pytest.raises(ConfigError, match=missing) as caught:
        make(worker_cls)
    assert f"there is no worker class {worker_cls!r}" in caught.value.message


@pytest.mark.parametrize(
    ("source", "what", "hint"),
    [
        ("raise ImportError('libx.so: failed to map segment')", "failed to map", "ulimit -v"),
        ("raise OSError('libx.so: cannot open shared object file')", "cannot open", "reinstall"),
        ("raise OSError('libx.so: is it in FAKE_LOG_LEVEL?')", "is it in", "reinstall"),
        ("raise ImportError('libx.so: is it in FAKE_LOG_LEVEL?')", "is it in", "reinstall"),
        ("raise MemoryError('std::bad_alloc')", "MemoryError: std::bad_alloc", "ulimit -v"),
        ("import no_such_library", "No module named 'no_such_library'", "install no_such_library"),
        (
            "raise ValueError('\\n  bad FAKE_LOG_LEVEL: zz\\n  try MORE_OF_THIS\\n')",
            r"can't be loaded: ValueError: bad FAKE_LOG_LEVEL: zz try MORE_OF_THIS$",
            "unset FAKE_LOG_LEVEL",
        ),
        ("raise ValueError()", r"can't be loaded: ValueError\(\)", "import torch"),
    ],
)
def test_library_that_cannot_be_loaded_is_a_failed_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, what: str, hint: str
) -> None:
    (tmp_path / "broken_worker.py").write_text(source)
    monkeypatch.setitem(os.environ, "FAKE_LOG_LEVEL", "zz")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(WorkerLoadError, match=what) as caught:
        make("broken_worker:Worker")
    assert hint in caught.value.hint
    assert caught.value.exit_status is ExitStatus.START_FAILED
    # Where an import is missing has to be seen; of a library the message says it all.
    assert (caught.value.__cause__ is not None) is (
        source.startswith("import") or "ValueError" in source
    )
