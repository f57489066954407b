"""What nodes compare before they start, and the words for what differs."""

import dataclasses
from pathlib import Path

import pytest

from tests.support.fake_worker import SPEC, fake_config
from vcli.runtime.config import EngineConfig, ModelConfig, SchedulerConfig
from vcli.runtime.launch.agreement import differences, job_document
from vcli.topology.config import ParallelConfig
from vcli.topology.planner import plan_topology


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "a.safetensors").write_bytes(bytes(10))
    (tmp_path / "b.safetensors").write_bytes(bytes(20))
    return tmp_path


def config_of(folder: Path, *, node_rank: int = 0, tp: int = 2) -> EngineConfig:
    parallel = ParallelConfig(
        tensor_parallel_size=tp, nnodes=2, node_rank=node_rank, master_addr="10.0.0.1"
    )
    model = ModelConfig(path=folder, served_name="m", spec=SPEC, dtype="float32", max_model_len=128)
    return fake_config(
        parallel=parallel, plan=plan_topology(parallel, model=SPEC, dtype="float32"), model=model
    )


def test_nodes_of_one_job_agree_wherever_the_model_lies(folder: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for path in folder.glob("*.*"):
        (elsewhere / path.name).write_bytes(path.read_bytes())
    there = config_of(elsewhere, node_rank=1)
    there = dataclasses.replace(there, log_level="DEBUG")
    assert differences(job_document(config_of(folder)), job_document(there), node_rank=1) == []


def test_a_different_flag_is_named_with_both_values_and_without_what_follows(
    folder: Path,
) -> None:
    here, there = job_document(config_of(folder)), job_document(config_of(folder, tp=4))
    assert differences(here, there, node_rank=1) == [
        "--tensor-parallel-size (-tp): node 0 has 2, node 1 has 4"
    ]


def test_a_scheduler_flag_counts_too(folder: Path) -> None:
    there = dataclasses.replace(config_of(folder), scheduler=SchedulerConfig(max_num_seqs=3))
    lines = differences(job_document(config_of(folder)), job_document(there), node_rank=1)
    assert lines == ["--max-num-seqs: node 0 has 256, node 1 has 3"]


def test_weight_files_are_compared_by_name_and_size(folder: Path) -> None:
    here = job_document(config_of(folder))
    (folder / "a.safetensors").write_bytes(bytes(11))
    (folder / "b.safetensors").rename(folder / "c.safetensors")
    assert differences(here, job_document(config_of(folder)), node_rank=3) == [
        "weights a.safetensors: node 0 has 10 bytes, node 3 has 11 bytes",
        "weights b.safetensors: node 0 has 20 bytes, node 3 has none",
        "weights c.safetensors: node 0 has none, node 3 has 20 bytes",
    ]


def test_a_plan_that_differs_for_no_flag_is_told_as_the_plan() -> None:
    assert differences({"plan": "a", "x": "1"}, {"plan": "b", "x": "1"}, node_rank=1) == [
        "plan: node 0 has a, node 1 has b"
    ]


def test_many_differences_are_cut() -> None:
    here = {str(number): "a" for number in range(30)}
    lines = differences(here, dict.fromkeys(here, "b"), node_rank=1)
    assert len(lines) == 9
    assert lines[-1] == "and 22 more"
