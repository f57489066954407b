"""The plan as the document `vcli.topo/1`: plain values, the same for the same plan."""

from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import Any, Final

from vcli.topology.decision import Decision
from vcli.topology.plan import NodePlan, RankPlan, TopologyPlan
from vcli.topology.rendezvous import RendezvousSpec

SCHEMA: Final = "vcli.topo/1"


def plan_to_json(plan: TopologyPlan) -> dict[str, Any]:
    """Everything in the plan under the names that other tools know."""
    config = plan.config
    totals = plan.totals
    return {
        "schema": SCHEMA,
        "config": asdict(config),
        "device_type": plan.device_type,
        "world_size": plan.world_size,
        "world_size_across_dp": plan.world_size_across_dp,
        "torch_world": plan.torch_world,
        "worlds": plan.worlds,
        "output_rank": plan.output_rank,
        "default_backend": plan.backend.value,
        "rendezvous": plan.rendezvous.value.url,
        "start_method": plan.start_method.value,
        "data_parallel_size_local": config.local_data_parallel_size,
        "dp_group_note": _dp_group_note(plan),
        "use_all2all": config.use_all2all,
        "groups": {kind: [list(ranks) for ranks in groups] for kind, groups in plan.groups.items()},
        "nodes": [_node(node) for node in plan.nodes] if plan.nodes else None,
        "totals": asdict(totals) if totals else None,
        "helpers": [asdict(helper) for helper in plan.helpers],
        "ring_bytes": plan.ring_bytes,
        "layer_spans": [list(span) for span in plan.layer_spans] if plan.layer_spans else None,
        "memory": _memory(plan),
        "head_padding": asdict(plan.head_padding) if plan.head_padding else None,
        "cut_sizes": asdict(plan.model.cut) if plan.model else None,
        "experts_of_ep_rank": [list(held) for held in plan.experts.experts_of_rank]
        if plan.experts
        else None,
        "ports": [asdict(port) for port in plan.ports],
        "decisions": [_decision(decision) for decision in plan.decisions],
        "warnings": [asdict(warning) for warning in plan.warnings],
        "fingerprint": plan.fingerprint(),
    }


def _dp_group_note(plan: TopologyPlan) -> str | None:
    if plan.worlds == 1:
        return None
    return (
        f"dense data parallelism: {plan.worlds} independent worlds; the groups are those of one "
        "replica"
    )


def _node(node: NodePlan) -> dict[str, Any]:
    return {
        "node_rank": node.node_rank,
        "nnodes_within_dp": node.nnodes_within_dp,
        "node_rank_within_dp": node.node_rank_within_dp,
        "local_world_size": node.local_world_size,
        "dp_start_rank": node.dp_start_rank,
        "role": str(node.role),
        "launcher_process": node.counts.supervisor_or_launcher,
        "api_servers": node.counts.api_servers,
        "engine_cores": node.counts.engine_cores,
        "workers": node.counts.workers,
        "coordinator": node.counts.coordinator,
        "total_processes": node.counts.all,
        "ranks": [_rank(rank) for rank in node.ranks],
        "processes": [asdict(row) for row in node.processes],
        "shm_ring_bytes": node.ring_bytes,
        "channels": [asdict(channel) for channel in node.channels],
        "descriptors": node.descriptors,
    }


def _rank(rank: RankPlan) -> dict[str, Any]:
    return {
        "global_rank": rank.global_rank,
        "dp_index": rank.dp_rank,
        "rank": rank.rank,
        "local_rank": rank.local_rank,
        "gpu_index": rank.device_index,
        "gpu_visible_index": rank.visible_index,
        "gpu_physical_index": rank.physical_index,
        "gpu_uuid": rank.device_uuid or None,
        "driver": rank.is_driver,
        "output": rank.is_output,
        "pp_rank": rank.pp_rank,
        "pcp_rank": rank.pcp_rank,
        "tp_rank": rank.tp_rank,
        "numa_node": rank.numa_node,
        "nic": rank.nic,
        "nic_way": rank.nic_way,
        "layer_span": list(rank.layer_span) if rank.layer_span else None,
        "omp_num_threads": rank.omp_num_threads,
        "title": rank.title,
    }


def _memory(plan: TopologyPlan) -> dict[str, Any] | None:
    if plan.memory is None:
        return None
    return {
        "dtype": plan.memory.dtype,
        "num_parameters": plan.memory.num_parameters,
        "max_weight_bytes": plan.memory.max_weight_bytes,
        "ranks": [asdict(rank) for rank in plan.memory.ranks],
    }


def _decision(decision: Decision[object]) -> dict[str, Any]:
    return {
        "name": decision.name,
        "value": _plain(decision.value),
        "reasons": list(decision.reasons),
    }


def _plain(value: object) -> Any:
    if isinstance(value, RendezvousSpec):
        return value.url
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return value
