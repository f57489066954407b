"""What works but is probably not meant: remarks on a plan.

Ids are those of doctor's checks where one tells more, else `PLAN-nn`.
"""

from collections.abc import Iterator, Sequence

from vcli.topology.facts import HostFacts, ProcessFacts
from vcli.topology.hardware import gpus_without
from vcli.topology.model_spec import ModelSpec
from vcli.topology.plan import NodePlan, PlanWarning, TopologyPlan

_GIB = 1024**3
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def find_warnings(
    plan: TopologyPlan, host: HostFacts | None, process: ProcessFacts
) -> tuple[PlanWarning, ...]:
    """All remarks, layout first, then this host."""
    found = [*_layout(plan), *_shape(plan), *_experts(plan), *_start(plan, process)]
    if host is not None and plan.nodes:
        own = plan.config.own_node_rank
        node = next(node for node in plan.nodes if node.node_rank == own)
        found += [*_cpus(plan, node, host), *_gpus(plan, node, host), *_memory(plan, node, host)]
    return tuple(PlanWarning(id=id_, message=message) for id_, message in found)


def _layout(plan: TopologyPlan) -> Iterator[tuple[str, str]]:
    config = plan.config
    local = config.local_world_size
    if local % config.tp:
        remedy = "lower --tensor-parallel-size"
        if config.pcp == 1:
            remedy = (
                f"--tensor-parallel-size {local} --pipeline-parallel-size "
                f"{config.world_size // local} keeps them inside"
            )
        yield (
            "RDV-09",
            f"TP groups of {config.tp} span nodes, which have {local} rank(s) of a replica each: "
            f"every layer waits for the network; {remedy}",
        )
    if plan.nodes:
        output_node = config.output_rank // config.local_world_size
        if output_node:
            yield (
                "PLAN-01",
                f"output rank {config.output_rank} of a replica is on its node {output_node}: the "
                "result of each step crosses the network",
            )
    if config.nnodes > 1 and config.master_addr in _LOOPBACK:
        yield (
            "PLAN-04",
            f"master_addr={config.master_addr} is reached from this host only, the plan has "
            f"{config.nnodes} nodes; --master-addr with an address of node 0",
        )
    if config.num_hosts > config.nnodes:
        yield (
            "PLAN-02",
            f"data_parallel_size_local={config.local_data_parallel_size} of {config.dp} replicas: "
            f"{config.num_hosts - 1} more instance(s) must be started for the others",
        )
    num_kv_heads = plan.model.cut.num_kv_heads if plan.model else config.tp
    if config.tp > num_kv_heads:
        copies = config.tp // num_kv_heads
        if config.dcp < copies:
            yield (
                "PLAN-03",
                f"{num_kv_heads} KV heads on {config.tp} TP ranks: each is stored "
                f"{copies} times, so the KV cache does not shrink beyond {num_kv_heads} ranks",
            )


def _shape(plan: TopologyPlan) -> Iterator[tuple[str, str]]:
    """What the model's own numbers make of these sizes."""
    padding = plan.head_padding
    if padding is not None:
        yield (
            "PLAN-05",
            f"{padding.num_heads} query and {padding.num_kv_heads} KV heads do not divide by "
            f"{plan.config.tp} TP ranks: padded with zero heads to {padding.padded_heads} and "
            f"{padding.padded_kv_heads}, KV cache x{padding.kv_growth:.2f} over all ranks",
        )
    others = _padded_sizes(plan.model) if plan.model else []
    if others:
        yield (
            "PLAN-05",
            f"{', '.join(others)}: padded with zeros to divide by {plan.config.tp} TP ranks",
        )
    counts = [end - start for start, end in plan.layer_spans or ()]
    if counts and max(counts) > min(counts):
        loss = 1 - sum(counts) / (len(counts) * max(counts))
        # One layer more or less cannot be helped; what it costs is worth a word above a twentieth.
        if loss > 0.05:
            yield (
                "PLAN-06",
                f"stages of {min(counts)} to {max(counts)} layers: the longest sets the pace, "
                f"{loss:.0%} of the others' time is waiting; a --pipeline-parallel-size that "
                f"divides {sum(counts)} layers, or --pp-layer-partition",
            )


def _padded_sizes(model: ModelSpec) -> list[str]:
    """`vocab_size 49152 to 49200` for each that isn't a number of heads."""
    own, cut = model.own_sizes, model.cut
    sizes = (
        ("vocab_size", own.vocab_size, cut.vocab_size),
        ("intermediate_size", own.intermediate_size, cut.intermediate_size),
        ("moe_intermediate_size", own.moe_intermediate_size, cut.moe_intermediate_size),
    )
    return [f"{name} {before} to {after}" for name, before, after in sizes if before != after]


