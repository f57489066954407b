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
    counted = _Counted(spec, sizes)
    memories = []
    for rank in ranks:
        experts = rank.group(GroupKind.EP) if sizes.enable_expert_parallel else None
        parameters = counted[rank.pp_rank, experts.rank_in_group if experts else 0]
        memories.append(
            RankMemory(
                rank=rank.rank,
                dp_rank=rank.dp_rank,
                num_parameters=parameters,
                weight_bytes=parameters * number_bytes,
                kv_bytes_per_token=kv_bytes[rank.pp_rank],
            )
        )
    # The first of the EP ranks have the experts that are left over.
    fullest = max(counted[stage, 0] for stage in range(sizes.pp))
    return MemoryPlan(
        dtype=dtype,
        num_parameters=num_parameters(spec),
        max_weight_bytes=fullest * number_bytes,
        ranks=tuple(memories),
    )


class _Counted(dict[tuple[int, int], int]):
    """Parameters of a rank by its stage and its place among the experts."""

    def __init__(self, spec: ModelSpec, sizes: ParallelSizes) -> None:
        super().__init__()
        self._spec, self._sizes = spec, sizes

    def __missing__(self, key: tuple[int, int]) -> int:
        stage, ep_rank = key
        self[key] = rank_parameters(self._spec, self._sizes, pp_rank=stage, ep_rank=ep_rank)
        return self[key]
