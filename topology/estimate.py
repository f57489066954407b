"""How long a decode step takes and how many tokens a deployment makes, from sizes and speeds.

One stage's time is the larger of reading (weights once, the KV of all requests) and computing,
plus a fixed cost per layer, plus its collectives. A token passes all stages one after the other;
with several stages as many batches are under way, so the slowest stage sets the pace.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from vcli.topology.facts import HostFacts
from vcli.topology.groups import GroupKind
from vcli.topology.layers import layer_ranges
from vcli.topology.links import COMPUTE_EFFICIENCY, MEMORY_EFFICIENCY, Hardware
from vcli.topology.memory import dtype_bytes, kv_bytes_per_token, rank_parameters
from vcli.topology.memory_fit import activation_bytes, gpu_kv_budget, graph_bytes
from vcli.topology.model_spec import ModelSpec
from vcli.topology.padding import cut_sizes
from vcli.topology.plan import TopologyPlan
from vcli.topology.sizes import ParallelSizes
from vcli.topology.traffic import GroupSpan, group_bytes, group_span, transfer_seconds

#: Time of a layer's kernels beyond reading and computing (measured with CUDA graphs on H200).
LAYER_OVERHEAD_S: Final = 44e-6
CPU_LAYER_OVERHEAD_S: Final = 100e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is asked of the whole deployment: requests at once, tokens of context of each."""

    num_requests: int = 32
    context_tokens: int = 1024
    utilization: float = 0.9
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    block_size: int = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEstimate:
    """Seconds of one token of a single request, in parts that add up to `latency_s`.

    `unknown` are the groups whose network's speed is not known: it takes that much longer.
    """

    weights_s: float
    kv_s: float
    compute_s: float
    overhead_s: float
    communication_s: Mapping[str, float]
    unknown: tuple[str, ...] = ()

    @property
    def latency_s(self) -> float:
        """All known parts together."""
        parts = self.weights_s + self.kv_s + self.compute_s + self.overhead_s
        return parts + sum(self.communication_s.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """One layout judged; `single` is a request alone, `loaded` the step at the whole workload.

    `kv_tokens` is what a replica can hold, None where the device's memory is not known;
    `num_requests` of those asked for run at once. Without `is_known` it takes longer, nobody can
    say how much, and there are fewer tokens.
    """

    single: StepEstimate
    loaded: StepEstimate
    tokens_per_s: float
    kv_tokens: int | None
    num_requests: int

    @property
    def is_known(self) -> bool:
        """Whether the speed of every link that it takes is known."""
        return not self.single.unknown

    @property
    def latency_s(self) -> float:
        """Between two tokens of a request that runs alone."""
        return self.single.latency_s


def estimate_plan(
    plan: TopologyPlan,
    spec: ModelSpec,
    *,
    hardware: Hardware,
    host: HostFacts | None,
    workload: Workload,
) -> Estimate:
    """Latency of one request alone and throughput under `workload` for a planned model."""
    sizes, dtype = plan.config, plan.dtype or spec.dtype
    spans: dict[GroupKind, GroupSpan] = {
        kind: group_span(plan, kind, groups, host, hardware.near)
        for kind, groups in plan.group_table
        if len(groups[0]) > 1 and kind is not GroupKind.EPLB
    }
    model = _Costs(spec=spec, sizes=sizes, dtype=dtype, hardware=hardware, spans=spans)
    kv_tokens = replica_kv_tokens(spec, sizes, dtype=dtype, hardware=hardware, workload=workload)
    wanted = -(-workload.num_requests // sizes.dp)
    running = wanted
    if kv_tokens is not None:
        running = min(wanted, kv_tokens // workload.context_tokens)
    batch = max(1, -(-running // sizes.pp))
    loaded = model.step(batch, workload.context_tokens)
    slowest = model.slowest_stage_s(batch, workload.context_tokens)
    rate = sizes.dp * running / (sizes.pp * slowest) if running else 0.0
    if sizes.pp > running:
        # Too few requests to fill the stages: each waits for its own way through all of them.
        rate = sizes.dp * running / loaded.latency_s if running else 0.0
    return Estimate(
        single=model.step(1, workload.context_tokens),
        loaded=loaded,
        tokens_per_s=rate,
        kv_tokens=kv_tokens,
        num_requests=running * sizes.dp,
    )


def replica_kv_tokens(
    spec: ModelSpec, sizes: ParallelSizes, *, dtype: str, hardware: Hardware, workload: Workload
) -> int | None:
    """KV tokens of the fullest rank; every rank of a replica holds the same number of blocks."""
    if hardware.memory_bytes is None:
        return None
    activation = activation_bytes(
        spec,
        sizes,
        dtype=dtype,
        num_tokens=workload.max_num_batched_tokens,
        num_requests=workload.max_num_seqs,
    )
    return min(
        gpu_kv_budget(
            memory_bytes=hardware.memory_bytes,
            utilization=workload.utilization,
            weight_bytes=rank_parameters(spec, sizes, pp_rank=stage, ep_rank=0)
            * dtype_bytes(dtype),
            activation_bytes=activation,
            kv_bytes_per_token=kv_bytes_per_token(spec, sizes, pp_rank=stage, dtype=dtype),
            block_size=workload.block_size,
            graph_bytes=graph_bytes(
                spec,
                sizes,
                dtype=dtype,
                max_num_seqs=workload.max_num_seqs,
                max_num_batched_tokens=workload.max_num_batched_tokens,
            ),
        ).num_tokens
        for stage in range(sizes.pp)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Costs:
    """The parts of a step of one layout."""

    spec: ModelSpec
    sizes: ParallelSizes
    dtype: str
    hardware: Hardware
    spans: Mapping[GroupKind, GroupSpan]

    def step(self, batch: int, context: int) -> StepEstimate:
        """A token's way through all stages with `batch` requests in each."""
        stages = [self._stage(stage, batch, context) for stage in range(self.sizes.pp)]
        taken = {kind: self._communication(kind, batch) for kind in self.spans}
        return StepEstimate(
            weights_s=sum(stage[0] for stage in stages),
            kv_s=sum(stage[1] for stage in stages),
            compute_s=sum(stage[2] for stage in stages),
            overhead_s=sum(stage[3] for stage in stages),
            communication_s={
                kind.value: seconds * self._passes(kind)
                for kind, seconds in taken.items()
                if seconds
            },
            unknown=tuple(kind.value for kind, seconds in taken.items() if seconds is None),
        )

    def slowest_stage_s(self, batch: int, context: int) -> float:
        """Time between two batches that leave the slowest stage."""
        own = max(sum(self._stage(stage, batch, context)) for stage in range(self.sizes.pp))
        return own + sum(self._communication(kind, batch) or 0.0 for kind in self.spans)

    def _stage(self, stage: int, batch: int, context: int) -> tuple[float, float, float, float]:
        spec, sizes, hardware = self.spec, self.sizes, self.hardware
        speed = hardware.memory_bytes_per_s * MEMORY_EFFICIENCY
        read = self._parameters_read(stage, batch) * dtype_bytes(self.dtype)
        kv = kv_bytes_per_token(spec, sizes, pp_rank=stage, dtype=self.dtype)
        weights_s, kv_s = read / speed, batch * context * kv / speed
        used = self._parameters_used(stage)
        needed_s = 2 * used * batch / (hardware.flops * COMPUTE_EFFICIENCY)
        layers = len(layer_ranges(spec.num_layers, sizes.pp, sizes.pp_layer_partition)[stage])
        each = LAYER_OVERHEAD_S if hardware.gpu else CPU_LAYER_OVERHEAD_S
        return weights_s, kv_s, max(0.0, needed_s - weights_s - kv_s), layers * each

    def _parameters_read(self, stage: int, batch: int) -> float:
        """Of one rank: all but the embedding table, of the experts those that any token chose."""
        total = rank_parameters(self.spec, self.sizes, pp_rank=stage, ep_rank=0)
        total -= self._lookup_parameters(stage)
        moe = self.spec.moe
        if moe is None:
            return total
        experts = self._expert_parameters(stage)
        tokens = batch * (self.sizes.dp if self.sizes.use_all2all else 1)
        missed = (1 - moe.num_experts_per_token / moe.num_experts) ** tokens
        return total - experts * missed

    def _parameters_used(self, stage: int) -> float:
        """Of one rank: those that one token is multiplied with."""
        total = rank_parameters(self.spec, self.sizes, pp_rank=stage, ep_rank=0)
        total -= self._lookup_parameters(stage)
        moe = self.spec.moe
        if moe is None:
            return total
        unused = 1 - moe.num_experts_per_token / moe.num_experts
        return total - self._expert_parameters(stage) * unused

    def _expert_parameters(self, stage: int) -> float:
        moe = self.spec.moe
        if moe is None:
            return 0.0
        layers = layer_ranges(self.spec.num_layers, self.sizes.pp, self.sizes.pp_layer_partition)
        sparse = sum(moe.is_sparse_layer(layer) for layer in layers[stage])
        one = 3 * self.spec.hidden_size * cut_sizes(self.spec, self.sizes).moe_intermediate_size
        share = (
            self.sizes.expert_parallel_size if self.sizes.enable_expert_parallel else self.sizes.tp
        )
        return sparse * moe.num_experts * one / share

    def _lookup_parameters(self, stage: int) -> int:
        # A tied table on a single stage is read as the head.
        is_read = self.spec.tie_word_embeddings and self.sizes.pp == 1
        if stage or is_read:
            return 0
        rows = cut_sizes(self.spec, self.sizes).vocab_size // self.sizes.tp
        return rows * self.spec.hidden_size

    def _communication(self, kind: GroupKind, batch: int) -> float | None:
        num_bytes, calls = group_bytes(
            kind, self.spec, self.sizes, dtype=self.dtype, num_tokens=batch
        )
        return transfer_seconds(
            kind, self.spans[kind], num_bytes=num_bytes, num_calls=calls, hardware=self.hardware
        )

    def _passes(self, kind: GroupKind) -> int:
        return self.sizes.pp - 1 if kind is GroupKind.PP else self.sizes.pp
