"""Config and facts in, one frozen plan out: the only place where the pieces are put together."""

from collections.abc import Mapping
from dataclasses import replace

from vcli.topology.allreduce import decide_all_reduce
from vcli.topology.attention import AUTO, check_attention_backend, decide_attention_backend
from vcli.topology.backend import choose_backend
from vcli.topology.channels import descriptors_needed, node_channels
from vcli.topology.config import ParallelConfig
from vcli.topology.decision import Decision
from vcli.topology.experts import ExpertMap, place_experts
from vcli.topology.facts import HostFacts, ProcessFacts
from vcli.topology.groups import GroupKind, Groups, build_groups, group_memberships
from vcli.topology.layers import layer_ranges
from vcli.topology.links import nearest_nic
from vcli.topology.memory import check_model_fits
from vcli.topology.model_spec import ModelSpec
from vcli.topology.names import titled
from vcli.topology.numa import decide_numa_binding
from vcli.topology.omp import decide_omp_num_threads
from vcli.topology.padding import HeadPadding, head_padding, pad_model
from vcli.topology.placement import (
    RankPlacement,
    check_devices,
    max_ranks_on_a_node,
    place_ranks,
)
from vcli.topology.plan import NodePlan, PortPlan, RankPlan, TopologyPlan, sum_totals
from vcli.topology.plan_memory import plan_memory
from vcli.topology.plan_warnings import find_warnings
from vcli.topology.processes import (
    count_processes,
    helper_processes,
    node_processes,
    node_ring_bytes,
    node_role,
)
from vcli.topology.rendezvous import RendezvousSpec, choose_rendezvous
from vcli.topology.start_method import decide_start_method

__all__ = ["TopologyPlan", "plan_topology"]


def plan_topology(
    config: ParallelConfig,
    *,
    host: HostFacts | None = None,
    process: ProcessFacts | None = None,
    model: ModelSpec | None = None,
    dtype: str | None = None,
    device_type: str = "cpu",
    flashinfer_available: bool = False,
    attention_backend: str = AUTO,
    is_own_node_only: bool = False,
) -> TopologyPlan:
    """The plan of a deployment, or of its own node alone, which is all that its warnings need.

    Without `host` nothing is refused because of hardware; all nodes are taken to be like it. The
    `model` has experts or not, and a type unless `dtype` is given; what TP cannot cut is padded.

    Raises:
        ConfigError: an unknown name, or a model that cannot be cut or computed like this.
        PlacementError: the host has too few devices.
    """
    process = process or ProcessFacts()
    config, model, dtype = _fit_model(config, model, dtype)
    backend = choose_backend(config, process)
    start_method = decide_start_method(process, config.start_method)
    rendezvous, placements = choose_rendezvous(config), place_ranks(config)
    is_external = config.external_data_parallel_size > 1
    if device_type == "cuda" and host and not (is_external or backend.value == "ray"):
        check_devices(max_ranks_on_a_node(placements), host)
    omp_num_threads = _omp_num_threads(max_ranks_on_a_node(placements), host, process)
    groups, spans = build_groups(config), _layer_spans(config, model)
    kept = _of_own_node(config, placements) if is_own_node_only else placements
    ranks = _rank_plans(config, kept, groups, spans, omp_num_threads.value, host=host)
    ranks, numa_binding = _bind_ranks(config, ranks, host, device_type)
    nodes = () if is_external else _node_plans(config, backend.value, ranks, device_type)
    plan = TopologyPlan(
        config=config,
        device_type=device_type,
        dtype=dtype,
        model=model,
        backend=backend,
        start_method=start_method,
        rendezvous=rendezvous,
        all_reduce=_all_reduce(config, device_type, host),
        attention=_attention(attention_backend, model, dtype, device_type, flashinfer_available),
        omp_num_threads=omp_num_threads,
        group_table=tuple(groups.items()),
        ranks=ranks,
        nodes=nodes,
        totals=None if is_external else sum_totals(node.counts for node in nodes),
        helpers=helper_processes(start_method.value, len(nodes)),
        ports=_ports(config, rendezvous.value),
        layer_spans=spans,
        memory=plan_memory(config, ranks, model, dtype) if model else None,
        warnings=(),
        experts=_experts(config, model),
        head_padding=_padded_heads(config, model),
        numa_binding=numa_binding,
    )
    return replace(plan, warnings=find_warnings(plan, host, process))


