"""How many KV tokens fit on the ranks of a plan, and what is remarkable about it."""

from dataclasses import dataclass

from vcli.topology.estimate import Workload
from vcli.topology.facts import HostFacts
from vcli.topology.links import Hardware
from vcli.topology.memory_fit import (
    KvBudget,
    activation_bytes,
    cpu_kv_budget,
    gpu_kv_budget,
    graph_bytes,
)
from vcli.topology.plan import PlanWarning, RankMemory, TopologyPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFit:
    """Ranks that hold equally much, and their KV cache; the last is None if memory is not known."""

    ranks: tuple[tuple[int, int], ...]
    """(dp_rank, rank) of each."""
    memory: RankMemory
    budget: KvBudget | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFit:
    """`kv_tokens` is what every rank of a replica can hold, None if memory is not known."""

    groups: tuple[RankFit, ...]
    kv_tokens: int | None


def plan_fit(
    plan: TopologyPlan, *, hardware: Hardware, host: HostFacts | None, workload: Workload
) -> PlanFit | None:
    """The KV cache of all ranks; None without a model."""
    if plan.memory is None or plan.model is None:
        return None
    alike: dict[tuple[int, int], list[RankMemory]] = {}
    for item in plan.memory.ranks:
        alike.setdefault((item.weight_bytes, item.kv_bytes_per_token), []).append(item)
    groups = tuple(
        RankFit(
            ranks=tuple((item.dp_rank, item.rank) for item in items),
            memory=items[0],
            budget=_budget(plan, items[0], hardware, host, workload),
        )
        for items in alike.values()
    )
    tokens = [group.budget.num_tokens for group in groups if group.budget]
    return PlanFit(groups=groups, kv_tokens=min(tokens) if len(tokens) == len(groups) else None)


def judge_fit(fit: PlanFit, plan: TopologyPlan, max_model_len: int) -> tuple[PlanWarning, ...]:
    """Remarks where not even one sequence of `max_model_len` tokens fits."""
    if fit.kv_tokens is None or fit.kv_tokens >= max_model_len:
        return ()
    # Ranks on the CPUs of one machine share its memory: more of them have no more.
    remedy = "raise -tp or -pp" if plan.device_type == "cuda" else "free some memory"
    if not fit.kv_tokens:
        message = f"the weights leave no room for a KV cache; {remedy}, or use a smaller model"
    else:
        message = (
            f"the KV cache holds {fit.kv_tokens:,} tokens, less than one sequence of "
            f"{max_model_len:,}; --max-model-len {fit.kv_tokens}, or {remedy}"
        )
    return (PlanWarning(id="FIT-04", message=message),)


def _budget(
    plan: TopologyPlan,
    item: RankMemory,
    hardware: Hardware,
    host: HostFacts | None,
    workload: Workload,
) -> KvBudget | None:
    if plan.model is None:
        return None
    if plan.device_type == "cuda":
        if hardware.memory_bytes is None:
            return None
        return gpu_kv_budget(
            memory_bytes=hardware.memory_bytes,
            utilization=workload.utilization,
            weight_bytes=item.weight_bytes,
            activation_bytes=activation_bytes(
                plan.model,
                plan.config,
                dtype=plan.dtype or plan.model.dtype,
                num_tokens=workload.max_num_batched_tokens,
                num_requests=workload.max_num_seqs,
            ),
            kv_bytes_per_token=item.kv_bytes_per_token,
            block_size=workload.block_size,
            graph_bytes=graph_bytes(
                plan.model,
                plan.config,
                dtype=plan.dtype or plan.model.dtype,
                max_num_seqs=workload.max_num_seqs,
                max_num_batched_tokens=workload.max_num_batched_tokens,
            ),
        )
    free = host.usable_memory_bytes if host else None
    if free is None:
        return None
    ranks_on_node = max((len(node.ranks) for node in plan.nodes), default=len(plan.ranks))
    return cpu_kv_budget(
        free_bytes=free,
        ranks_on_node=ranks_on_node,
        weight_bytes=item.weight_bytes,
        kv_bytes_per_token=item.kv_bytes_per_token,
        block_size=workload.block_size,
    )
