"""Sleep, reload and profile by `collective_rpc` on two ranks in processes that sum over gloo."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.tiny_model import tiny_checkpoint, write_checkpoint
from tests.support.worker_steps import engine_config, generate, kv_bytes, kv_config
from vcli.runtime.errors import WorkerError
from vcli.runtime.executor.multiproc import MultiprocExecutor
from vcli.runtime.executor.uniproc import UniProcExecutor
from vcli.topology.config import ParallelConfig

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def executor() -> Iterator[MultiprocExecutor]:
    parallel = ParallelConfig(tensor_parallel_size=2)
    executor = MultiprocExecutor(
        engine_config(tiny_checkpoint(), parallel=parallel, log_level="CRITICAL"),
        on_message=lambda _: None,
    )
    try:
        executor.start()
        executor.initialize_from_config(kv_config())
        yield executor
    finally:
        executor.shutdown()


def tokens_of_one_rank(folder: Path) -> list[int]:
    """What one rank alone generates from the checkpoint in `folder`."""
    alone = UniProcExecutor(engine_config(folder), on_message=lambda _: None)
    alone.start()
    alone.initialize_from_config(kv_config())
    try:
        return generate(alone)
    finally:
        alone.shutdown()


def test_both_ranks_sleep_and_wake_up_and_the_tokens_stay(executor: MultiprocExecutor) -> None:
    expected = generate(executor)
    before = executor.collective_rpc(kv_bytes)
    assert min(before) > 0
    assert executor.collective_rpc("sleep", kwargs={"level": 1}) == [None, None]
    assert executor.collective_rpc(kv_bytes) == [0, 0]
    assert executor.collective_rpc("wake_up") == [None, None]
    assert executor.collective_rpc(kv_bytes) == before
    assert generate(executor) == expected


def test_both_ranks_read_their_part_of_other_weights_and_of_the_old_ones_again(
    executor: MultiprocExecutor, tmp_path: Path
) -> None:
    expected = tokens_of_one_rank(tiny_checkpoint())
    assert generate(executor) == expected
    write_checkpoint(tmp_path, seed=5)
    others = tokens_of_one_rank(tmp_path)
    assert others != expected
    assert executor.collective_rpc("reload_weights", args=(str(tmp_path),)) == [None, None]
    assert generate(executor) == others
    assert executor.collective_rpc("reload_weights") == [None, None]
    assert generate(executor) == expected


def test_weights_that_are_not_there_are_told_with_the_rank_and_change_nothing(
    executor: MultiprocExecutor, tmp_path: Path
) -> None:
    expected = generate(executor)
    with pytest.raises(WorkerError, match="safetensors") as failed:
        executor.collective_rpc("reload_weights", args=(str(tmp_path / "gone"),))
    assert failed.value.report.rank in (0, 1)
    assert generate(executor) == expected


def test_each_rank_writes_a_trace_of_its_own(executor: MultiprocExecutor, tmp_path: Path) -> None:
    assert executor.collective_rpc("start_profile", args=(str(tmp_path),)) == [None, None]
    expected = generate(executor)
    paths = [Path(path) for path in executor.collective_rpc("stop_profile")]
    assert len(set(paths)) == 2
    for rank, path in enumerate(paths):
        assert path.parent == tmp_path
        assert f"Worker_TP{rank}" in path.name
        events = json.loads(path.read_text())["traceEvents"]
        assert any("embedding" in str(event.get("name")) for event in events)
    assert generate(executor) == expected