def _of_own_node(
    config: ParallelConfig, placements: tuple[RankPlacement, ...]
) -> tuple[RankPlacement, ...]:
    own = config.own_node_rank
    return tuple(place for place in placements if place.node_rank == own)


def _fit_model(
    config: ParallelConfig, model: ModelSpec | None, dtype: str | None
) -> tuple[ParallelConfig, ModelSpec | None, str | None]:
    """The deployment of the model, the model as it is cut, and the type it computes in."""
    if model is None:
        return config, None, dtype
    config = replace(config, is_moe=model.is_moe)
    check_model_fits(model, config)
    return config, pad_model(model, config), dtype or model.dtype


def _padded_heads(config: ParallelConfig, model: ModelSpec | None) -> HeadPadding | None:
    padding = head_padding(model, config.tp) if model else None
    return padding if padding and padding.is_padded else None


def _experts(config: ParallelConfig, model: ModelSpec | None) -> ExpertMap | None:
    if model is None or model.moe is None or not config.enable_expert_parallel:
        return None
    physical = model.moe.num_experts + config.num_redundant_experts
    return place_experts(physical, config.expert_parallel_size)


def _omp_num_threads(
    num_local_ranks: int, host: HostFacts | None, process: ProcessFacts
) -> Decision[int]:
    return decide_omp_num_threads(
        num_cpus=(host or HostFacts()).cpu_count,
        num_local_workers=num_local_ranks,
        requested=process.omp_num_threads,
    )


def _all_reduce(
    config: ParallelConfig, device_type: str, host: HostFacts | None
) -> Decision[tuple[str, ...]]:
    # TP groups are runs of neighbouring ranks, so they stay on a node if they divide its ranks.
    return decide_all_reduce(
        device_type=device_type,
        group_size=config.tp,
        is_within_node=config.local_world_size % config.tp == 0,
        devices=tuple(range(config.local_world_size * config.node_data_parallel_size)),
        host=host,
    )


def _attention(
    requested: str,
    model: ModelSpec | None,
    dtype: str | None,
    device_type: str,
    flashinfer_available: bool,
) -> Decision[str] | None:
    if requested != AUTO:
        check_attention_backend(requested)
    if model is None:
        return None
    return decide_attention_backend(
        device_type=device_type,
        dtype=dtype or model.dtype,
        head_size=model.head_size,
        flashinfer_available=flashinfer_available,
        requested=requested,
    )


def _layer_spans(
    config: ParallelConfig, model: ModelSpec | None
) -> tuple[tuple[int, int], ...] | None:
    if model is None:
        return None
    ranges = layer_ranges(model.num_layers, config.pp, config.pp_layer_partition)
    return tuple((layers.start, layers.stop) for layers in ranges)


