"""Bytes over links against hand counts, times against measurements, layouts in the right order."""

from itertools import product
from pathlib import Path

import pytest

from vcli.topology import (
    ConfigError,
    GpuFacts,
    HostFacts,
    LinkFacts,
    ModelSpec,
    NicFacts,
    ParallelConfig,
    VcliError,
    model_spec_from_config,
    plan_topology,
)
from vcli.topology.estimate import Estimate, Workload, estimate_plan
from vcli.topology.hardware import (
    GPU_KINDS,
    GpuKind,
    NetworkLink,
    assumed_gpu_host,
    gpu_kind,
    kind_of_gpu,
    parse_link,
)
from vcli.topology.links import LinkClass, hardware_of, nearest_nic, worst_class
from vcli.topology.sizes import ParallelSizes
from vcli.topology.suggest import layout_flags, suggest_layouts
from vcli.topology.traffic import Transfer, plan_traffic

LLAMA_8B = model_spec_from_config(
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
    source="8B",
)
QWEN3_600M = model_spec_from_config(
    {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    },
    source="0.6B",
)
MOE = model_spec_from_config(
    {
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "torch_dtype": "bfloat16",
    },
    source="30B-A3B",
)
H200 = assumed_gpu_host(gpu_kind("h200"), 8, link=parse_link("400Gb"))


def transfers(spec: ModelSpec, num_tokens: int = 1, **sizes: object) -> dict[str, Transfer]:
    config = ParallelConfig(master_addr="n0", **sizes)  # type: ignore[arg-type]
    plan = plan_topology(config, host=H200, model=spec, device_type="cuda")
    hardware = hardware_of(H200, "cuda")
    found = plan_traffic(plan, hardware=hardware, host=H200, num_tokens=num_tokens)
    return {transfer.kind.value: transfer for transfer in found}


def estimated(spec: ModelSpec, host: HostFacts = H200, **sizes: object) -> Estimate:
    config = ParallelConfig(master_addr="n0", **sizes)  # type: ignore[arg-type]
    plan = plan_topology(config, host=host, model=spec, device_type="cuda")
    hardware = hardware_of(host, "cuda")
    return estimate_plan(plan, spec, hardware=hardware, host=host, workload=Workload())


def test_tp_bytes_of_a_token() -> None:
    found = transfers(LLAMA_8B, tensor_parallel_size=2)["TP"]
    sums = (2 * 32 + 1) * 2 * 4096 * 2 // 2
    logits = 128256 // 2 * 2

    assert found.bytes_per_token == sums + logits
    assert found.num_calls == 2 * 32 + 2
    assert found.link is LinkClass.NVLINK
    assert found.network_bytes == 0


def test_pp_hands_hidden_states_and_residual_on() -> None:
    found = transfers(LLAMA_8B, 10, pipeline_parallel_size=2)["PP"]

    assert found.bytes_per_token == 2 * 4096 * 2
    assert found.bytes_per_step == 10 * found.bytes_per_token


def test_pp_over_nodes_leaves_each_rank_of_a_node() -> None:
    found = transfers(LLAMA_8B, tensor_parallel_size=8, pipeline_parallel_size=2, nnodes=2)["PP"]

    assert found.link is LinkClass.NETWORK
    assert (found.num_groups, found.num_network_groups) == (8, 8)
    assert found.network_bytes == 8 * found.bytes_per_step


def test_a_sum_over_nodes_leaves_a_node_once() -> None:
    found = transfers(LLAMA_8B, tensor_parallel_size=16, nnodes=2)["TP"]

    assert found.num_network_groups == 1
    assert found.network_bytes == found.bytes_per_step