def _experts(plan: TopologyPlan) -> Iterator[tuple[str, str]]:
    config = plan.config
    if config.enable_expert_parallel and not config.is_moe:
        yield (
            "FIT-02",
            "--enable-expert-parallel has no effect without experts: give a model, or --moe to "
            "plan for one",
        )
    if plan.experts is not None:
        held = [len(experts) for experts in plan.experts.experts_of_rank]
        if max(held) > min(held):
            yield (
                "PLAN-08",
                f"EP ranks hold {min(held)} to {max(held)} experts each: those with more set the "
                "pace; an EP size that divides the experts, or --num-redundant-experts",
            )
    if config.enable_eplb and plan.device_type == "cpu":
        yield "FIT-02", "--enable-eplb needs GPUs to move experts between"


def _start(plan: TopologyPlan, process: ProcessFacts) -> Iterator[tuple[str, str]]:
    wanted = plan.config.start_method
    if wanted not in (None, "auto", plan.start_method.value):
        yield "PROC-01", "; ".join(plan.start_method.reasons)
    if plan.start_method.value == "spawn" and process.main_has_guard is False:
        yield (
            "PROC-04",
            "the main module has no `if __name__ == '__main__':` guard, so each child would start "
            "everything again",
        )


def _cpus(plan: TopologyPlan, node: NodePlan, host: HostFacts) -> Iterator[tuple[str, str]]:
    if len(node.ranks) > host.cpu_count:
        yield (
            "NUMA-05",
            f"{len(node.ranks)} ranks on {host.cpu_count} usable CPU(s) of {host.hostname} take "
            "turns",
        )
    total = plan.omp_num_threads.value * len(node.ranks)
    if total > host.cpu_count >= len(node.ranks):
        yield (
            "NUMA-06",
            f"OMP_NUM_THREADS={plan.omp_num_threads.value} for {len(node.ranks)} rank(s) is more "
            f"than the {host.cpu_count} usable CPU(s)",
        )


def _gpus(plan: TopologyPlan, node: NodePlan, host: HostFacts) -> Iterator[tuple[str, str]]:
    if plan.device_type != "cuda":
        return
    if host.gpus and len(node.ranks) > len(host.gpus):
        yield (
            "GPU-01",
            f"node {node.node_rank} has {len(node.ranks)} ranks for {len(host.gpus)} GPU(s)",
        )
    if plan.memory is None:
        return
    used = {rank.device_index for rank in node.ranks}
    lack = gpus_without(plan.memory.dtype, [gpu for gpu in host.gpus if gpu.index in used])
    if lack:
        yield "FIT-06", f"{lack[0]}; --dtype {lack[1]}"
    for gpu in host.gpus:
        if gpu.memory_total_bytes and plan.memory.max_weight_bytes > gpu.memory_total_bytes:
            yield (
                "FIT-04",
                f"weights of {plan.memory.max_weight_bytes / _GIB:.1f} GiB per rank do not fit "
                f"GPU {gpu.index} with {gpu.memory_total_bytes / _GIB:.1f} GiB; raise "
                "--tensor-parallel-size or --pipeline-parallel-size",
            )
            return


def compare_hosts(hosts: Sequence[HostFacts], num_local_ranks: int) -> tuple[PlanWarning, ...]:
    """Remarks on nodes that differ; `hosts` are in the order of the nodes."""
    found: list[PlanWarning] = []
    first = hosts[0]
    for index, host in enumerate(hosts[1:], start=1):
        differences = [
            f"{name} {theirs} against {ours}"
            for name, ours, theirs in (
                ("GPUs", len(first.gpus), len(host.gpus)),
                ("CPUs", first.cpu_count, host.cpu_count),
                ("GPU", _gpu_names(first), _gpu_names(host)),
                ("driver", first.driver_version, host.driver_version),
                ("network Mbit/s", _fastest_nic(first), _fastest_nic(host)),
            )
            if ours != theirs
        ]
        if differences:
            found.append(
                PlanWarning(
                    id="PLAN-07",
                    message=f"node {index} ({host.hostname}) differs from node 0 "
                    f"({first.hostname}): {', '.join(differences)}; each node gets "
                    f"{num_local_ranks} rank(s), the weakest sets the pace",
                )
            )
    return tuple(found)


def _gpu_names(host: HostFacts) -> str:
    return "/".join(sorted({gpu.name for gpu in host.gpus})) or "none"


def _fastest_nic(host: HostFacts) -> int:
    return max((nic.speed_mbit or 0 for nic in host.nics if not nic.is_loopback), default=0)


def _memory(plan: TopologyPlan, node: NodePlan, host: HostFacts) -> Iterator[tuple[str, str]]:
    usable = host.usable_memory_bytes
    if usable is None:
        return
    need = node.ring_bytes
    what = "the control plane's rings"
    if plan.memory and plan.device_type == "cpu":
        by_rank = {(item.dp_rank, item.rank): item.weight_bytes for item in plan.memory.ranks}
        need += sum(by_rank[rank.dp_rank, rank.rank] for rank in node.ranks)
        what = "weights and rings"
    if need > usable:
        yield (
            "HOST-05",
            f"{what} of node {node.node_rank} need {need / _GIB:.1f} GiB, {host.hostname} has "
            f"{usable / _GIB:.1f} GiB available",
        )
