"""What runs where, computed: config and observed facts in, one frozen plan out.

Standard library only, no clock, no environment, no system call.
"""

from vcli.topology.allreduce import decide_all_reduce
from vcli.topology.attention import decide_attention_backend
from vcli.topology.backend import BACKENDS, choose_backend
from vcli.topology.config import ParallelConfig
from vcli.topology.decision import Decision
from vcli.topology.errors import (
    ConfigError,
    ExitStatus,
    PlacementError,
    UnfitError,
    VcliError,
)
from vcli.topology.experts import ExpertMap, num_local_experts, place_experts
from vcli.topology.facts import (
    GpuFacts,
    HostFacts,
    LinkFacts,
    NicFacts,
    ProcessFacts,
    assumed_host,
)
from vcli.topology.grid import Axis, Coords, RankGrid, torch_world_grid
from vcli.topology.groups import (
    GROUP_SPECS,
    GroupKind,
    GroupMembership,
    GroupSpec,
    build_groups,
    group_spec,
    groups_of_rank,
)
from vcli.topology.layers import layer_ranges
from vcli.topology.memory import (
    DTYPE_BYTES,
    LocalHeads,
    check_model_fits,
    dtype_bytes,
    kv_bytes_per_token,
    local_heads,
    num_parameters,
    rank_parameters,
    valid_tp_sizes,
    weight_bytes,
)
from vcli.topology.model_spec import ModelSpec, MoeSpec, RopeSpec, model_spec_from_config
from vcli.topology.names import engine_core_title, memfd_name
from vcli.topology.omp import decide_omp_num_threads
from vcli.topology.placement import RankPlacement, place_ranks
from vcli.topology.plan import (
    HelperPlan,
    MemoryPlan,
    NodePlan,
    PlanWarning,
    PortPlan,
    ProcessRow,
    ProcessTotals,
    RankMemory,
    RankPlan,
    TopologyPlan,
)
from vcli.topology.plan_json import plan_to_json
from vcli.topology.planner import plan_topology
from vcli.topology.processes import NodeRole
from vcli.topology.rendezvous import RendezvousSpec, choose_rendezvous
from vcli.topology.start_method import DEFAULT_START_METHOD, StartMethod, decide_start_method

__all__ = [
    "BACKENDS",
    "DEFAULT_START_METHOD",
    "DTYPE_BYTES",
    "GROUP_SPECS",
    "Axis",
    "ConfigError",
    "Coords",
    "Decision",
    "ExitStatus",
    "ExpertMap",
    "GpuFacts",
    "GroupKind",
    "GroupMembership",
    "GroupSpec",
    "HelperPlan",
    "HostFacts",
    "LinkFacts",
    "LocalHeads",
    "MemoryPlan",
    "ModelSpec",
    "MoeSpec",
    "NicFacts",
    "NodePlan",
    "NodeRole",
    "ParallelConfig",
    "PlacementError",
    "PlanWarning",
    "PortPlan",
    "ProcessFacts",
    "ProcessRow",
    "ProcessTotals",
    "RankGrid",
    "RankMemory",
    "RankPlacement",
    "RankPlan",
    "RendezvousSpec",
    "RopeSpec",
    "StartMethod",
    "TopologyPlan",
    "UnfitError",
    "VcliError",
    "assumed_host",
    "build_groups",
    "check_model_fits",
    "choose_backend",
    "choose_rendezvous",
    "decide_all_reduce",
    "decide_attention_backend",
    "decide_omp_num_threads",
    "decide_start_method",
    "dtype_bytes",
    "engine_core_title",
    "group_spec",
    "groups_of_rank",
    "kv_bytes_per_token",
    "layer_ranges",
    "local_heads",
    "memfd_name",
    "model_spec_from_config",
    "num_local_experts",
    "num_parameters",
    "place_experts",
    "place_ranks",
    "plan_to_json",
    "plan_topology",
    "rank_parameters",
    "torch_world_grid",
    "valid_tp_sizes",
    "weight_bytes",
]
