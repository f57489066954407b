"""What a rank's memory is planned to hold, and which differences are told."""

from dataclasses import replace

import pytest

from tests.support.fake_nvml import gpu_facts
from tests.support.topo_runs import LLAMA_8B
from vcli.topology import HostFacts, ParallelConfig, model_spec_from_config, plan_topology
from vcli.topology.graph_sizes import graph_sizes
from vcli.topology.memory_fit import GPU_RESERVE_BYTES, graph_bytes
from vcli.topology.rank_memory import (
    TOLERANCE_BYTES,
    MemoryItems,
    MemoryLimits,
    differences,
    plan_rank_memory,
    planned_graph_bytes,
)

GIB = 1 << 30
SPEC = model_spec_from_config(LLAMA_8B, source="config.json")
LIMITS = MemoryLimits(
    utilization=0.9,
    block_size=16,
    max_num_seqs=256,
    max_num_batched_tokens=8192,
    max_model_len=8192,
)


def planned(host, *, tp=1, device_type="cuda", limits=LIMITS, attention="triton"):
    plan = plan_topology(
        ParallelConfig(tensor_parallel_size=tp),
        host=host,
        model=SPEC,
        dtype="bfloat16",
        device_type=device_type,
        attention_backend=attention,
    )
    return plan, plan_rank_memory(plan, limits, host)


def test_items_of_a_gpu_fit_what_may_be_used():
    host = HostFacts(gpus=gpu_facts(2))
    plan, plans = planned(host, tp=2)
    assert [item.rank for item in plans] == [0, 1]
    items = plans[0].items
    assert items.weight_bytes == plan.memory.ranks[0].weight_bytes
    used = items.weight_bytes + items.activation_bytes + items.graph_bytes + items.kv_bytes
    assert used <= 0.9 * 80 * GIB
    assert used + items.context_bytes + GPU_RESERVE_BYTES <= 80 * GIB
    assert items.kv_tokens * plan.memory.ranks[0].kv_bytes_per_token == items.kv_bytes
    assert plans[0].free_bytes == 79 * GIB


def test_all_ranks_have_the_tokens_of_the_fullest_gpu():
    host = HostFacts(gpus=gpu_facts(2, memory_free_bytes=[79 * GIB, 20 * GIB]))
    _, plans = planned(host, tp=2)
    assert plans[0].items.kv_tokens == plans[1].items.kv_tokens
    assert plans[1].items.kv_bytes < 12 * GIB


def test_no_more_tokens_than_the_requests_can_use():
    small = replace(LIMITS, max_num_seqs=2, max_model_len=100)
    _, plans = planned(HostFacts(gpus=gpu_facts(1)), limits=small)
    assert plans[0].items.kv_tokens == 2 * 112


def test_a_given_size_is_the_cache():
    given = replace(LIMITS, kv_cache_memory_bytes=GIB)
    plan, plans = planned(HostFacts(gpus=gpu_facts(1)), limits=given)
    per_block = 16 * plan.memory.ranks[0].kv_bytes_per_token
    assert plans[0].items.kv_tokens == GIB // per_block * 16


def test_groups_of_several_ranks_cost_buffers():
    host = HostFacts(gpus=gpu_facts(2))
    alone, pair = (planned(host, tp=tp)[1][0].items.context_bytes for tp in (1, 2))
    assert pair > alone


def test_unknown_memory_leaves_the_cache_open():
    _, plans = planned(HostFacts(gpus=gpu_facts(1, memory_total_bytes=None)))
    assert plans[0].items.kv_tokens is None
    assert plans[0].items.weight_bytes > 0


def test_a_cpu_has_weights_and_cache_alone():
    host = HostFacts(memory_available_bytes=64 * GIB)
    _, plans = planned(host, device_type="cpu", attention="auto")
    items = plans[0].items
    assert (items.activation_bytes, items.graph_bytes, items.context_bytes) == (None, None, None)
    assert items.kv_bytes == pytest.approx((64 * GIB - items.weight_bytes) / 4, rel=0.01)


def test_graphs_cost_more_with_more_sizes_and_nothing_where_there_are_none():
    host = HostFacts(gpus=gpu_facts(1))
    plan, _ = planned(host)
    few = planned_graph_bytes(plan, replace(LIMITS, max_num_seqs=8))
    many = planned_graph_bytes(plan, LIMITS)
    # The logits of the largest are shared by all.
    logits = (256 - 8) * SPEC.vocab_size * 2
    assert logits < many - few < logits + sum(graph_sizes(256)) * SPEC.vocab_size * 2
    assert planned_graph_bytes(plan, replace(LIMITS, enforce_eager=True)) == 0
    torch_plan, _ = planned(host, attention="torch")
    assert planned_graph_bytes(torch_plan, LIMITS) == 0
    stages = ParallelConfig(pipeline_parallel_size=2)
    limits = {"max_num_seqs": 256, "max_num_batched_tokens": 8192}
    assert graph_bytes(SPEC, stages, dtype="bfloat16", **limits) == 0


PLANNED = MemoryItems(
    weight_bytes=16 * GIB, activation_bytes=GIB, graph_bytes=GIB // 4, kv_bytes=40 * GIB
)


def told(**measured):
    return list(differences(PLANNED, replace(PLANNED, **measured)))


@pytest.mark.parametrize(
    "measured",
    [
        {},
        {"weight_bytes": int(17.5 * GIB)},
        {"graph_bytes": GIB // 4 + TOLERANCE_BYTES},
        {"activation_bytes": None},
        {"context_bytes": 9 * GIB},
    ],
)
def test_small_and_unknown_differences_are_not_told(measured):
    assert told(**measured) == []


def test_a_large_difference_names_item_values_and_what_to_do():
    [(name, sentence)] = told(activation_bytes=3 * GIB)
    assert name == "activation peak"
    assert sentence.startswith("activation peak 3.00 GiB, 2.00 GiB more than the 1.00 GiB planned")
    assert "--max-num-batched-tokens" in sentence


def test_a_smaller_cache_has_a_hint_and_a_larger_one_has_none():
    assert "--kv-cache-memory" in told(kv_bytes=30 * GIB)[0][1]
    assert "--" not in told(kv_bytes=50 * GIB)[0][1]
