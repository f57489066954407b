"""Ranks that torchrun starts: each runs the engine, and all of them get the same tokens."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.runtime.executor.launched_engine import PROMPTS
from tests.support.fake_worker import FakeWorker, SlowResult, fake_config, fake_step
from tests.support.tiny_model import tiny_checkpoint
from tests.support.worker_steps import engine_config
from vcli.runtime.config import CacheConfig, LaunchedRank
from vcli.runtime.core.engine_core import EngineCore
from vcli.runtime.executor.backends import get_executor_class
from vcli.runtime.executor.external_launcher import ExternalLauncherExecutor
from vcli.runtime.executor.launched_rank import launched_rank
from vcli.runtime.executor.uniproc import UniProcExecutor
from vcli.runtime.messages import EngineRequest
from vcli.topology.config import ParallelConfig
from vcli.topology.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "tests" / "runtime" / "executor" / "launched_engine.py"
TORCHRUN = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


def tokens_of_one_rank() -> dict[str, list[int]]:
    cache = CacheConfig(block_size=4, kv_cache_memory_bytes=4 << 20)
    config = engine_config(tiny_checkpoint(), cache=cache)
    executor = UniProcExecutor(config, on_message=lambda _: None)
    executor.start()
    engine = EngineCore(config, executor)
    for request_id, (prompt, sampling) in PROMPTS.items():
        engine.add_request(
            EngineRequest(request_id=request_id, prompt_token_ids=prompt, sampling=sampling)
        )
    tokens: dict[str, list[int]] = {request_id: [] for request_id in PROMPTS}
    while engine.has_unfinished:
        for output in engine.step():
            tokens[output.request_id] += output.new_token_ids
    executor.shutdown()
    return tokens


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_ranks_of_torchrun_generate_what_one_rank_does(
    tp: int, pp: int, real_environ: dict[str, str]
) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    search_path = ":".join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [*command, "--nproc-per-node", "2", SCRIPT, tiny_checkpoint(), str(tp), str(pp)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env={**real_environ, "PYTHONPATH": f"{ROOT}:{search_path}", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if "RESULT " in line]
    results = [json.loads(line.partition("RESULT ")[2]) for line in lines]
    assert sorted(result.pop("rank") for result in results) == [0, 1]
    assert results[0] == results[1]
    result = results[0]
    assert result["tokens"] == tokens_of_one_rank()
    assert (result["ranks"], result["large"], result["sum"]) == ([0, 1], 9000, 1)
    assert result["handed_on"] == [["done", None], [{"saved": 1}, 1]]
    assert result["groups"] == ["TP" if tp == 2 else "PP"]
    assert "rank 1" in result["error"]
    assert "only here" in result["error"]


class ComputesLater(FakeWorker):
    def execute_model(self, output):
        return SlowResult(super().execute_model(output), 0.0, [])

    def hand_out(self, data: bytes, src_rank: int) -> bytes:
        return data


def test_step_that_a_device_still_computes_is_waited_for_before_it_is_handed_out() -> None:
    launched = LaunchedRank(
        rank=0, local_rank=0, world_size=1, master_addr="127.0.0.1", master_port=29500
    )
    executor = ExternalLauncherExecutor(
        fake_config(launched=launched),
        on_message=lambda _: None,
        worker_cls=f"{__name__}:ComputesLater",
    )
    executor.start()
    result = executor.execute_model(fake_step(7, number=3))
    executor.shutdown()
    assert result is not None
    assert (result.step, result.token_ids) == (7, [4])


def test_variables_of_torchrun_and_of_mpi_name_the_rank() -> None:
    expected = LaunchedRank(
        rank=1, local_rank=1, world_size=2, master_addr="127.0.0.1", master_port=29500
    )
    place = {name: TORCHRUN[name] for name in ("MASTER_ADDR", "MASTER_PORT")}
    mpi = {
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "2",
    }
    assert launched_rank(TORCHRUN) == expected
    assert launched_rank({**mpi, **place}) == expected
    hosted = launched_rank(
        {**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "3"}
    )
    assert (hosted.is_store_hosted, hosted.store_prefix) == (True, "vcli/attempt_3")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"RANK": "2"}, "RANK=2 is no rank of WORLD_SIZE=2"),
        ({"RANK": "-1"}, "RANK='-1' is no number"),
        ({"LOCAL_RANK": "x"}, "LOCAL_RANK='x'"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR and MASTER_PORT"),
        ({"MASTER_PORT": ""}, "MASTER_PORT='' is no number"),
    ],
)
def test_variables_that_make_no_sense_are_refused(changes: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        launched_rank({**TORCHRUN, **changes})


def test_process_that_nobody_launched_is_told_how_to() -> None:
    with pytest.raises(ConfigError, match="no launcher") as refused:
        launched_rank({"PATH": "/bin"})
    assert "torchrun" in refused.value.hint
    executor_class = get_executor_class("external_launcher")
    with pytest.raises(ConfigError, match="torchrun or mpirun started"):
        executor_class(fake_config(2), on_message=lambda _: None)


def test_world_of_another_size_than_planned_is_refused() -> None:
    parallel = ParallelConfig(
        tensor_parallel_size=4, distributed_executor_backend="external_launcher"
    )
    config = replace(
        engine_config(tiny_checkpoint(), parallel=parallel), launched=launched_rank(TORCHRUN)
    )
    with pytest.raises(ConfigError, match="started 2 ranks, the plan has 4"):
        ExternalLauncherExecutor(config, on_message=lambda _: None)
