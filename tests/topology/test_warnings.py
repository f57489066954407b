"""What a plan refuses or remarks because of layout, host and process."""

import pytest

from vcli.topology import (
    GpuFacts,
    HostFacts,
    ParallelConfig,
    PlacementError,
    ProcessFacts,
    TopologyPlan,
    assumed_host,
    model_spec_from_config,
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


def gpus(count: int, **values: int) -> tuple[GpuFacts, ...]:
    return tuple(GpuFacts(index=index, **values) for index in range(count))


def warning_ids(plan: TopologyPlan) -> list[str]:
    return [warning.id for warning in plan.warnings]


def test_too_few_gpus_are_refused_before_start() -> None:
    config = ParallelConfig(tensor_parallel_size=8)

    with pytest.raises(PlacementError) as caught:
        plan_topology(config, host=HostFacts(hostname="n1", gpus=gpus(4)), device_type="cuda")

    assert caught.value.message == "8 ranks on one node need as many GPUs, n1 has 4"
    assert "--nnodes 2" in caught.value.hint
    with pytest.raises(PlacementError):
        plan_topology(ParallelConfig(), host=HostFacts(), device_type="cuda")
    plan_topology(config, host=HostFacts(gpus=gpus(8)), device_type="cuda")


def test_assumed_host_warns_instead_of_refusing() -> None:
    plan = plan_topology(
        ParallelConfig(tensor_parallel_size=8), host=assumed_host(num_gpus=4), device_type="cuda"
    )

    assert warning_ids(plan) == ["GPU-01"]


def test_unlucky_layouts_carry_warnings() -> None:
    across = plan_topology(
        ParallelConfig(tensor_parallel_size=16, nnodes=2, master_addr="n0"), device_type="cuda"
    )
    stages = plan_topology(
        ParallelConfig(tensor_parallel_size=8, pipeline_parallel_size=2, nnodes=2, master_addr="n0")
    )
    loopback = plan_topology(ParallelConfig(data_parallel_size=2, nnodes=2))
    by_hand = plan_topology(ParallelConfig(data_parallel_size=4, data_parallel_size_local=2))
    experts = plan_topology(ParallelConfig(tensor_parallel_size=2, enable_expert_parallel=True))
    replicated = plan_topology(ParallelConfig(tensor_parallel_size=16), model=DENSE)

    assert warning_ids(across) == ["RDV-09"]
    assert across.all_reduce.value == ("nccl",)
    assert "--tensor-parallel-size 8 --pipeline-parallel-size 2" in across.warnings[0].message
    assert warning_ids(stages) == ["PLAN-01"]
    assert warning_ids(loopback) == ["PLAN-04"]
    assert warning_ids(by_hand) == ["PLAN-02"]
    assert warning_ids(experts) == ["FIT-02"]
    assert warning_ids(replicated) == ["PLAN-03"]


def test_unlucky_hosts_carry_warnings() -> None:
    config = ParallelConfig(tensor_parallel_size=4)
    crowded = plan_topology(config, host=HostFacts(cpu_count=2))
    threads = plan_topology(
        config, host=HostFacts(cpu_count=8), process=ProcessFacts(omp_num_threads=8)
    )
    small = plan_topology(
        config, model=DENSE, host=HostFacts(cpu_count=8, memory_available_bytes=8 * 1024**3)
    )
    small_gpus = plan_topology(
        ParallelConfig(),
        model=DENSE,
        device_type="cuda",
        host=HostFacts(gpus=gpus(1, memory_total_bytes=8 * 1024**3)),
    )

    assert warning_ids(crowded) == ["NUMA-05"]
    assert warning_ids(threads) == ["NUMA-06"]
    assert warning_ids(small) == ["HOST-05"]
    assert warning_ids(small_gpus) == ["FIT-04"]


def test_start_method_that_was_not_granted_is_a_warning() -> None:
    plan = plan_topology(
        ParallelConfig(start_method="fork"),
        process=ProcessFacts(num_threads=5, main_has_guard=False),
    )

    assert plan.start_method.value == "spawn"
    assert warning_ids(plan) == ["PROC-01", "PROC-04"]
    assert "5 threads" in plan.warnings[0].message
