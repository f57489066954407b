"""Layouts over many nodes are judged by one node, and to the same end as by all of them."""

from dataclasses import replace

import pytest

from vcli.topology import ModelSpec, ParallelConfig, model_spec_from_config, plan_topology
from vcli.topology.estimate import Workload, estimate_plan
from vcli.topology.hardware import assumed_gpu_host, gpu_kind, parse_link
from vcli.topology.links import hardware_of
from vcli.topology.sizes import ParallelSizes
from vcli.topology.suggest import Suggestions, suggest_layouts

SHAPE = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 30,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
MOE_SHAPE = {
    **SHAPE,
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 36,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
LINK = parse_link("400Gb")
HOST = assumed_gpu_host(gpu_kind("t4"), 8, link=LINK)
HARDWARE = hardware_of(HOST, "cuda", LINK)
WORK = Workload(num_requests=64)


def suggestions(spec: ModelSpec, nnodes: int) -> Suggestions:
    return suggest_layouts(
        ParallelSizes(nnodes=nnodes, master_addr="n0"),
        spec,
        num_gpus=8 * nnodes,
        hardware=HARDWARE,
        host=HOST,
        workload=WORK,
        dtype="bfloat16",
        device_type="cuda",
    )


@pytest.mark.parametrize("shape", [SHAPE, MOE_SHAPE], ids=["dense", "experts"])
@pytest.mark.parametrize("nnodes", [1, 3, 4])
def test_one_node_judges_as_all_of_them_do(shape: dict[str, object], nnodes: int) -> None:
    spec = model_spec_from_config(shape, source="test")
    found = suggestions(spec, nnodes)

    assert len(found.layouts) > 3
    for item in found.layouts:
        config = ParallelConfig.checked(replace(item.plan.config, is_moe=spec.is_moe))
        whole = plan_topology(config, host=HOST, model=spec, dtype="bfloat16", device_type="cuda")
        assert item.plan.warnings == whole.warnings
        assert whole.memory is not None
        assert item.plan.memory is not None
        fullest = max(rank.weight_bytes for rank in whole.memory.ranks)
        assert item.plan.memory.max_weight_bytes == whole.memory.max_weight_bytes == fullest
        assert item.estimate == estimate_plan(
            whole, spec, hardware=HARDWARE, host=HOST, workload=WORK
        )


def test_layouts_of_many_nodes_hold_the_ranks_of_one() -> None:
    found = suggestions(model_spec_from_config(SHAPE, source="test"), 64)

    assert {len(item.plan.ranks) for item in found.layouts} == {8}
    assert {len(item.plan.nodes) for item in found.layouts} == {1}
