"""The plan as a whole: ranks, fingerprint, JSON, pickling, imports, speed."""

import ast
import json
import pickle
import subprocess
import sys
import time
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

import vcli.topology
from vcli.topology import (
    ConfigError,
    GpuFacts,
    HostFacts,
    ParallelConfig,
    PlacementError,
    memfd_name,
    model_spec_from_config,
    plan_to_json,
    plan_topology,
)

DENSE = model_spec_from_config(
    {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "torch_dtype": "bfloat16",
    },
    source="test",
)


def test_first_example_of_everybody() -> None:
    plan = plan_topology(ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=4))

    assert plan.groups["TP"] == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert plan.groups["PP"] == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert plan.output_rank == 6
    assert plan.rank_plan(6).is_output
    assert plan.warnings == ()


def test_model_decides_whether_there_are_experts() -> None:
    plan = plan_topology(ParallelConfig(is_moe=True), model=DENSE)

    assert not plan.config.is_moe
    assert "EP" not in plan.groups
    assert plan.attention is not None
    assert plan.attention in plan.decisions


def test_model_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError):
        plan_topology(ParallelConfig(pipeline_parallel_size=1000), model=DENSE)


def test_ranks_know_threads_and_numa_node() -> None:
    host = HostFacts(
        cpu_count=16, gpus=(GpuFacts(index=0, numa_node=0), GpuFacts(index=1, numa_node=1))
    )
    plan = plan_topology(ParallelConfig(tensor_parallel_size=2), host=host, device_type="cuda")

    assert [(rank.omp_num_threads, rank.numa_node) for rank in plan.ranks] == [(8, 0), (8, 1)]


def test_unknown_rank_or_node_is_an_error() -> None:
    plan = plan_topology(ParallelConfig(tensor_parallel_size=2))

    for rank, dp_rank in ((2, 0), (-1, 0), (0, 1)):
        with pytest.raises(PlacementError):
            plan.rank_plan(rank, dp_rank)
    with pytest.raises(PlacementError):
        plan.node(1)


def test_fingerprint_is_equal_on_all_nodes_and_only_there() -> None:
    def fingerprint(**values: object) -> str:
        config = ParallelConfig(**{"tensor_parallel_size": 4, "nnodes": 2, **values})  # type: ignore[arg-type]
        return plan_topology(config, model=DENSE).fingerprint()

    assert fingerprint() == fingerprint(node_rank=1)
    assert fingerprint() == fingerprint(master_addr="10.0.0.1", start_method="spawn")
    assert len({fingerprint(), fingerprint(pipeline_parallel_size=2), fingerprint(nnodes=1)}) == 3
    assert len(fingerprint()) == 32


def test_fingerprint_sees_the_model_but_not_the_host() -> None:
    config = ParallelConfig(tensor_parallel_size=2)
    plain = plan_topology(config)

    assert plain.fingerprint() == plan_topology(config, host=HostFacts(cpu_count=9)).fingerprint()
    assert plain.fingerprint() != plan_topology(config, model=DENSE).fingerprint()


def test_plan_is_frozen_and_survives_pickling() -> None:
    plan = plan_topology(ParallelConfig(tensor_parallel_size=2, data_parallel_size=2), model=DENSE)

    copy = pickle.loads(pickle.dumps(plan))

    assert copy == plan
    assert copy.fingerprint() == plan.fingerprint()
    with pytest.raises(FrozenInstanceError):
        plan.config.nnodes = 3  # type: ignore[misc]
    plan.groups.clear()
    assert plan.groups


def test_json_is_plain_complete_and_deterministic() -> None:
    config = ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2, nnodes=2)
    documents = [
        json.dumps(plan_to_json(plan_topology(config, model=DENSE, host=HostFacts(cpu_count=4))))
        for _ in range(2)
    ]
    document = json.loads(documents[0])

    assert documents[0] == documents[1]
    assert document["schema"] == "vcli.topo/1"
    assert {"helpers", "ring_bytes", "decisions", "warnings", "ports", "memory"} <= set(document)
    names = [decision["name"] for decision in document["decisions"]]
    assert names == [
        "backend",
        "start_method",
        "rendezvous",
        "all_reduce",
        "omp_num_threads",
        "attention",
    ]
    assert all(decision["reasons"] for decision in document["decisions"])
    assert document["nodes"][0]["ranks"][0]["layer_span"] == [0, 16]


def test_names_of_descriptors() -> None:
    assert memfd_name("reply", dp_rank=0, rank=3) == "vcli-reply-dp0-r3"
    assert memfd_name("broadcast", dp_rank=1) == "vcli-broadcast-dp1"


def test_topology_imports_only_the_standard_library() -> None:
    folder = Path(vcli.topology.__file__).parent
    found = set()
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0
                module = node.module or ""
                found.add("vcli.topology" if module.startswith("vcli.topology.") else module)
    allowed = {"vcli.topology"}

    assert {
        name for name in found - allowed if name.split(".")[0] not in sys.stdlib_module_names
    } == set()


def test_import_loads_nothing_heavy() -> None:
    script = (
        "import sys, vcli.topology; "
        "print([n for n in ('torch', 'asyncio', 'multiprocessing', 'socket') if n in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )

    assert result.stdout.strip() == "[]"


def test_a_thousand_ranks_are_planned_at_once() -> None:
    config = ParallelConfig(
        tensor_parallel_size=8,
        pipeline_parallel_size=4,
        data_parallel_size=32,
        nnodes=128,
        is_moe=True,
        enable_expert_parallel=True,
    )
    start = time.process_time()

    plan = plan_topology(config)

    # Takes about 0.03 s; the bound is loose because the machine may be busy.
    assert time.process_time() - start < 0.5
    assert len(plan.ranks) == 1024
    assert len(plan.nodes) == 128
