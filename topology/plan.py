"""The plan of a deployment as data: every rank, group, process, port and byte of a launch."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from vcli.topology.config import ParallelConfig
from vcli.topology.decision import Decision
from vcli.topology.errors import PlacementError
from vcli.topology.experts import ExpertMap
from vcli.topology.groups import GroupKind, GroupMembership, Groups
from vcli.topology.model_spec import ModelSpec
from vcli.topology.padding import HeadPadding
from vcli.topology.rendezvous import RendezvousSpec

#: Flags that may differ between the nodes of one deployment.
_LOCAL_FIELDS = (
    "node_rank",
    "headless",
    "data_parallel_rank",
    "master_addr",
    "start_method",
    "numa_bind",
    "api_server_count",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """One rank: what it is, where it runs, what it holds.

    `rank` counts within its replica, `global_rank` within its torch world (equal unless replicas
    share a world); the ranks of `groups` are global ones. `local_rank` counts the ranks of the
    replica on its node. `device_index` is the device as its process numbers it (cuda:i),
    `visible_index` its place in the user's CUDA_VISIBLE_DEVICES, `physical_index` NVML's number and
    `device_uuid` its name; these three are known for the ranks of this node only. `layer_span` is
    [start, end), None without a model. `nic` is the adapter nearest to the device and `nic_way` the
    way to it, as `nvidia-smi topo` writes it.
    """

    rank: int
    global_rank: int
    external_dp_rank: int
    dp_rank: int
    pp_rank: int
    pcp_rank: int
    tp_rank: int
    node_rank: int
    local_rank: int
    device_index: int
    numa_node: int | None
    is_driver: bool
    is_output: bool
    layer_span: tuple[int, int] | None
    title: str
    groups: tuple[GroupMembership, ...]
    omp_num_threads: int
    nic: str | None = None
    nic_way: str | None = None
    bound_numa_node: int | None = None
    """The NUMA node that the process is kept on; None: it is free."""
    visible_index: int | None = None
    physical_index: int | None = None
    device_uuid: str = ""

    def group(self, kind: GroupKind | str) -> GroupMembership | None:
        """The group of this kind that the rank belongs to; None where the plan has no such kind."""
        return next((group for group in self.groups if group.kind == kind), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRow:
    """One process on a node; `parent` is the title of the process that starts it, "" for none.

    `kind`: supervisor, follower, headless, api_server, engine_core, coordinator or worker.
    """

    title: str
    kind: str
    parent: str
    dp_rank: int | None = None
    rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessTotals:
    """Number of processes by kind."""

    supervisor_or_launcher: int = 0
    api_servers: int = 0
    engine_cores: int = 0
    workers: int = 0
    coordinator: int = 0

    @property
    def all(self) -> int:
        """All of them."""
        return (
            self.supervisor_or_launcher
            + self.api_servers
            + self.engine_cores
            + self.workers
            + self.coordinator
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelPlan:
    """`count` sockets, pipes or memory files of one kind on a node."""

    name: str
    count: int
    purpose: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlan:
    """One node.

    `ring_bytes` is the shared memory of the control plane on it, `descriptors` the open files that
    its busiest process needs.
    """

    node_rank: int
    nnodes_within_dp: int
    node_rank_within_dp: int
    local_world_size: int
    dp_start_rank: int
    role: str
    counts: ProcessTotals
    processes: tuple[ProcessRow, ...]
    ranks: tuple[RankPlan, ...]
    ring_bytes: int
    channels: tuple[ChannelPlan, ...] = ()
    descriptors: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HelperPlan:
    """A process beside those of the deployment: the fork server."""

    title: str
    node_rank: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PortPlan:
    """A port that must be free on a node and reachable from the others; 0 is any free one.

    `bound_by` is the title of the process that listens there.
    """

    name: str
    node_rank: int
    host: str
    port: int
    purpose: str
    bound_by: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanWarning:
    """What works but is probably not meant; `id` is that of the check which tells more."""

    id: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes of one rank, as far as they follow from the model's shape."""

    rank: int
    dp_rank: int
    num_parameters: int
    weight_bytes: int
    kv_bytes_per_token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes of the plan's ranks; `num_parameters` is the whole model's.

    `max_weight_bytes` are the weights of the fullest rank of all.
    """

    dtype: str
    num_parameters: int
    max_weight_bytes: int
    ranks: tuple[RankMemory, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TopologyPlan:
    """What will be started, where, and why; printed by `vcli topo`, obeyed by the runtime.

    `model` is the model as it is cut: `model.cut` are the sizes that TP ranks share, padded where
    they do not divide; `head_padding` is what that means for the heads, None if nothing. `experts`
    is the placement in each EP group. `ranks` are ordered by external copy, replica and rank.
    `nodes` is empty and `totals` None where a trainer places the processes
    (`external_data_parallel_size` > 1). What is planned for one node alone has no others in
    `ranks`, `nodes` and `totals`.
    """

    config: ParallelConfig
    device_type: str
    dtype: str | None
    model: ModelSpec | None
    backend: Decision[str]
    start_method: Decision[str]
    rendezvous: Decision[RendezvousSpec]
    all_reduce: Decision[tuple[str, ...]]
    attention: Decision[str] | None
    omp_num_threads: Decision[int]
    group_table: tuple[tuple[GroupKind, Groups], ...]
    ranks: tuple[RankPlan, ...]
    nodes: tuple[NodePlan, ...]
    totals: ProcessTotals | None
    helpers: tuple[HelperPlan, ...]
    ports: tuple[PortPlan, ...]
    layer_spans: tuple[tuple[int, int], ...] | None
    memory: MemoryPlan | None
    warnings: tuple[PlanWarning, ...]
    experts: ExpertMap | None = None
    head_padding: HeadPadding | None = None
    numa_binding: Decision[str] | None = None
    """None unless asked for; the ranks have their nodes."""

    @property
    def decisions(self) -> tuple[Decision[object], ...]:
        """Every choice with its reasons."""
        always: tuple[Decision[object], ...] = (
            self.backend,
            self.start_method,
            self.rendezvous,
            self.all_reduce,
            self.omp_num_threads,
        )
        sometimes = (self.attention, self.numa_binding)
        return (*always, *(decision for decision in sometimes if decision is not None))

    @property
    def world_size(self) -> int:
        """Ranks of one replica."""
        return self.config.world_size

    @property
    def world_size_across_dp(self) -> int:
        """Ranks of all replicas."""
        return self.config.world_size_across_dp

    @property
    def torch_world(self) -> int:
        """Ranks in one torch world."""
        return self.config.torch_world

    @property
    def worlds(self) -> int:
        """Independent torch worlds."""
        return self.config.worlds

    @property
    def output_rank(self) -> int:
        """The rank of a replica that replies."""
        return self.config.output_rank

    @property
    def groups(self) -> dict[str, Groups]:
        """Groups of one torch world by kind, in the order in which they are created."""
        return {kind.value: groups for kind, groups in self.group_table}

    @property
    def ring_bytes(self) -> int:
        """Shared memory of the control plane on all nodes together."""
        return sum(node.ring_bytes for node in self.nodes)

    def rank_plan(self, rank: int, dp_rank: int = 0) -> RankPlan:
        """The plan of `rank` of the replica `dp_rank`."""
        if not (0 <= rank < self.world_size and 0 <= dp_rank < self.config.dp):
            raise PlacementError(
                f"there is no rank {rank} of replica {dp_rank} in {self.config.dp} replica(s) "
                f"of {self.world_size} rank(s)"
            )
        return self.ranks[dp_rank * self.world_size + rank]

    def local_ranks(self, node_rank: int) -> tuple[RankPlan, ...]:
        """The ranks on one node, in the order of their devices."""
        return tuple(rank for rank in self.ranks if rank.node_rank == node_rank)

    def node(self, node_rank: int) -> NodePlan:
        """The plan of one node."""
        if not 0 <= node_rank < len(self.nodes):
            raise PlacementError(f"there is no node {node_rank} among {len(self.nodes)}")
        return self.nodes[node_rank]

    def fingerprint(self) -> str:
        """A hash that is equal on all nodes that can work together.

        It covers sizes, layout and the shape of the model, nothing that may differ between hosts.
        """
        # Only launches over nodes and --json need these: `vcli topo` starts without them.
        import hashlib
        import json

        config = {
            name: value for name, value in asdict(self.config).items() if name not in _LOCAL_FIELDS
        }
        document = {
            "format": 1,
            "config": config,
            "device_type": self.device_type,
            "dtype": self.dtype,
            "backend": self.backend.value,
            "groups": self.groups,
            "layer_spans": self.layer_spans,
            "placement": [(rank.global_rank, rank.node_rank) for rank in self.ranks],
            "model": asdict(self.model) if self.model else None,
        }
        text = json.dumps(document, sort_keys=True, separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def sum_totals(counts: Iterable[ProcessTotals]) -> ProcessTotals:
    """The totals of several nodes together."""
    listed = tuple(counts)
    return ProcessTotals(
        supervisor_or_launcher=sum(count.supervisor_or_launcher for count in listed),
        api_servers=sum(count.api_servers for count in listed),
        engine_cores=sum(count.engine_cores for count in listed),
        workers=sum(count.workers for count in listed),
        coordinator=sum(count.coordinator for count in listed),
    )
