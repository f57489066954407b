"""Where the memory of each rank goes: planned before a start, compared with what was measured.

GPU   context, NCCL | weights | activations of the largest step | KV cache | CUDA graphs
CPU   weights | KV cache
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Final

from vcli.topology.facts import HostFacts
from vcli.topology.memory_fit import (
    GPU_CONTEXT_BYTES,
    KvBudget,
    activation_bytes,
    cpu_kv_budget,
    gpu_kv_budget,
    graph_bytes,
)
from vcli.topology.plan import RankMemory, RankPlan, TopologyPlan

#: A measured item is worth a warning when it is off by more than both.
TOLERANCE_PART: Final = 0.1
TOLERANCE_BYTES: Final = 256 << 20
#: What NCCL takes for the channels and buffers of a group with several ranks.
NCCL_GROUP_BYTES: Final = 400 << 20

#: Items in the order in which they are taken, as people call them.
ITEM_NAMES: Final = {
    "context_bytes": "NCCL and context",
    "weight_bytes": "weights",
    "activation_bytes": "activation peak",
    "kv_bytes": "KV cache",
    "graph_bytes": "CUDA graphs",
}
#: What to type where an item is larger than planned.
_HINTS: Final = {
    "context_bytes": "look for other processes on the GPU: nvidia-smi",
    "weight_bytes": "raise --tensor-parallel-size",
    "activation_bytes": "lower --max-num-batched-tokens or --max-num-seqs",
    "kv_bytes": "set it yourself: --kv-cache-memory",
    "graph_bytes": "lower --max-num-seqs, or --enforce-eager",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryItems:
    """Bytes of one rank; None: not known, or not counted on its device."""

    weight_bytes: int | None = None
    activation_bytes: int | None = None
    graph_bytes: int | None = None
    context_bytes: int | None = None
    kv_bytes: int | None = None
    kv_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemoryPlan:
    """What is planned for one rank; `free_bytes` were free on its device before the start."""

    rank: int
    items: MemoryItems
    free_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimits:
    """What was asked of the memory, resolved. `kv_cache_memory_bytes` None: what is left."""

    utilization: float
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    kv_cache_memory_bytes: int | None = None
    enforce_eager: bool = False


def plan_rank_memory(
    plan: TopologyPlan, limits: MemoryLimits, host: HostFacts | None
) -> tuple[RankMemoryPlan, ...]:
    """What each rank will take, in the order of `plan.ranks`; () without a model.

    Ranks on other nodes are taken to have devices like those of `host`.
    """
    if plan.memory is None:
        return ()
    pairs = list(zip(plan.ranks, plan.memory.ranks, strict=True))
    budgets = [_budget(plan, limits, host, rank, memory) for rank, memory in pairs]
    num_blocks = _num_blocks(limits, budgets)
    plans = []
    for (rank, memory), budget in zip(pairs, budgets, strict=True):
        items = _fixed_items(plan, limits, rank, memory)
        if num_blocks is not None and budget is not None:
            num_tokens = num_blocks * limits.block_size
            items = replace(
                items, kv_tokens=num_tokens, kv_bytes=num_tokens * memory.kv_bytes_per_token
            )
        plans.append(RankMemoryPlan(rank=rank.rank, items=items, free_bytes=_free(host, rank)))
    return tuple(plans)


def planned_graph_bytes(plan: TopologyPlan, limits: MemoryLimits) -> int:
    """What to keep free for the CUDA graphs of a rank; they are captured when all else is there."""
    is_eager = limits.enforce_eager or plan.attention is None or plan.attention.value == "torch"
    if plan.model is None or plan.device_type != "cuda" or is_eager:
        return 0
    return graph_bytes(
        plan.model,
        plan.config,
        dtype=plan.dtype or plan.model.dtype,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
    )


def differences(planned: MemoryItems, measured: MemoryItems) -> Iterator[tuple[str, str]]:
    """Items that are off by more than `TOLERANCE_PART` and `TOLERANCE_BYTES`, and what to do.

    Each as its name and a sentence with both values.
    """
    for name, title in ITEM_NAMES.items():
        expected, found = getattr(planned, name), getattr(measured, name)
        if expected is None or found is None:
            continue
        off = abs(found - expected)
        if off <= max(TOLERANCE_BYTES, TOLERANCE_PART * expected):
            continue
        way = "more" if found > expected else "less"
        # Less than planned harms nobody, but for the cache.
        is_bad = (way == "more") != (name == "kv_bytes")
        hint = f"; {_HINTS[name]}" if is_bad else ""
        yield (
            title,
            f"{title} {found / 2**30:.2f} GiB, {off / 2**30:.2f} GiB {way} than the "
            f"{expected / 2**30:.2f} GiB planned{hint}",
        )


def known_items(items: MemoryItems) -> dict[str, int]:
    """Those that are known, by the names of the fields."""
    values = {field.name: getattr(items, field.name) for field in fields(items)}
    return {name: value for name, value in values.items() if value is not None}


def _fixed_items(
    plan: TopologyPlan, limits: MemoryLimits, rank: RankPlan, memory: RankMemory
) -> MemoryItems:
    if plan.device_type != "cuda":
        return MemoryItems(weight_bytes=memory.weight_bytes)
    num_groups = sum(group.size > 1 for group in rank.groups)
    return MemoryItems(
        weight_bytes=memory.weight_bytes,
        activation_bytes=_activations(plan, limits),
        graph_bytes=planned_graph_bytes(plan, limits),
        context_bytes=GPU_CONTEXT_BYTES + num_groups * NCCL_GROUP_BYTES,
    )


def _activations(plan: TopologyPlan, limits: MemoryLimits) -> int:
    assert plan.model is not None, "a plan with memory has a model"
    num_tokens = min(limits.max_num_batched_tokens, limits.max_num_seqs * limits.max_model_len)
    return activation_bytes(
        plan.model,
        plan.config,
        dtype=plan.dtype or plan.model.dtype,
        num_tokens=num_tokens,
        num_requests=min(limits.max_num_seqs, num_tokens),
    )


def _budget(
    plan: TopologyPlan,
    limits: MemoryLimits,
    host: HostFacts | None,
    rank: RankPlan,
    memory: RankMemory,
) -> KvBudget | None:
    """What the device leaves for KV; of a given size, how many blocks it is."""
    given = limits.kv_cache_memory_bytes
    if given is not None:
        return KvBudget(
            device_bytes=given,
            weight_bytes=memory.weight_bytes,
            other_bytes=0,
            kv_bytes=given,
            block_size=limits.block_size,
            num_blocks=given // max(memory.kv_bytes_per_token * limits.block_size, 1),
        )
    if host is None:
        return None
    if plan.device_type != "cuda":
        free = host.usable_memory_bytes
        if free is None:
            return None
        return cpu_kv_budget(
            free_bytes=free,
            ranks_on_node=len(plan.local_ranks(rank.node_rank)),
            weight_bytes=memory.weight_bytes,
            kv_bytes_per_token=memory.kv_bytes_per_token,
            block_size=limits.block_size,
        )
    gpu = next((gpu for gpu in host.gpus if gpu.index == rank.device_index), None)
    if gpu is None or gpu.memory_total_bytes is None:
        return None
    return gpu_kv_budget(
        memory_bytes=gpu.memory_total_bytes,
        utilization=limits.utilization,
        weight_bytes=memory.weight_bytes,
        activation_bytes=_activations(plan, limits),
        kv_bytes_per_token=memory.kv_bytes_per_token,
        block_size=limits.block_size,
        graph_bytes=planned_graph_bytes(plan, limits),
        free_bytes=gpu.memory_free_bytes,
    )


def _num_blocks(limits: MemoryLimits, budgets: list[KvBudget | None]) -> int | None:
    """As many as every rank holds, and no more than can ever be used; None if not known."""
    known = [budget.num_blocks for budget in budgets if budget is not None]
    if len(known) < len(budgets):
        return None
    usable = -(-limits.max_model_len // limits.block_size) * limits.max_num_seqs
    return min(*known, usable)


def _free(host: HostFacts | None, rank: RankPlan) -> int | None:
    gpus = host.gpus if host else ()
    return next((gpu.memory_free_bytes for gpu in gpus if gpu.index == rank.device_index), None)
