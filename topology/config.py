"""A deployment that is valid: the one place that checks sizes and node coordinates.

What depends on the model (heads, layers, experts) is checked in `memory.check_model_fits`, what
depends on devices in `placement.check_devices`.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Final, Self

from vcli.topology.backend import backend_name
from vcli.topology.errors import ConfigError
from vcli.topology.sizes import DEFAULT_MASTER_PORT, ParallelSizes

#: Most ranks of a deployment; so many are still planned within seconds.
MAX_RANKS: Final = 16_384
#: Most API servers, and most copies of experts.
_MAX_COUNT: Final = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig(ParallelSizes):
    """What the user asked for; a value of this type is valid.

    Raises:
        ConfigError: a rule is broken; the message has the values, the hint the nearest valid ones.
    """

    @classmethod
    def checked(cls, sizes: ParallelSizes) -> Self:
        """These sizes, which must be valid.

        Raises:
            ConfigError: a rule is broken.
        """
        return cls(**asdict(sizes))

    def __post_init__(self) -> None:
        if self.distributed_executor_backend is not None:
            name = backend_name(self.distributed_executor_backend)
            object.__setattr__(self, "distributed_executor_backend", name)
        _check_sizes(self)
        _check_decode_context(self)
        _check_nodes(self)
        _check_data_parallel(self)
        _check_load_balancer(self)
        _check_replicas_on_nodes(self)
        _check_experts(self)
        _check_processes(self)


def divisors(number: int) -> tuple[int, ...]:
    """All divisors of a positive `number`, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return tuple(sorted({*small, *(number // d for d in small)}))


def nearest_choices(value: int, choices: Iterable[int], limit: int = 4) -> str:
    """Up to `limit` of `choices` that lie nearest to `value`, ascending, for a hint."""
    nearest = sorted(choices, key=lambda choice: (abs(choice - value), choice))[:limit]
    return ", ".join(str(choice) for choice in sorted(nearest))


def _check_sizes(config: ParallelSizes) -> None:
    sizes = (
        ("tensor_parallel_size", config.tp),
        ("pipeline_parallel_size", config.pp),
        ("prefill_context_parallel_size", config.pcp),
        ("decode_context_parallel_size", config.dcp),
        ("data_parallel_size", config.dp),
        ("external_data_parallel_size", config.external_data_parallel_size),
        ("nnodes", config.nnodes),
    )
    for name, size in sizes:
        flag = "--" + name.replace("_", "-")
        if size < 1:
            raise ConfigError(f"{name}={size} must be at least 1", hint=f"{flag} 1")
        if size > MAX_RANKS:
            raise ConfigError(
                f"{name}={size} is above {MAX_RANKS}, the most that is planned",
                hint=f"{flag} 1, or another size that machines exist for",
            )
    ranks = config.world_size_across_dp * config.external_data_parallel_size
    if ranks > MAX_RANKS:
        raise ConfigError(
            f"DP {config.dp} x PP {config.pp} x PCP {config.pcp} x TP {config.tp} are {ranks} "
            f"ranks, the most that is planned are {MAX_RANKS}",
            hint="lower --tensor-parallel-size, --pipeline-parallel-size or --data-parallel-size",
        )
    # The port above the master's is the control plane's.
    if not 1 <= config.master_port <= 65534:
        raise ConfigError(
            f"master_port={config.master_port} must lie in 1..65534",
            hint=f"--master-port {DEFAULT_MASTER_PORT}",
        )
    partition = config.pp_layer_partition
    if partition is None:
        return
    if len(partition) != config.pp or any(count < 1 for count in partition):
        raise ConfigError(
            f"pp_layer_partition={','.join(map(str, partition))} must be "
            f"{config.pp} numbers above 0, one for each pipeline stage",
            hint="leave it out to split the layers evenly",
        )


def _check_decode_context(config: ParallelSizes) -> None:
    tp, pcp = config.tp, config.pcp
    dcp = config.dcp
    if pcp == 1:
        allowed: tuple[int, ...] = divisors(tp)
        rule = f"must divide tensor_parallel_size={tp}"
    else:
        allowed = tuple(sorted({1, pcp, tp * pcp}))
        rule = (
            f"must be 1, prefill_context_parallel_size={pcp}, or tensor_parallel_size times "
            f"that ({tp * pcp})"
        )
    if dcp not in allowed:
        raise ConfigError(
            f"decode_context_parallel_size={dcp} {rule}",
            hint=f"--decode-context-parallel-size: {nearest_choices(dcp, allowed)}",
        )


def _check_nodes(config: ParallelSizes) -> None:
    total, nnodes = config.world_size_across_dp, config.nnodes
    if total % nnodes:
        raise ConfigError(
            f"nnodes={nnodes} must divide the {total} ranks (DP x PP x PCP x TP)",
            hint=f"--nnodes: {nearest_choices(nnodes, divisors(total))}",
        )
    if not 0 <= config.node_rank < nnodes:
        raise ConfigError(
            f"node_rank={config.node_rank} must lie in 0..{nnodes - 1} (nnodes={nnodes})",
            hint=f"--node-rank {min(max(config.node_rank, 0), nnodes - 1)}, or raise --nnodes",
        )


def _check_data_parallel(config: ParallelSizes) -> None:
    dp, local, rank = (
        config.data_parallel_size,
        config.data_parallel_size_local,
        config.data_parallel_rank,
    )
    if config.data_parallel_backend not in ("mp", "ray"):
        raise ConfigError(
            f"data_parallel_backend={config.data_parallel_backend!r} is unknown",
            hint="--data-parallel-backend: mp, ray",
        )
    if config.nnodes > 1 and config.data_parallel_backend != "mp":
        raise ConfigError(
            f"nnodes={config.nnodes} needs data_parallel_backend=mp, "
            f"got {config.data_parallel_backend}",
            hint="--data-parallel-backend mp, or leave out --nnodes and let Ray place the ranks",
        )
    if local is not None and not 1 <= local <= dp:
        raise ConfigError(
            f"data_parallel_size_local={local} must lie in 1..{dp} (data_parallel_size={dp})",
            hint=f"--data-parallel-size-local: {nearest_choices(local, divisors(dp))}",
        )
    if rank is not None and not 0 <= rank < max(dp, 1):
        raise ConfigError(
            f"data_parallel_rank={rank} must lie in 0..{dp - 1} (data_parallel_size={dp})",
            hint="raise --data-parallel-size, or lower --data-parallel-rank",
        )


def _check_load_balancer(config: ParallelSizes) -> None:
    dp = config.data_parallel_size
    if config.data_parallel_hybrid_lb and (
        config.data_parallel_external_lb or config.data_parallel_rank is not None
    ):
        raise ConfigError(
            "hybrid and external load balancing exclude each other",
            hint="give --data-parallel-hybrid-lb, or --data-parallel-external-lb "
            "with --data-parallel-rank",
        )
    if config.data_parallel_hybrid_lb:
        if config.headless:
            raise ConfigError(
                "headless nodes have no API server, hybrid load balancing needs one on each",
                hint="leave out --headless",
            )
        if config.data_parallel_size_local is None and config.nnodes == 1:
            raise ConfigError(
                "hybrid load balancing needs the number of replicas on this node",
                hint="--data-parallel-size-local N",
            )
    if not config.is_external_lb:
        return
    if dp == 1:
        raise ConfigError(
            "external load balancing needs data_parallel_size > 1, got 1",
            hint="raise --data-parallel-size, or leave out --data-parallel-external-lb and "
            "--data-parallel-rank",
        )
    if config.data_parallel_size_local not in (None, 1):
        raise ConfigError(
            f"data_parallel_size_local={config.data_parallel_size_local} must be 1 with external "
            "load balancing: each instance is one data-parallel rank",
            hint="--data-parallel-size-local 1, or --data-parallel-hybrid-lb",
        )
    if config.data_parallel_rank is None and config.nnodes % dp:
        raise ConfigError(
            f"external load balancing over nnodes={config.nnodes} and data_parallel_size={dp} "
            "leaves open which replica this is",
            hint=f"--data-parallel-rank 0..{dp - 1}",
        )


def _check_replicas_on_nodes(config: ParallelSizes) -> None:
    if config.nnodes == 1:
        return
    dp, nnodes, per_node = (
        config.data_parallel_size,
        config.nnodes,
        config.node_data_parallel_size,
    )
    sharing = dp // per_node
    if dp % per_node or nnodes % sharing or config.world_size % (nnodes // sharing):
        counts = [
            count
            for count in divisors(config.world_size_across_dp)
            if dp % count == 0 or count % dp == 0
        ]
        raise ConfigError(
            f"{dp} replicas of {config.world_size} ranks with {per_node} on a node do not fill "
            f"nnodes={nnodes} evenly",
            hint=f"--nnodes: {nearest_choices(nnodes, counts)}",
        )


def _check_experts(config: ParallelSizes) -> None:
    if config.num_redundant_experts < 0:
        raise ConfigError(
            f"num_redundant_experts={config.num_redundant_experts} must not be negative",
            hint="--num-redundant-experts 0",
        )
    if config.num_redundant_experts > _MAX_COUNT:
        raise ConfigError(
            f"num_redundant_experts={config.num_redundant_experts} is above {_MAX_COUNT}",
            hint="--num-redundant-experts 0",
        )
    if config.num_redundant_experts and not config.enable_eplb:
        raise ConfigError(
            f"num_redundant_experts={config.num_redundant_experts} needs expert load balancing",
            hint="--enable-eplb, or --num-redundant-experts 0",
        )
    if not config.enable_eplb:
        return
    if not config.enable_expert_parallel:
        raise ConfigError(
            "expert load balancing (enable_eplb) needs expert parallelism",
            hint="--enable-expert-parallel, or leave out --enable-eplb",
        )
    sharing = config.tp * config.pcp * config.data_parallel_size
    if sharing == 1:
        raise ConfigError(
            "expert load balancing (enable_eplb) needs more than one rank to balance over, "
            "TP x PCP x DP is 1",
            hint="--tensor-parallel-size 2, or leave out --enable-eplb",
        )


def _check_processes(config: ParallelSizes) -> None:
    count = config.api_server_count
    if count is not None and count < 0:
        raise ConfigError(
            f"api_server_count={count} must not be negative", hint="--api-server-count 1"
        )
    if count is not None and count > _MAX_COUNT:
        raise ConfigError(
            f"api_server_count={count} is above {_MAX_COUNT}", hint="--api-server-count 1"
        )
    if config.headless and count:
        raise ConfigError(
            f"api_server_count={count} contradicts headless, which has none",
            hint="leave out --headless or --api-server-count",
        )
    if count == 0 and not config.headless and config.node_rank == 0:
        raise ConfigError(
            "api_server_count=0 leaves no API server on the first node",
            hint="--api-server-count 1, or --headless on the other nodes",
        )