def _rank_plans(
    config: ParallelConfig,
    placements: tuple[RankPlacement, ...],
    groups_by_kind: Mapping[GroupKind, Groups],
    spans: tuple[tuple[int, int], ...] | None,
    omp_num_threads: int,
    *,
    host: HostFacts | None,
) -> tuple[RankPlan, ...]:
    memberships = group_memberships(groups_by_kind, {place.global_rank for place in placements})
    dp, pp, pcp, tp, dcp = config.dp, config.pp, config.pcp, config.tp, config.dcp
    ep, output_rank = config.expert_parallel_size, config.output_rank
    by_index = {gpu.index: gpu for gpu in (host.gpus if host else ())}
    nics = {index: nearest_nic(gpu, host) for index, gpu in by_index.items()} if host else {}
    plans = []
    for place in placements:
        pp_rank, in_stage = divmod(place.rank, pcp * tp)
        pcp_rank, tp_rank = divmod(in_stage, tp)
        groups = memberships[place.global_rank]
        in_group = {group.kind: group.rank_in_group for group in groups}
        nic = nics.get(place.device_index)
        gpu = by_index.get(place.device_index)
        # The devices of other nodes have numbers and names of their own.
        own = gpu if place.node_rank == config.own_node_rank else None
        title = titled(
            "Worker",
            ("DP", place.dp_rank, dp),
            ("PP", pp_rank, pp),
            ("PCP", pcp_rank, pcp),
            ("TP", tp_rank, tp),
            ("DCP", in_group[GroupKind.DCP], dcp),
            ("EP", in_group.get(GroupKind.EP, 0), ep),
        )
        plans.append(
            RankPlan(
                rank=place.rank,
                global_rank=place.global_rank,
                external_dp_rank=place.external_dp_rank,
                dp_rank=place.dp_rank,
                pp_rank=pp_rank,
                pcp_rank=pcp_rank,
                tp_rank=tp_rank,
                node_rank=place.node_rank,
                local_rank=place.local_rank,
                device_index=place.device_index,
                numa_node=gpu.numa_node if gpu else None,
                is_driver=tp_rank == 0,
                is_output=place.rank == output_rank,
                layer_span=spans[pp_rank] if spans else None,
                title=title,
                groups=groups,
                omp_num_threads=omp_num_threads,
                nic=nic[0].name if nic else None,
                nic_way=nic[1] if nic else None,
                visible_index=own.visible_index if own else None,
                physical_index=own.physical_index if own else None,
                device_uuid=own.uuid if own else "",
            )
        )
    return tuple(plans)


def _bind_ranks(
    config: ParallelConfig, ranks: tuple[RankPlan, ...], host: HostFacts | None, device_type: str
) -> tuple[tuple[RankPlan, ...], Decision[str] | None]:
    if not config.numa_bind:
        return ranks, None
    nodes, decision = decide_numa_binding(
        host=host,
        device_nodes=[rank.numa_node for rank in ranks],
        local_ranks=[rank.local_rank for rank in ranks],
        device_type=device_type,
    )
    bound = zip(ranks, nodes, strict=True)
    return tuple(replace(rank, bound_numa_node=node) for rank, node in bound), decision


def _node_plans(
    config: ParallelConfig, backend: str, ranks: tuple[RankPlan, ...], device_type: str
) -> tuple[NodePlan, ...]:
    ranks_of_node: dict[int, list[RankPlan]] = {}
    for rank in ranks:
        ranks_of_node.setdefault(rank.node_rank, []).append(rank)
    nodes = []
    for node_rank, listed in sorted(ranks_of_node.items()):
        local_ranks = tuple(listed)
        processes = node_processes(config, backend, node_rank, local_ranks)
        ring_bytes = node_ring_bytes(backend, local_ranks)
        nodes.append(
            NodePlan(
                node_rank=node_rank,
                nnodes_within_dp=config.nnodes_within_dp,
                node_rank_within_dp=node_rank % config.nnodes_within_dp,
                local_world_size=config.local_world_size,
                dp_start_rank=config.first_data_parallel_rank_of(node_rank),
                role=node_role(config, node_rank),
                counts=count_processes(processes),
                processes=processes,
                ranks=local_ranks,
                ring_bytes=ring_bytes,
                channels=node_channels(processes, local_ranks, ring_bytes),
                descriptors=descriptors_needed(processes, local_ranks, device_type),
            )
        )
    return tuple(nodes)


def _ports(config: ParallelConfig, rendezvous: RendezvousSpec) -> tuple[PortPlan, ...]:
    ports = []
    if config.nnodes > 1:
        ports.append(
            PortPlan(
                name="control",
                node_rank=0,
                host=config.master_addr,
                port=config.master_port + 1,
                purpose="nodes join here and compare their plans",
                bound_by="the launcher on node 0",
            )
        )
    if rendezvous.scheme == "tcp":
        ports.append(
            PortPlan(
                name="rendezvous",
                node_rank=0,
                host=rendezvous.host,
                port=rendezvous.port,
                purpose="store of the torch world",
                bound_by="rank 0",
            )
        )
    return tuple(ports)
