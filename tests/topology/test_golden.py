"""Layouts, process counts and verdicts agree with the reference engine's own arithmetic."""

import json
from pathlib import Path
from typing import Any

import pytest

from vcli.topology import (
    ConfigError,
    ParallelConfig,
    TopologyPlan,
    layer_ranges,
    plan_to_json,
    plan_topology,
)

GOLDEN = json.loads((Path(__file__).parent / "data" / "topologies.json").read_text())
NAMES = {
    "tp": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "pcp": "prefill_context_parallel_size",
    "dcp": "decode_context_parallel_size",
    "dp": "data_parallel_size",
    "nnodes": "nnodes",
    "is_moe": "is_moe",
    "enable_expert_parallel": "enable_expert_parallel",
    "enable_eplb": "enable_eplb",
    "external_dp": "external_data_parallel_size",
    "nn": "nnodes",
    "nr": "node_rank",
    "ext": "data_parallel_external_lb",
    "dpr": "data_parallel_rank",
    "backend": "data_parallel_backend",
    "eplb": "enable_eplb",
    "ep": "enable_expert_parallel",
    "red": "num_redundant_experts",
}
#: Words of our message that show which rule was broken.
RULE_WORDS = {
    "pcp=1: dcp must divide tp": "must divide tensor_parallel_size",
    "pcp>1: dcp must be 1, pcp or tp*pcp": "must be 1, prefill_context_parallel_size",
    "nnodes must divide dp*tp*pp*pcp": "must divide the 8 ranks",
    "node_rank must lie in [0, nnodes)": "node_rank=2 must lie in 0..1",
    "nnodes>1 needs the mp data-parallel backend": "needs data_parallel_backend=mp",
    "external LB needs dp>1": "external load balancing needs data_parallel_size > 1",
    "EPLB needs expert parallelism": "needs expert parallelism",
    "EPLB needs tp*pcp*dp>1": "more than one rank to balance over",
    "redundant experts need EPLB": "needs expert load balancing",
}


def config_of(short: dict[str, Any]) -> ParallelConfig:
    return ParallelConfig(**{NAMES[key]: value for key, value in short.items()})


def cases() -> list[Any]:
    return [pytest.param(case, id=case["id"]) for case in GOLDEN["cases"]]


def planned(case: dict[str, Any]) -> tuple[TopologyPlan, dict[str, Any]]:
    plan = plan_topology(config_of(case["config"]))
    return plan, json.loads(json.dumps(plan_to_json(plan)))


def without(mapping: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in mapping.items() if key not in names}


@pytest.mark.parametrize("case", cases())
def test_sizes_and_groups_agree(case: dict[str, Any]) -> None:
    _, document = planned(case)

    expected = without(case, "id", "config", "nodes", "totals", "rendezvous", "dp_group_note")

    assert {key: document[key] for key in expected} == expected
    assert (document["dp_group_note"] is None) == (case["dp_group_note"] is None)


@pytest.mark.parametrize("case", cases())
def test_rendezvous_has_the_same_scheme(case: dict[str, Any]) -> None:
    plan, _ = planned(case)

    assert plan.rendezvous.value.scheme == case["rendezvous"].split(":")[0]


@pytest.mark.parametrize("case", cases())
def test_nodes_ranks_and_process_counts_agree(case: dict[str, Any]) -> None:
    _, document = planned(case)

    assert document["totals"] == case["totals"]
    if case["nodes"] is None:
        assert document["nodes"] is None
        return
    assert len(document["nodes"]) == len(case["nodes"])
    for node, expected in zip(document["nodes"], case["nodes"], strict=True):
        fields = without(expected, "ranks", "shm_ring_bytes")
        assert {key: node[key] for key in fields} == fields
        ranks = [{key: rank[key] for key in expected["ranks"][0]} for rank in node["ranks"]]
        assert ranks == expected["ranks"]


@pytest.mark.parametrize(
    "case", GOLDEN["validation_cases"], ids=lambda case: json.dumps(case["config"])
)
def test_verdict_agrees(case: dict[str, Any]) -> None:
    if not case["ok"]:
        with pytest.raises(ConfigError) as caught:
            config_of(case["config"])
        assert RULE_WORDS[case["rule"]] in caught.value.message
        assert caught.value.hint
        return
    config = config_of(case["config"])

    assert config.local_data_parallel_size == case["data_parallel_size_local"]
    assert config.nnodes_within_dp == case["nnodes_within_dp"]
    assert config.node_rank_within_dp == case["node_rank_within_dp"]
    assert config.local_world_size == case["local_world_size"]
    assert config.first_local_data_parallel_rank == case["inferred_dp_rank"]
    assert (config.world_size % config.nnodes_within_dp == 0) == case["executor_divisible"]
    assert len(plan_topology(config).ranks) == config.world_size_across_dp


@pytest.mark.parametrize("case", GOLDEN["pp_partition_cases"], ids=str)
def test_layers_of_stages_agree(case: dict[str, Any]) -> None:
    ranges = layer_ranges(case["layers"], case["pp"])

    assert [[layers.start, layers.stop] for layers in ranges] == case["spans"]


@pytest.mark.parametrize("case", GOLDEN["response_queue_locality_cases"], ids=str)
def test_local_ranks_come_from_the_plan_not_from_the_device_count(case: dict[str, Any]) -> None:
    plan = plan_topology(
        ParallelConfig(
            tensor_parallel_size=case["local_world_size"],
            pipeline_parallel_size=case["nnodes"],
            nnodes=case["nnodes"],
        )
    )
    node_rank = plan.rank_plan(case["reader_rank"]).node_rank

    assert [rank.rank for rank in plan.local_ranks(node_rank)] == case["really_local"]
