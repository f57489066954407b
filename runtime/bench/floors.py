"""The least time that a workload can take on a plan: what must be read, what must be computed.

Bytes floor: each step reads the weights once (of the experts those that its tokens are expected
to choose) and each generated token the KV cache of its context. Op floor: two operations for each
parameter that a token meets; the head only where a token is generated, attention not counted. All
requests are taken to run together, as far as the engine lets them.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from vcli.runtime.bench.workloads import Workload
from vcli.topology.errors import ConfigError
from vcli.topology.layers import layer_ranges
from vcli.topology.memory import dtype_bytes, kv_bytes_per_token, rank_parameters
from vcli.topology.padding import cut_sizes
from vcli.topology.plan import TopologyPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpeed:
    """What one rank's device does; None where nobody said or measured it."""

    memory_bytes_per_s: float | None = None
    flops: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Floors:
    """Seconds of a whole workload; None where the device's speed is not known."""

    bytes_s: float | None
    ops_s: float | None

    @property
    def larger_s(self) -> float | None:
        """The one that counts."""
        known = [seconds for seconds in (self.bytes_s, self.ops_s) if seconds is not None]
        return max(known, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """Of one rank: parameters met by every token, of the experts, of the head; KV bytes."""

    body: int
    experts: float
    head: int
    kv_bytes_per_token: int


def workload_floors(
    plan: TopologyPlan, workload: Workload, *, device: DeviceSpeed, max_num_seqs: int
) -> Floors:
    """The floors of `workload` on a plan that was made for a model.

    Raises:
        ConfigError: the plan has no model.
    """
    spec = plan.model
    if spec is None:
        raise ConfigError("the floors of a workload need a plan with a model")
    stages = [_stage(plan, stage) for stage in range(plan.config.pp)]
    number_bytes = dtype_bytes(plan.dtype or spec.dtype)
    moe = spec.moe
    chosen = moe.num_experts_per_token / moe.num_experts if moe else 1.0
    # Requests pass the stages one after the other; with several, each stage has one under way.
    together = sum if len(workload.requests) == 1 else max
    bytes_s = ops_s = None
    if device.memory_bytes_per_s:
        # Over the steps: how often the experts are read, the whole counted as one.
        batches = list(_batches(workload, max_num_seqs))
        expert_reads = sum(1 - (1 - chosen) ** batch if moe else 0.0 for batch in batches)
        context = _context_reads(workload)
        read = together(
            number_bytes * (len(batches) * (stage.body + stage.head) + expert_reads * stage.experts)
            + context * stage.kv_bytes_per_token
            for stage in stages
        )
        bytes_s = read / device.memory_bytes_per_s
    if device.flops:
        generated = workload.output_tokens
        computed = workload.prompt_tokens + generated - len(workload.requests)
        needed = together(
            2 * (computed * (stage.body + chosen * stage.experts) + generated * stage.head)
            for stage in stages
        )
        ops_s = needed / device.flops
    return Floors(bytes_s=bytes_s, ops_s=ops_s)


def _stage(plan: TopologyPlan, stage: int) -> _Stage:
    spec, sizes = plan.model, plan.config
    if spec is None:
        raise ConfigError("the floors of a workload need a plan with a model")
    cut = cut_sizes(spec, sizes)
    total = rank_parameters(spec, sizes, pp_rank=stage, ep_rank=0)
    table = cut.vocab_size // sizes.tp * spec.hidden_size
    is_first, is_last = stage == 0, stage == sizes.pp - 1
    head = table if is_last else 0
    # The table of the embedding is looked up, not read; a tied one on a single stage is the head.
    is_shared = spec.tie_word_embeddings and is_first and is_last
    lookup = table if is_first and not is_shared else 0
    experts = 0
    if spec.moe is not None:
        layers = layer_ranges(spec.num_layers, sizes.pp, sizes.pp_layer_partition)[stage]
        one = 3 * spec.hidden_size * cut.moe_intermediate_size
        share = sizes.expert_parallel_size if sizes.enable_expert_parallel else sizes.tp
        sparse = sum(spec.moe.is_sparse_layer(layer) for layer in layers)
        experts = sparse * spec.moe.num_experts * one // share
    return _Stage(
        body=total - head - lookup - experts,
        experts=experts,
        head=head,
        kv_bytes_per_token=kv_bytes_per_token(
            spec, sizes, pp_rank=stage, dtype=plan.dtype or spec.dtype
        ),
    )


def _batches(workload: Workload, max_num_seqs: int) -> Iterator[int]:
    """Tokens of each step; the first one computes prompts."""
    lengths = [request.output_tokens for request in workload.requests]
    if len(lengths) <= max_num_seqs:
        yield workload.prompt_tokens
        for step in range(1, max(lengths)):
            yield sum(length > step for length in lengths)
        return
    num_steps = max(*lengths, -(-sum(lengths) // max_num_seqs))
    for _ in range(num_steps):
        yield max_num_seqs


def _context_reads(workload: Workload) -> int:
    """Tokens of context read for all generated tokens; the first comes with its prompt."""
    total = 0
    for request in workload.requests:
        num_steps = request.output_tokens - 1
        total += num_steps * len(request.prompt_token_ids) + num_steps * (num_steps + 1) // 2
    return total
