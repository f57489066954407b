"""Every valid layout of a model on given GPUs, judged and ranked; and two plans side by side."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from vcli.topology.config import ParallelConfig, divisors
from vcli.topology.errors import ConfigError, PlacementError, VcliError
from vcli.topology.estimate import Estimate, Workload, estimate_plan
from vcli.topology.facts import HostFacts
from vcli.topology.links import Hardware
from vcli.topology.model_spec import ModelSpec
from vcli.topology.plan import TopologyPlan
from vcli.topology.planner import plan_topology
from vcli.topology.sizes import ParallelSizes

#: KV replicas that decode context parallelism may share; larger ones gain nothing here.
_MAX_DCP = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """One layout; the ranks count from 1, over all layouts that fit. The plan has one node."""

    plan: TopologyPlan
    estimate: Estimate
    latency_rank: int
    throughput_rank: int

    @property
    def flags(self) -> str:
        """What to type for it."""
        return layout_flags(self.plan.config)


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestions:
    """`layouts` by latency; `refused` counts sizes that no rule allows, `too_large` those whose
    weights leave no room for one request."""

    layouts: tuple[Suggestion, ...]
    too_large: int
    refused: int


def layout_flags(sizes: ParallelSizes) -> str:
    """`-tp 8 -pp 2`, the sizes above 1 as flags; `-tp 1` for a single rank."""
    named = (
        ("-tp", sizes.tp),
        ("-pp", sizes.pp),
        ("-pcp", sizes.pcp),
        ("-dcp", sizes.dcp),
        ("-dp", sizes.dp),
    )
    flags = [f"{flag} {size}" for flag, size in named if size > 1]
    if sizes.is_moe and sizes.enable_expert_parallel:
        flags.append("-ep")
    return " ".join(flags) or "-tp 1"


def suggest_layouts(
    base: ParallelSizes,
    spec: ModelSpec,
    *,
    num_gpus: int,
    hardware: Hardware,
    host: HostFacts | None,
    workload: Workload,
    dtype: str,
    device_type: str,
) -> Suggestions:
    """All layouts that use every one of `num_gpus` GPUs on `base.nnodes` nodes.

    Raises:
        ConfigError: none is valid.
    """
    judged: list[tuple[TopologyPlan, Estimate]] = []
    refused = too_large = 0
    for tp, pp, dp, dcp, expert in _layouts(spec, num_gpus):
        try:
            sizes = base.resized(tp=tp, pp=pp, dp=dp, dcp=dcp, expert=expert)
            config = ParallelConfig.checked(replace(sizes, is_moe=spec.is_moe))
            plan = plan_topology(
                config,
                host=host,
                model=spec,
                dtype=dtype,
                device_type=device_type,
                is_own_node_only=True,
            )
        except VcliError:
            refused += 1
            continue
        estimate = estimate_plan(plan, spec, hardware=hardware, host=host, workload=workload)
        if estimate.num_requests:
            judged.append((plan, estimate))
        else:
            too_large += 1
    if not judged:
        raise _nothing(num_gpus, base, too_large, hardware)
    # What takes a link of unknown speed is never the best.
    judged.sort(key=lambda item: (not item[1].is_known, item[1].latency_s))
    by_rate = sorted(
        range(len(judged)), key=lambda i: (not judged[i][1].is_known, -judged[i][1].tokens_per_s)
    )
    throughput_rank = {index: rank for rank, index in enumerate(by_rate, start=1)}
    layouts = tuple(
        Suggestion(
            plan=plan,
            estimate=estimate,
            latency_rank=index + 1,
            throughput_rank=throughput_rank[index],
        )
        for index, (plan, estimate) in enumerate(judged)
    )
    return Suggestions(layouts=layouts, too_large=too_large, refused=refused)


def _layouts(spec: ModelSpec, num_gpus: int) -> Iterator[tuple[int, int, int, int, bool]]:
    """(tp, pp, dp, dcp, experts spread) of every way to use all GPUs, valid or not."""
    for tp in divisors(num_gpus):
        for pp in divisors(num_gpus // tp):
            dp = num_gpus // tp // pp
            for dcp in (size for size in divisors(tp) if size <= _MAX_DCP):
                if dcp > 1 and tp <= spec.num_kv_heads:
                    continue
                yield (tp, pp, dp, dcp, False)
                if spec.is_moe and tp * dp > 1:
                    yield (tp, pp, dp, dcp, True)


def _nothing(num_gpus: int, base: ParallelSizes, too_large: int, hardware: Hardware) -> ConfigError:
    where = f"{num_gpus} GPU{'s' if num_gpus > 1 else ''} on {base.nnodes} node(s)"
    if too_large:
        memory = (hardware.memory_bytes or 0) / 2**30
        return PlacementError(
            f"the model fits no layout of {where} with {memory:.0f} GiB each",
            hint="raise --gpus or --nnodes, or name a larger --gpu",
        )
    return ConfigError(
        f"no layout that uses all of {where} divides this model",
        hint="try another number of --gpus; vcli topo MODEL -tp N says which rule is broken",
    )
