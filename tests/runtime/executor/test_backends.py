"""A back end that is given as a class, by itself or by its dotted path."""

import sys
from pathlib import Path

import pytest

from tests.support.fake_worker import FAKE_WORKER, SPEC, fake_config
from vcli.runtime.executor.backends import get_executor_class
from vcli.runtime.executor.base import Executor
from vcli.runtime.executor.uniproc import UniProcExecutor
from vcli.topology.backend import BACKEND_CLASSES, EXECUTOR, choose_backend
from vcli.topology.config import ParallelConfig
from vcli.topology.errors import ConfigError
from vcli.topology.plan_json import plan_to_json
from vcli.topology.planner import plan_topology
from vcli.topology.sizes import ParallelSizes


class OwnExecutor(UniProcExecutor):
    """Somebody else's."""


class Unfinished(Executor):
    """Has no method of its own."""


PATH = f"{__name__}.OwnExecutor"


def test_the_name_that_the_plan_knows_is_that_of_the_interface() -> None:
    assert f"{Executor.__module__}.{Executor.__qualname__}" == EXECUTOR


@pytest.mark.parametrize("given", [OwnExecutor, PATH], ids=["class", "path"])
def test_a_class_and_its_path_are_the_same_back_end(given: str | type) -> None:
    parallel = ParallelConfig(distributed_executor_backend=given)
    plan = plan_topology(parallel, model=SPEC, dtype="float32")
    assert plan.backend.value == PATH
    assert plan.config.distributed_executor_backend == PATH
    assert PATH in str(plan_to_json(plan))
    assert choose_backend(ParallelSizes(distributed_executor_backend=given)).value == PATH
    assert get_executor_class(PATH) is OwnExecutor


@pytest.mark.parametrize("given", [UniProcExecutor, BACKEND_CLASSES["uni"]], ids=["class", "path"])
def test_one_of_ours_has_its_name_however_it_is_given(given: str | type) -> None:
    assert choose_backend(ParallelSizes(distributed_executor_backend=given)).value == "uni"
    with pytest.raises(ConfigError, match="uni"):
        choose_backend(ParallelSizes(distributed_executor_backend=given, tensor_parallel_size=2))


def test_an_engine_planned_with_a_class_is_run_by_it() -> None:
    parallel = ParallelConfig(distributed_executor_backend=OwnExecutor)
    plan = plan_topology(parallel, model=SPEC, dtype="float32")
    config = fake_config(parallel=parallel, plan=plan)
    executor = get_executor_class(config.plan.backend.value)(
        config, on_message=lambda _: None, worker_cls=FAKE_WORKER
    )
    assert type(executor) is OwnExecutor
    try:
        executor.start()
        assert executor.collective_rpc("echo", args=("x",)) == ["x"]
    finally:
        executor.shutdown()


@pytest.mark.parametrize(
    "given", [Path, 3, "mp".upper, object()], ids=["class", "3", "method", "o"]
)
def test_what_is_no_executor_is_refused_with_value_and_what_is_wanted(given: object) -> None:
    for refuse in (
        lambda: ParallelConfig(distributed_executor_backend=given),  # type: ignore[arg-type]
        lambda: choose_backend(ParallelSizes(distributed_executor_backend=given)),  # type: ignore[arg-type]
    ):
        with pytest.raises(ConfigError) as caught:
            refuse()
        assert repr(given) in caught.value.message
        assert f"no subclass of {EXECUTOR}" in caught.value.message
        assert "mp" in caught.value.hint


def test_a_class_that_other_processes_can_not_import_is_refused() -> None:
    class Local(UniProcExecutor):
        pass

    for given in (Local, type("Typed", (UniProcExecutor,), {"__module__": "__main__"})):
        with pytest.raises(ConfigError, match="can't be imported by other processes") as caught:
            ParallelConfig(distributed_executor_backend=given)
        assert "module of its own" in caught.value.hint


@pytest.mark.parametrize("given", [Unfinished, Executor])
def test_a_class_with_methods_missing_is_refused_with_their_names(given: type) -> None:
    backend = choose_backend(ParallelSizes(distributed_executor_backend=given)).value
    with pytest.raises(ConfigError, match="does not implement _submit, shutdown, start"):
        get_executor_class(backend)


@pytest.mark.parametrize(
    ("text", "said"), [("raise ValueError('out of order')", "out of order"), ("def", "syntax")]
)
def test_a_module_that_can_not_be_imported_is_refused_with_its_error(
    text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_executor.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "broken_executor", raising=False)
    with pytest.raises(ConfigError, match=f"broken_executor.Own' can't be imported: .*{said}"):
        get_executor_class("broken_executor.Own")