def test_tokens_go_to_their_experts_and_back() -> None:
    found = transfers(MOE, data_parallel_size=4, is_moe=True, enable_expert_parallel=True)["EP"]

    assert found.bytes_per_token == 48 * (2 * 8 * 2048 * 2 * 3 // 4)
    assert found.num_calls == 2 * 48


def test_dense_replicas_move_nothing() -> None:
    assert transfers(LLAMA_8B, data_parallel_size=4) == {}


def test_time_grows_with_tokens_nodes_and_slower_links() -> None:
    one = transfers(LLAMA_8B, 1, tensor_parallel_size=8)["TP"].seconds
    many = transfers(LLAMA_8B, 256, tensor_parallel_size=8)["TP"].seconds
    across = transfers(LLAMA_8B, 1, tensor_parallel_size=8, nnodes=2)["TP"].seconds

    assert one < many
    assert one < across


@pytest.mark.parametrize(
    ("spec", "tp", "measured_ms"),
    [(LLAMA_8B, 1, 4.91), (LLAMA_8B, 2, 3.81), (QWEN3_600M, 1, 1.71)],
)
def test_latency_is_near_what_was_measured_on_h200(
    spec: ModelSpec, tp: int, measured_ms: float
) -> None:
    latency_ms = estimated(spec, tensor_parallel_size=tp).latency_s * 1e3

    assert latency_ms == pytest.approx(measured_ms, rel=0.15)


@pytest.mark.parametrize(
    ("spec", "tp", "measured"),
    [(LLAMA_8B, 1, 4412), (LLAMA_8B, 2, 6040), (QWEN3_600M, 1, 13211)],
)
def test_throughput_of_32_streams_is_near_what_was_measured(
    spec: ModelSpec, tp: int, measured: float
) -> None:
    rate = estimated(spec, tensor_parallel_size=tp).tokens_per_s

    assert rate == pytest.approx(measured, rel=0.3)


def test_requests_that_do_not_fit_wait() -> None:
    small = assumed_gpu_host(gpu_kind("l4"), 1)
    roomy, tight = estimated(LLAMA_8B), estimated(LLAMA_8B, small)

    assert roomy.num_requests == 32
    assert 0 < tight.num_requests < 40
    assert tight.tokens_per_s < roomy.tokens_per_s


def test_every_layout_up_to_64_ranks_is_judged_or_refused_by_rule() -> None:
    count = 0
    for tp, pp, dp, nnodes, is_moe in product((1, 2, 4, 8), (1, 2, 4), (1, 2, 4), (1, 2), (0, 1)):
        if tp * pp * dp > 64:
            continue
        spec = MOE if is_moe else LLAMA_8B
        host = assumed_gpu_host(gpu_kind("h100"), 64, link=parse_link("100Gb"))
        try:
            config = ParallelConfig(
                tensor_parallel_size=tp,
                pipeline_parallel_size=pp,
                data_parallel_size=dp,
                nnodes=nnodes,
                is_moe=bool(is_moe),
                enable_expert_parallel=bool(is_moe),
            )
        except VcliError:
            continue
        plan = plan_topology(config, host=host, model=spec, device_type="cuda")
        hardware = hardware_of(host, "cuda")
        found = estimate_plan(plan, spec, hardware=hardware, host=host, workload=Workload())
        count += 1
        assert found.latency_s > 0
        assert found.tokens_per_s > 0
        for transfer in plan_traffic(plan, hardware=hardware, host=host, num_tokens=8):
            assert transfer.seconds >= 0
            assert 0 <= transfer.num_network_groups <= transfer.num_groups
            assert (transfer.link is LinkClass.NETWORK) == (transfer.num_network_groups > 0)
    assert count > 80


def suggested(spec: ModelSpec, num_gpus: int, **sizes: object) -> list[str]:
    found = suggest_layouts(
        ParallelSizes(master_addr="n0", **sizes),  # type: ignore[arg-type]
        spec,
        num_gpus=num_gpus,
        hardware=hardware_of(H200, "cuda"),
        host=H200,
        workload=Workload(),
        dtype="bfloat16",
        device_type="cuda",
    )
    return [item.flags for item in found.layouts]


def test_suggestions_use_every_gpu_and_come_once() -> None:
    flags = suggested(LLAMA_8B, 8)

    assert len(flags) == len(set(flags))
    assert flags[0] == "-tp 8"
    assert set(flags) == {
        *("-tp 8", "-tp 4 -pp 2", "-tp 4 -dp 2", "-tp 2 -pp 4", "-tp 2 -dp 4"),
        *("-tp 2 -pp 2 -dp 2", "-pp 8", "-pp 4 -dp 2", "-pp 2 -dp 4", "-dp 8"),
    }


def test_experts_are_suggested_both_ways() -> None:
    flags = suggested(MOE, 8)

    assert {"-tp 8 -ep", "-dp 8 -ep", "-tp 4 -dp 2 -ep"} <= set(flags)
    assert {"-tp 8", "-tp 8 -dcp 2"} <= set(flags)


def test_tp_over_nodes_is_slower_than_stages_over_nodes() -> None:
    flags = suggested(LLAMA_8B, 16, nnodes=2)

    assert flags.index("-tp 8 -pp 2") < flags.index("-tp 16")


def test_no_valid_layout_is_an_error_with_a_way_out() -> None:
    with pytest.raises(ConfigError) as caught:
        suggested(LLAMA_8B, 8, nnodes=3)
    assert caught.value.hint


def test_flags_of_a_layout() -> None:
    assert layout_flags(ParallelSizes()) == "-tp 1"
    sizes = ParallelSizes(data_parallel_size=2, is_moe=True, enable_expert_parallel=True)
    assert layout_flags(sizes) == "-dp 2 -ep"


@pytest.mark.parametrize(
    ("text", "bits", "count"),
    [("400Gb", 4e11, 1), ("25g", 2.5e10, 1), ("8x400Gb/s", 4e11, 8), ("1.6Tbit", 1.6e12, 1)],
)
def test_link_speeds_are_read(text: str, bits: float, count: int) -> None:
    assert parse_link(text) == NetworkLink(bits_per_s=bits, count=count)


@pytest.mark.parametrize("text", ["", "400", "400GB", "0Gb", "0x400Gb", "fast", "-1Gb", "4KGb"])
def test_what_is_no_speed_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_link(text)


@pytest.mark.parametrize("kind", GPU_KINDS.values(), ids=GPU_KINDS.keys())
def test_assumed_gpus_are_recognised_again(kind: object) -> None:
    host = assumed_gpu_host(kind, 2)  # type: ignore[arg-type]

    assert kind_of_gpu(host.gpus[0]) is kind
    assert hardware_of(host, "cuda").gpu is kind
    assert not hardware_of(host, "cuda").is_guessed


def test_unknown_gpus_are_guessed_and_said_so() -> None:
    host = HostFacts(gpus=(GpuFacts(index=0, name="Strange GPU"),))

    assert kind_of_gpu(host.gpus[0]) is None
    assert hardware_of(host, "cuda").is_guessed


def test_slowest_link_counts() -> None:
    links = (
        LinkFacts(first=0, second=1, kind="NV18"),
        LinkFacts(first=0, second=2, kind="PIX"),
        LinkFacts(first=1, second=2, kind="SYS"),
    )
    host = HostFacts(links=links)

    assert worst_class(host, (0, 1), LinkClass.PCIE)[0] is LinkClass.NVLINK
    assert worst_class(host, (0, 1, 2), LinkClass.PCIE) == (LinkClass.SOCKET, (1, 2))
    assert worst_class(host, (5, 6), LinkClass.PCIE) == (LinkClass.PCIE, None)
    assert worst_class(None, (0, 1), LinkClass.NVLINK) == (LinkClass.NVLINK, None)


def test_nearest_adapter_shares_the_switch_before_the_socket() -> None:
    def nic(name: str, *path: str, numa_node: int) -> NicFacts:
        return NicFacts(name=name, pci_path=path, numa_node=numa_node)

    nics = (
        nic("far", "pci0000:80", "0000:80:01.0", "0000:81:00.0", numa_node=1),
        nic("socket", "pci0000:10", "0000:10:01.0", "0000:11:00.0", numa_node=0),
        nic("switch", "pci0000:00", "0000:00:01.0", "0000:02:01.0", numa_node=0),
    )
    gpu = GpuFacts(index=0, numa_node=0, pci_path=("pci0000:00", "0000:00:01.0", "0000:02:00.0"))

    def nearest(*listed: NicFacts) -> tuple[str, str] | None:
        found = nearest_nic(gpu, HostFacts(nics=listed))
        return (found[0].name, found[1]) if found else None

    assert nearest(*nics) == ("switch", "PIX")
    assert nearest(*nics[:2]) == ("socket", "NODE")
    assert nearest(*nics[:1]) == ("far", "SYS")
    assert nearest(NicFacts(name="lo", is_loopback=True)) is None
    assert nearest(NicFacts(name="eth0")) == ("eth0", "?")


@pytest.mark.parametrize("kind", GPU_KINDS.values(), ids=GPU_KINDS.keys())
def test_documentation_has_the_figures_of_every_kind(kind: GpuKind) -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "topo.md").read_text()
    figures = (
        kind.memory_bytes / 2**30,
        kind.memory_bytes_per_s / 1e9,
        kind.nvlink_bytes_per_s / 1e9,
        kind.flops / 1e12,
    )

    assert f"| {kind.name} | {' | '.join(f'{figure:g}' for figure in figures)} |" in text
