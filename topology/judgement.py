"""What is probably not meant once the speeds are known: remarks with bytes and times.

Those that need no speeds are in `plan_warnings.py`.
"""

from collections.abc import Iterator, Sequence
from typing import Final

from vcli.topology.facts import HostFacts
from vcli.topology.groups import GroupKind
from vcli.topology.links import Hardware, LinkClass, worst_class
from vcli.topology.plan import PlanWarning, TopologyPlan
from vcli.topology.traffic import Transfer

#: A kind of group that takes more of a step than this is worth a remark.
_SLOW_STEP_S: Final = 1e-3


def judge_plan(
    plan: TopologyPlan,
    transfers: Sequence[Transfer],
    *,
    hardware: Hardware,
    host: HostFacts | None,
    num_tokens: int,
) -> tuple[PlanWarning, ...]:
    """Remarks on links: sockets, networks, and what they cost in a step of `num_tokens`."""
    found = [
        *_sockets(plan, host),
        *_network(plan, transfers, hardware, num_tokens),
        *_facts(plan, hardware, host),
    ]
    return tuple(PlanWarning(id=id_, message=message) for id_, message in found)


def _sockets(plan: TopologyPlan, host: HostFacts | None) -> Iterator[tuple[str, str]]:
    if host is None or plan.device_type != "cuda" or not plan.nodes:
        return
    node = plan.nodes[plan.config.own_node_rank]
    told = set()
    for rank in node.ranks:
        group = rank.group(GroupKind.TP)
        if group is None or group.size < 2 or group.ranks in told:
            continue
        told.add(group.ranks)
        members = set(group.ranks)
        devices = [
            other.device_index
            for other in node.ranks
            if other.global_rank in members and other.dp_rank == rank.dp_rank
        ]
        link, pair = worst_class(host, devices, LinkClass.NVLINK)
        if link is not LinkClass.SOCKET or pair is None:
            continue
        yield (
            "LINK-05",
            f"TP group {list(group.ranks)} joins GPU {pair[0]} and GPU {pair[1]} over the CPU "
            f"sockets: every sum takes the slowest way; {_closer(host, len(devices))}",
        )


def _closer(host: HostFacts, size: int) -> str:
    """What to do about it: GPUs of one NUMA node, where there are enough."""
    by_node: dict[int, list[int]] = {}
    for gpu in host.gpus:
        if gpu.numa_node is not None:
            by_node.setdefault(gpu.numa_node, []).append(gpu.index)
    for indices in by_node.values():
        if len(indices) >= size:
            order = [*indices, *(g.index for g in host.gpus if g.index not in indices)]
            return f"CUDA_VISIBLE_DEVICES={','.join(map(str, order))} keeps one side together"
    return "lower -tp, or use a pipeline stage for each socket"


def _network(
    plan: TopologyPlan, transfers: Sequence[Transfer], hardware: Hardware, num_tokens: int
) -> Iterator[tuple[str, str]]:
    remedies = {
        GroupKind.EP: (
            "NET-12",
            "experts over the network",
            "keep EP within a node (-dp of one node), or use faster links",
        ),
        GroupKind.DCP: ("NET-12", "shared KV caches over the network", "lower -dcp"),
        GroupKind.TP: ("NET-12", "TP sums over the network", "keep -tp within a node"),
    }
    for transfer in transfers:
        if not transfer.num_network_groups or transfer.kind not in remedies:
            continue
        id_, what, remedy = remedies[transfer.kind]
        if not transfer.num_calls:
            continue
        if transfer.seconds is None or hardware.network is None:
            yield (
                id_,
                f"{what}: {transfer.network_bytes:,} bytes leave a node in a step of "
                f"{num_tokens} token(s); --link SPEED gives the time",
            )
        elif transfer.seconds > _SLOW_STEP_S or transfer.kind is GroupKind.EP:
            yield (
                id_,
                f"{what}: {transfer.network_bytes / 1e6:,.1f} MB leave a node in a step of "
                f"{num_tokens} token(s), about {transfer.seconds * 1e3:.2f} ms over "
                f"{hardware.network.describe()}; {remedy}",
            )


def _facts(
    plan: TopologyPlan, hardware: Hardware, host: HostFacts | None
) -> Iterator[tuple[str, str]]:
    if plan.device_type != "cuda" or host is None:
        return
    if host.gpus and hardware.is_guessed:
        yield (
            "FACT-02",
            f"{host.gpus[0].name!r} is not in the table of GPUs: times are those of "
            f"{hardware.gpu.title if hardware.gpu else 'another'}; --gpu KIND names a near one",
        )
    names = {gpu.name for gpu in host.gpus}
    sizes = {gpu.memory_total_bytes for gpu in host.gpus if gpu.memory_total_bytes}
    if len(names) > 1 or (sizes and max(sizes) > 1.05 * min(sizes)):
        yield (
            "GPU-02",
            f"the GPUs of a node differ ({', '.join(sorted(names))}): the slowest and the "
            "smallest set the pace of every group",
        )
