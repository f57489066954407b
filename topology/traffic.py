"""Bytes that each kind of group moves, per token and per step, and the time that takes.

    TP    per layer two sums of T x D (attention, MLP), one after the embedding; at the end the
          logits of each request are gathered.  A sum of S bytes over n ranks: each sends
          2 (n-1)/n S.
    PP    hidden states and residual, 2 T D, from each rank to its counterpart in the next stage
    EP    with replicas: each token to its k experts and back, 2 T k D (n-1)/n per layer with
          experts.  Without replicas the TP sum carries the experts' output.
    DCP   per layer the queries are gathered and the partial outputs exchanged, 2 (n-1) T q
    PCP   in prefill alone, per layer the keys and values are gathered, (n-1)/n T 2 kv
    DP    nothing: replicas share no tokens

T tokens of a step on one replica, D hidden size, k experts per token, q and kv the widths of the
local query and KV heads.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from vcli.topology.facts import HostFacts
from vcli.topology.groups import GroupKind
from vcli.topology.links import HOP_LATENCY_S, Hardware, LinkClass, worst_class
from vcli.topology.memory import dtype_bytes, local_heads
from vcli.topology.model_spec import ModelSpec
from vcli.topology.padding import cut_sizes
from vcli.topology.placement import world_places
from vcli.topology.plan import TopologyPlan
from vcli.topology.sizes import ParallelSizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """What one rank sends in one step for one kind of group, on the busiest stage.

    `num_calls` counts the collectives (or sends) of a step that follow one another. `link` is the
    slowest way inside any group of the kind; `num_network_groups` groups cross nodes.
    `network_bytes` leave the busiest node in one step. `seconds` is None where they take a network
    of unknown speed.
    """

    kind: GroupKind
    group_size: int
    link: LinkClass
    num_groups: int
    num_network_groups: int
    num_calls: int
    bytes_per_token: int
    bytes_per_step: int
    network_bytes: int
    seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpan:
    """How the groups of one kind lie on nodes and links."""

    size: int
    num_groups: int
    num_network_groups: int
    link: LinkClass
    ranks_per_node: int
    groups_on_busiest_node: int


def group_bytes(
    kind: GroupKind, spec: ModelSpec, parallel: ParallelSizes, *, dtype: str, num_tokens: int
) -> tuple[int, int]:
    """(bytes that one rank sends, calls) in a decode step of `num_tokens` on the busiest stage."""
    number = dtype_bytes(dtype)
    hidden = num_tokens * spec.hidden_size * number
    num_layers = -(-spec.num_layers // parallel.pp)
    if kind is GroupKind.TP and parallel.tp > 1:
        calls = 2 * num_layers + 1
        summed = calls * 2 * hidden * (parallel.tp - 1) // parallel.tp
        rows = cut_sizes(spec, parallel).vocab_size // parallel.tp
        logits = num_tokens * rows * number * (parallel.tp - 1)
        return summed + logits, calls + 1
    if kind is GroupKind.PP and parallel.pp > 1:
        return 2 * hidden, 1
    if kind is GroupKind.EP and parallel.use_all2all and spec.moe is not None:
        sparse = sum(spec.moe.is_sparse_layer(layer) for layer in range(spec.num_layers))
        sparse = -(-sparse // parallel.pp)
        n = parallel.expert_parallel_size
        # Each TP rank sends its share of the replica's tokens.
        routed = hidden * spec.moe.num_experts_per_token // parallel.tp
        return sparse * 2 * routed * (n - 1) // n, 2 * sparse
    if kind is GroupKind.DCP and parallel.dcp > 1:
        query = local_heads(spec, parallel.tp).num_heads * spec.head_size * number
        return num_layers * 2 * (parallel.dcp - 1) * num_tokens * query, 2 * num_layers
    return 0, 0


def group_span(
    plan: TopologyPlan,
    kind: GroupKind,
    groups: Sequence[Sequence[int]],
    host: HostFacts | None,
    near: LinkClass,
) -> GroupSpan:
    """Where the groups of one torch world run."""
    node_of, device_of = world_places(plan.config)
    crossing, per_node = 0, 1
    link, seen = near, set[tuple[int, ...]]()
    on_node = Counter[int]()
    for ranks in groups:
        distinct = set(map(node_of.__getitem__, ranks))
        per_node = max(per_node, -(-len(ranks) // len(distinct)))
        if len(distinct) > 1:
            crossing += 1
            on_node.update(distinct)
            continue
        devices = tuple(map(device_of.__getitem__, ranks))
        if len(devices) > 1 and devices not in seen:
            seen.add(devices)
            found, _ = worst_class(host, devices, near)
            link = max(link, found, key=list(LinkClass).index)
    return GroupSpan(
        size=len(groups[0]),
        num_groups=len(groups),
        num_network_groups=crossing,
        link=LinkClass.NETWORK if crossing else link,
        ranks_per_node=per_node,
        groups_on_busiest_node=max(on_node.values(), default=0),
    )


def transfer_seconds(
    kind: GroupKind,
    span: GroupSpan,
    *,
    num_bytes: int,
    num_calls: int,
    hardware: Hardware,
) -> float | None:
    """Time of one step's collectives: a latency per call, and the bytes over the slowest link.

    None where that is a network of unknown speed.
    """
    if not num_calls or span.size < 2:
        return 0.0
    speed = hardware.link_bytes_per_s(span.link)
    if not speed:
        return None
    hops = HOP_LATENCY_S[span.link]
    if kind is not GroupKind.PP:
        # A sum goes there and back; more ranks add little, more nodes a hop each time they double.
        inside = min(span.size, span.ranks_per_node)
        doublings = max(0, (inside - 1).bit_length() - 1)
        hops = 2 * HOP_LATENCY_S[hardware.near] * (1 + 0.25 * doublings)
        if span.link is LinkClass.NETWORK:
            nodes = -(-span.size // span.ranks_per_node)
            hops += 2 * HOP_LATENCY_S[LinkClass.NETWORK] * (nodes - 1).bit_length()
        elif span.link is not hardware.near:
            hops *= HOP_LATENCY_S[span.link] / HOP_LATENCY_S[hardware.near]
    if span.link is LinkClass.NETWORK:
        num_bytes = network_bytes(kind, span, num_bytes)
    return num_calls * hops + num_bytes / speed


def network_bytes(kind: GroupKind, span: GroupSpan, num_bytes: int) -> int:
    """Bytes that leave the busiest node, where each rank sends `num_bytes`.

    A ring leaves a node once per group; point-to-point and all-to-all traffic leaves with each
    rank, all-to-all only as far as the peers are elsewhere.
    """
    if span.link is not LinkClass.NETWORK:
        return 0
    if kind is GroupKind.EP:
        away = (span.size - span.ranks_per_node) / max(span.size - 1, 1)
        return int(num_bytes * away * span.ranks_per_node * span.groups_on_busiest_node)
    return num_bytes * span.groups_on_busiest_node


def plan_traffic(
    plan: TopologyPlan,
    *,
    hardware: Hardware,
    host: HostFacts | None = None,
    num_tokens: int = 1,
) -> tuple[Transfer, ...]:
    """What every kind of group with more than one rank moves in a decode step of `num_tokens`.

    `num_tokens` counts those of one replica. Without a model the bytes are 0 and only the links
    are told.
    """
    transfers = []
    for kind, groups in plan.group_table:
        if len(groups[0]) < 2 or kind is GroupKind.EPLB:
            continue
        span = group_span(plan, kind, groups, host, hardware.near)
        per_token = per_step = calls = 0
        if plan.model is not None:
            dtype = plan.dtype or plan.model.dtype
            sizes = plan.config
            per_token, _ = group_bytes(kind, plan.model, sizes, dtype=dtype, num_tokens=1)
            per_step, calls = group_bytes(
                kind, plan.model, sizes, dtype=dtype, num_tokens=num_tokens
            )
        transfers.append(
            Transfer(
                kind=kind,
                group_size=span.size,
                link=span.link,
                num_groups=span.num_groups * plan.worlds,
                num_network_groups=span.num_network_groups * plan.worlds,
                num_calls=calls,
                bytes_per_token=per_token,
                bytes_per_step=per_step,
                network_bytes=network_bytes(kind, span, per_step),
                seconds=transfer_seconds(
                    kind, span, num_bytes=per_step, num_calls=calls, hardware=hardware
                ),
            )
        )
    return tuple(transfers)
