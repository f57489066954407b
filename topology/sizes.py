"""Sizes and node coordinates of a deployment, and the sizes that follow from them.

Everybody else uses the short properties (`tp`, `pp`, ...); only this file, the rules in
`config.py` and the command line write the long names.
"""

from dataclasses import dataclass, replace
from typing import Final, Self

DEFAULT_MASTER_PORT: Final = 29501
EXTERNAL_LAUNCHER: Final = "external_launcher"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSizes:
    """What the user asked for, not checked: use `config.ParallelConfig`, whose values are valid.

    `data_parallel_size_local` is per started instance (None: inferred, see
    `local_data_parallel_size`). `external_data_parallel_size` is for library use by trainers:
    whole copies of the deployment inside one torch world that somebody else started.
    `is_moe` is set from the model where one is known. `distributed_executor_backend` may be given
    as an `Executor` class, and is the class' dotted path then.
    """

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    prefill_context_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    data_parallel_size: int = 1
    data_parallel_size_local: int | None = None
    data_parallel_rank: int | None = None
    data_parallel_external_lb: bool = False
    data_parallel_hybrid_lb: bool = False
    data_parallel_backend: str = "mp"
    external_data_parallel_size: int = 1
    enable_expert_parallel: bool = False
    enable_eplb: bool = False
    num_redundant_experts: int = 0
    is_moe: bool = False
    nnodes: int = 1
    node_rank: int = 0
    headless: bool = False
    master_addr: str = "127.0.0.1"
    master_port: int = DEFAULT_MASTER_PORT
    distributed_executor_backend: str | type | None = None
    start_method: str | None = None
    numa_bind: bool = False
    pp_layer_partition: tuple[int, ...] | None = None
    api_server_count: int | None = None

    def resized(
        self, *, tp: int, pp: int, dp: int, pcp: int = 1, dcp: int = 1, expert: bool = False
    ) -> Self:
        """The same deployment with these sizes; layers are split evenly over the stages."""
        return replace(
            self,
            tensor_parallel_size=tp,
            pipeline_parallel_size=pp,
            prefill_context_parallel_size=pcp,
            decode_context_parallel_size=dcp,
            data_parallel_size=dp,
            enable_expert_parallel=expert,
            pp_layer_partition=None,
        )

    @property
    def tp(self) -> int:
        """Tensor parallel size."""
        return self.tensor_parallel_size

    @property
    def pp(self) -> int:
        """Pipeline parallel size."""
        return self.pipeline_parallel_size

    @property
    def pcp(self) -> int:
        """Prefill context parallel size."""
        return self.prefill_context_parallel_size

    @property
    def dcp(self) -> int:
        """Decode context parallel size."""
        return self.decode_context_parallel_size

    @property
    def dp(self) -> int:
        """Data parallel size."""
        return self.data_parallel_size

    @property
    def unserved_flags(self) -> tuple[str, ...]:
        """The flags of these sizes that `topo` plans and `serve` does not run yet."""
        asked = {
            "--data-parallel-size": self.dp > 1,
            "--prefill-context-parallel-size": self.pcp > 1,
            "--decode-context-parallel-size": self.dcp > 1,
            "--enable-expert-parallel": self.enable_expert_parallel,
        }
        return tuple(flag for flag, is_asked in asked.items() if is_asked)

    @property
    def world_size(self) -> int:
        """Ranks of one replica: TP x PP x PCP."""
        return self.tp * self.pp * self.pcp

    @property
    def world_size_across_dp(self) -> int:
        """Ranks of all replicas."""
        return self.world_size * self.dp

    @property
    def is_one_world(self) -> bool:
        """Whether all data-parallel replicas share one torch world.

        Replicas of a dense model have nothing to tell each other, so each is a world of its own.
        """
        return self.is_moe or self.distributed_executor_backend == EXTERNAL_LAUNCHER

    @property
    def torch_world(self) -> int:
        """Ranks in one torch world."""
        replicas = self.dp if self.is_one_world else 1
        return self.world_size * replicas * self.external_data_parallel_size

    @property
    def worlds(self) -> int:
        """Number of independent torch worlds."""
        return 1 if self.is_one_world else self.dp

    @property
    def output_rank(self) -> int:
        """The rank of a replica that has the result: first rank of the last pipeline stage."""
        return self.world_size - self.tp * self.pcp

    @property
    def is_external_lb(self) -> bool:
        """Whether somebody else balances the load: each instance is one data-parallel rank."""
        if self.data_parallel_external_lb or self.data_parallel_rank is not None:
            return True
        return self.data_parallel_hybrid_lb and self.data_parallel_size_local == 1

    @property
    def is_hybrid_lb(self) -> bool:
        """Whether each node balances among its own replicas only."""
        return self.data_parallel_hybrid_lb and not self.is_external_lb

    @property
    def local_data_parallel_size(self) -> int:
        """Replicas (or parts of replicas) of one started instance."""
        if self.is_external_lb:
            return 1
        if self.data_parallel_size_local is not None:
            return self.data_parallel_size_local
        return self.dp if self.nnodes == 1 else self._replicas_per_node

    @property
    def node_data_parallel_size(self) -> int:
        """Replicas (or parts of replicas) on one node, whoever balances the load."""
        if self.nnodes > 1 and (self.is_external_lb or self.data_parallel_size_local is None):
            return self._replicas_per_node
        return self.local_data_parallel_size

    @property
    def _replicas_per_node(self) -> int:
        ranks_per_node = self.world_size_across_dp // self.nnodes
        return max(ranks_per_node // self.world_size, 1)

    @property
    def num_hosts(self) -> int:
        """Nodes of the deployment, with those that are started apart from `nnodes`."""
        if self.nnodes > 1:
            return self.nnodes
        return -(-self.dp // self.local_data_parallel_size)

    @property
    def own_node_rank(self) -> int:
        """Which of the hosts this is: `node_rank`, or where `data_parallel_rank` is started."""
        if self.nnodes > 1 or self.data_parallel_rank is None:
            return self.node_rank
        return self.data_parallel_rank // self.local_data_parallel_size

    @property
    def nnodes_within_dp(self) -> int:
        """Nodes over which one replica is spread."""
        if self.nnodes == 1:
            return 1
        return max(self.nnodes * self.node_data_parallel_size // self.dp, 1)

    @property
    def node_rank_within_dp(self) -> int:
        """Position of this node among those of its replica."""
        return self.node_rank % self.nnodes_within_dp

    @property
    def local_world_size(self) -> int:
        """Ranks that one replica has on a node."""
        return self.world_size // self.nnodes_within_dp

    @property
    def first_local_data_parallel_rank(self) -> int:
        """First data-parallel rank on this node."""
        return self.first_data_parallel_rank_of(self.node_rank)

    def first_data_parallel_rank_of(self, node_rank: int) -> int:
        """First data-parallel rank on the node `node_rank`."""
        return node_rank // self.nnodes_within_dp * self.node_data_parallel_size

    @property
    def expert_parallel_size(self) -> int:
        """Ranks that share the experts of a layer: DP x PCP x TP, or 1 without expert parallel."""
        if not (self.is_moe and self.enable_expert_parallel):
            return 1
        return self.dp * self.pcp * self.tp

    @property
    def use_all2all(self) -> bool:
        """Whether tokens travel to their experts on other replicas."""
        return self.is_moe and self.enable_expert_parallel and self.dp > 1
