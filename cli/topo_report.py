"""A plan together with what `topo` judges about it: facts, links, memory, remarks."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any

from vcli.cli.topo_facts import TopoFacts
from vcli.cli.topo_model import TopoModel
from vcli.topology import (
    ConfigError,
    ParallelConfig,
    PlanWarning,
    ProcessFacts,
    TopologyPlan,
    plan_to_json,
    plan_topology,
)
from vcli.topology.estimate import Estimate, StepEstimate, Workload, estimate_plan
from vcli.topology.judgement import judge_plan
from vcli.topology.links import Hardware, hardware_of
from vcli.topology.placement import check_devices
from vcli.topology.plan_fit import PlanFit, judge_fit, plan_fit
from vcli.topology.plan_warnings import compare_hosts
from vcli.topology.traffic import Transfer, plan_traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class TopoReport:
    """`warnings` are those of the plan and of its judgement; the estimate needs a model."""

    plan: TopologyPlan
    facts: TopoFacts
    hardware: Hardware
    workload: Workload
    model: TopoModel | None
    transfers: tuple[Transfer, ...]
    fit: PlanFit | None
    estimate: Estimate | None
    warnings: tuple[PlanWarning, ...]
    max_model_len: int | None

    @property
    def step_tokens(self) -> int:
        """Tokens of a decode step on one replica: its share of the requests."""
        return max(1, -(-self.workload.num_requests // self.plan.config.dp))


def make_report(
    config: ParallelConfig,
    facts: TopoFacts,
    *,
    model: TopoModel | None,
    dtype: str | None,
    attention_backend: str,
    workload: Workload,
    max_model_len: int | None = None,
) -> TopoReport:
    """Plan and judge.

    Raises:
        ConfigError: sizes that the model or the machines cannot have.
    """
    host = facts.host
    _refuse_on_cpu(config, facts.device_type)
    plan = plan_topology(
        config,
        host=host,
        process=ProcessFacts(platform=host.platform, is_wsl=host.is_wsl),
        model=model.spec if model else None,
        dtype=dtype,
        device_type=facts.device_type,
        # Another machine is taken to have what the plan would use.
        flashinfer_available=not facts.is_live or find_spec("flashinfer") is not None,
        attention_backend=attention_backend,
    )
    num_local = max((len(node.ranks) for node in plan.nodes), default=0)
    if facts.device_type == "cuda":
        for other in facts.hosts[1:]:
            check_devices(num_local, other)
    hardware = hardware_of(host, facts.device_type, facts.link)
    tokens = max(1, -(-workload.num_requests // plan.config.dp))
    transfers = plan_traffic(plan, hardware=hardware, host=host, num_tokens=tokens)
    fit = plan_fit(plan, hardware=hardware, host=host, workload=workload)
    length, estimate = max_model_len, None
    if plan.model is not None:
        length = _length(max_model_len, plan.model.max_position_embeddings)
        estimate = estimate_plan(plan, plan.model, hardware=hardware, host=host, workload=workload)
    warnings = (
        *facts.warnings,
        *(model.warnings if model else ()),
        *plan.warnings,
        *compare_hosts(facts.hosts, num_local),
        *judge_plan(plan, transfers, hardware=hardware, host=host, num_tokens=tokens),
        *(judge_fit(fit, plan, length) if fit and length else ()),
    )
    return TopoReport(
        plan=plan,
        facts=facts,
        hardware=hardware,
        workload=workload,
        model=model,
        transfers=transfers,
        fit=fit,
        estimate=estimate,
        warnings=_once(warnings),
        max_model_len=length,
    )


def _refuse_on_cpu(config: ParallelConfig, device_type: str) -> None:
    if config.enable_eplb and device_type == "cpu":
        raise ConfigError(
            "expert load balancing (enable_eplb) moves experts between GPUs, the device is cpu",
            hint="--gpus 8 to plan for GPUs, or leave out --enable-eplb",
        )


def _length(typed: int | None, limit: int) -> int:
    if typed is not None and typed > limit:
        raise ConfigError(
            f"--max-model-len {typed} is above the model's {limit} positions",
            hint=f"--max-model-len {limit}",
        )
    return typed or limit


def report_to_json(report: TopoReport) -> dict[str, Any]:
    """The document `vcli.topo/1`: the plan's, and what was judged."""
    document = plan_to_json(report.plan)
    document["warnings"] = [asdict(warning) for warning in report.warnings]
    document["facts"] = {
        "source": report.facts.source,
        "device_type": report.facts.device_type,
        "host": report.facts.host.to_json(),
    }
    document["hardware"] = {
        "describe": report.hardware.describe(),
        "memory_bytes": report.hardware.memory_bytes,
        "memory_bytes_per_s": report.hardware.memory_bytes_per_s,
        "near_link": report.hardware.near.value,
        "near_bytes_per_s": report.hardware.near_bytes_per_s,
        "network_bytes_per_s": report.hardware.network.bytes_per_s
        if report.hardware.network
        else None,
        "is_guessed": report.hardware.is_guessed,
    }
    document["traffic"] = {
        "step_tokens": report.step_tokens,
        "groups": [_plain(asdict(transfer)) for transfer in report.transfers],
    }
    document["estimate"] = estimate_to_json(report.estimate) if report.estimate else None
    if document["memory"] is not None and report.fit is not None:
        document["memory"]["kv_tokens"] = report.fit.kv_tokens
        document["memory"]["fit"] = [
            {
                "ranks": [list(pair) for pair in group.ranks],
                "weight_bytes": group.memory.weight_bytes,
                "kv_bytes_per_token": group.memory.kv_bytes_per_token,
                "kv_bytes": group.budget.kv_bytes if group.budget else None,
                "kv_tokens": group.budget.num_tokens if group.budget else None,
                "other_bytes": group.budget.other_bytes if group.budget else None,
            }
            for group in report.fit.groups
        ]
    return document


def estimate_to_json(estimate: Estimate) -> dict[str, Any]:
    """Seconds, in parts; null where the speed of a link that they take is not known."""
    return {
        "latency_s": estimate.latency_s if estimate.is_known else None,
        "tokens_per_s": estimate.tokens_per_s if estimate.is_known else None,
        "kv_tokens": estimate.kv_tokens,
        "num_requests": estimate.num_requests,
        "single": _step_to_json(estimate.single),
        "loaded": _step_to_json(estimate.loaded),
    }


def _step_to_json(step: StepEstimate) -> dict[str, Any]:
    return {
        "latency_s": None if step.unknown else step.latency_s,
        "weights_s": step.weights_s,
        "kv_s": step.kv_s,
        "compute_s": step.compute_s,
        "overhead_s": step.overhead_s,
        "communication_s": {**step.communication_s, **dict.fromkeys(step.unknown)},
    }


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: str(value) if key in ("kind", "link") else value for key, value in values.items()}


def _once(warnings: tuple[PlanWarning, ...]) -> tuple[PlanWarning, ...]:
    return tuple(dict.fromkeys(warnings))
