"""Bytes of every rank of a plan."""

from vcli.topology.groups import GroupKind
from vcli.topology.memory import dtype_bytes, kv_bytes_per_token, num_parameters, rank_parameters
from vcli.topology.model_spec import ModelSpec
from vcli.topology.plan import MemoryPlan, RankMemory, RankPlan
from vcli.topology.sizes import ParallelSizes


def plan_memory(
    sizes: ParallelSizes,
    ranks: tuple[RankPlan, ...],
    spec: ModelSpec,
    dtype: str | None,
) -> MemoryPlan:
    """Of each rank with the zeros of its padding, of the model without."""
    dtype = dtype or spec.dtype
    number_bytes = dtype_bytes(dtype)
    kv_bytes = [
        kv_bytes_per_token(spec, sizes, pp_rank=stage, dtype=dtype) for stage in range(sizes.pp)
    ]
    # Ranks of equal stage and experts hold equally much: count each case once.
    counted: dict[tuple[int, int], int] = {}
    memories = []
    for rank in ranks:
        experts = rank.group(GroupKind.EP) if sizes.enable_expert_parallel else None
        key = (rank.pp_rank, experts.rank_in_group if experts else 0)
        if key not in counted:
            counted[key] = rank_parameters(spec, sizes, pp_rank=key[0], ep_rank=key[1])
        memories.append(
            RankMemory(
                rank=rank.rank,
                dp_rank=rank.dp_rank,
                num_parameters=counted[key],
                weight_bytes=counted[key] * number_bytes,
                kv_bytes_per_token=kv_bytes[rank.pp_rank],
            )
        )
    return MemoryPlan(dtype=dtype, num_parameters=num_parameters(spec), ranks=tuple(memories))
