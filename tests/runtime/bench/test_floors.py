"""The least time of a workload, against sums done by hand."""

import pytest

from vcli.runtime.bench.floors import DeviceSpeed, Floors, workload_floors
from vcli.runtime.bench.shapes import SHAPES
from vcli.runtime.bench.workloads import BenchRequest, Workload, fixed_workloads
from vcli.topology import ParallelConfig, model_spec_from_config, plan_topology

#: by the config: attention, MLP and norms of 32 layers, the last norm
LLAMA_BODY = 32 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336 + 2 * 4096) + 4096
LLAMA_TABLE = 128256 * 4096
LLAMA_KV = 32 * 2 * 8 * 128 * 2


def plan_of(shape, **sizes):
    spec = model_spec_from_config(SHAPES[shape], source=shape)
    return plan_topology(ParallelConfig(**sizes), model=spec, dtype="bfloat16")


def workload_of(*sizes):
    requests = tuple(BenchRequest([1] * prompt, output) for prompt, output in sizes)
    return Workload(name="test", requests=requests)


def floors_of(plan, workload, *, memory=1.0, flops=1.0, max_num_seqs=256):
    speed = DeviceSpeed(memory_bytes_per_s=memory, flops=flops)
    return workload_floors(plan, workload, device=speed, max_num_seqs=max_num_seqs)


def test_a_single_stream_reads_weights_without_the_lookup_and_its_context_each_step():
    floors = floors_of(plan_of("llama8b"), workload_of((10, 3)))
    context = 11 + 12  # the first token comes with the prompt
    assert floors.bytes_s == 3 * 2 * (LLAMA_BODY + LLAMA_TABLE) + context * LLAMA_KV
    assert floors.ops_s == 2 * ((10 + 2) * LLAMA_BODY + 3 * LLAMA_TABLE)


def test_requests_together_share_the_weights_and_not_the_cache():
    one = floors_of(plan_of("llama8b"), workload_of((10, 3)))
    two = floors_of(plan_of("llama8b"), workload_of((10, 3), (10, 3)))
    assert two.bytes_s - one.bytes_s == (11 + 12) * LLAMA_KV
    assert two.ops_s == 2 * one.ops_s


def test_more_requests_than_run_at_once_read_the_weights_more_often():
    workload = workload_of(*[(10, 3)] * 4)
    many = floors_of(plan_of("llama8b"), workload, max_num_seqs=2)
    all_at_once = floors_of(plan_of("llama8b"), workload)
    assert many.bytes_s - all_at_once.bytes_s == 3 * 2 * (LLAMA_BODY + LLAMA_TABLE)


def test_tied_embeddings_are_read_once_as_the_head():
    spec = model_spec_from_config(SHAPES["qwen06b"], source="qwen06b")
    plan = plan_of("qwen06b")
    floors = floors_of(plan, workload_of((1, 1)))
    assert plan.memory is not None
    assert floors.bytes_s == 2 * plan.memory.num_parameters
    assert spec.tie_word_embeddings


def test_one_token_of_a_moe_model_reads_and_computes_its_chosen_experts():
    floors = floors_of(plan_of("qwen30b_moe"), workload_of((1, 1)))
    experts = 48 * 8 * 3 * 2048 * 768
    shared = 48 * (
        2048 * (4096 + 2 * 512) + 4096 * 2048 + 2 * 128 + 2048 * 128 + 2 * 2048
    ) + 2048 + 151936 * 2048  # fmt: skip
    assert floors.bytes_s == pytest.approx(2 * (experts + shared))
    assert floors.ops_s == pytest.approx(2 * (experts + shared))


def test_a_large_batch_of_a_moe_model_reads_nearly_all_experts():
    plan = plan_of("qwen30b_moe")
    assert plan.memory is not None
    whole = 2 * (plan.memory.num_parameters - 151936 * 2048)
    floors = floors_of(plan, workload_of((500, 1)))
    assert floors.bytes_s == pytest.approx(whole, rel=1e-6)


def test_tensor_parallel_ranks_halve_the_floors():
    (workload,) = fixed_workloads("one-stream")
    alone = floors_of(plan_of("llama8b"), workload)
    halves = floors_of(plan_of("llama8b", tensor_parallel_size=2), workload)
    assert halves.bytes_s == pytest.approx(alone.bytes_s / 2, rel=1e-3)
    assert halves.ops_s == pytest.approx(alone.ops_s / 2, rel=1e-3)


def test_a_stream_passes_all_stages_and_many_requests_the_slowest():
    alone = plan_of("llama8b")
    stages = plan_of("llama8b", pipeline_parallel_size=2)
    one, several = workload_of((10, 3)), workload_of(*[(10, 3)] * 8)
    assert floors_of(stages, one).bytes_s == pytest.approx(floors_of(alone, one).bytes_s)
    assert floors_of(stages, several).ops_s < 0.6 * floors_of(alone, several).ops_s


def test_a_floor_without_its_speed_is_unknown():
    floors = floors_of(plan_of("llama8b"), workload_of((10, 3)), flops=None)
    assert floors.ops_s is None
    assert floors.larger_s == floors.bytes_s
    assert Floors(bytes_s=None, ops_s=None).larger_s is None
