"""Sleep, reload and profile: by `collective_rpc` alone, on a whole worker with a tiny model."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.tiny_model import tiny_checkpoint, write_checkpoint
from tests.support.worker_steps import engine_config, generate, kv_bytes, kv_config
from vcli.runtime.errors import WorkerError
from vcli.runtime.executor.uniproc import UniProcExecutor


@pytest.fixture(params=["float32", "bfloat16"])
def executor(request: pytest.FixtureRequest) -> Iterator[UniProcExecutor]:
    config = engine_config(tiny_checkpoint(), dtype=request.param)
    executor = UniProcExecutor(config, on_message=lambda _: None)
    executor.start()
    executor.initialize_from_config(kv_config())
    yield executor
    executor.shutdown()


def test_sleep_frees_the_kv_cache_and_wake_up_gives_it_back(executor: UniProcExecutor) -> None:
    expected = generate(executor)
    (before,) = executor.collective_rpc(kv_bytes)

    executor.collective_rpc("sleep", kwargs={"level": 1})
    assert executor.collective_rpc(kv_bytes) == [0]
    executor.collective_rpc("wake_up")

    assert executor.collective_rpc(kv_bytes) == [before]
    assert generate(executor) == expected


def test_waking_up_twice_changes_nothing(executor: UniProcExecutor) -> None:
    executor.collective_rpc("sleep")
    executor.collective_rpc("wake_up")
    expected = generate(executor)
    executor.collective_rpc("wake_up")
    assert generate(executor) == expected


def test_step_in_sleep_is_refused_with_the_reason(executor: UniProcExecutor) -> None:
    executor.collective_rpc("sleep")
    with pytest.raises(WorkerError, match="in sleep"):
        generate(executor)


def test_unknown_level_of_sleep_is_refused(executor: UniProcExecutor) -> None:
    with pytest.raises(WorkerError, match="level 7"):
        executor.collective_rpc("sleep", args=(7,))


def test_weights_of_another_folder_change_the_tokens_and_come_back(
    executor: UniProcExecutor, tmp_path: Path
) -> None:
    expected = generate(executor)
    write_checkpoint(tmp_path, seed=5)

    executor.collective_rpc("reload_weights", args=(str(tmp_path),))
    other = generate(executor)
    executor.collective_rpc("reload_weights")

    assert other != expected
    assert generate(executor) == expected


def test_folder_without_weights_leaves_the_old_ones(
    executor: UniProcExecutor, tmp_path: Path
) -> None:
    expected = generate(executor)
    with pytest.raises(WorkerError, match="safetensors"):
        executor.collective_rpc("reload_weights", args=(str(tmp_path),))
    assert generate(executor) == expected


def test_profile_writes_a_trace_of_each_rank(executor: UniProcExecutor, tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    executor.collective_rpc("start_profile", args=(str(folder),))
    with pytest.raises(WorkerError, match="recorded already"):
        executor.collective_rpc("start_profile", args=(str(folder),))
    generate(executor)
    (path,) = executor.collective_rpc("stop_profile")
    names = {event.get("name") for event in json.loads(Path(path).read_text())["traceEvents"]}
    assert any("embedding" in str(name) for name in names)
    with pytest.raises(WorkerError, match="nothing is recorded"):
        executor.collective_rpc("stop_profile")
