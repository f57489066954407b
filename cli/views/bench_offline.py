"""Figures of `vcli bench offline` as text and as JSON."""

from dataclasses import asdict
from typing import Any

from vcli.cli.bench_offline_findings import OfflineFindings
from vcli.cli.views.tables import fitted
from vcli.cli.views.text import bytes_text, hanging, plural
from vcli.runtime.bench.floors import Floors, workload_floors
from vcli.runtime.bench.offline import OfflineRun, WorkloadRuns
from vcli.runtime.bench.stats import Distribution, HostFacts

_UNKNOWN = "-"


def offline_document(host: HostFacts, findings: OfflineFindings) -> dict[str, Any]:
    """The content of the JSON document: units are in the names."""
    device, speed = findings.device, findings.speed
    return {
        "host": asdict(host),
        "device": {
            "name": _device_name(host, findings),
            "memory_bytes_per_s": speed.memory_bytes_per_s,
            "flops": speed.flops,
        },
        "versions": {**host.versions, **(device.versions if device else {})},
        "model": _model(findings),
        "plan": _plan(findings),
        "started": findings.started,
        "start": {"ready_s": findings.ready_s, "first_token_s": findings.first_token_s},
        "memory": [asdict(rank) for rank in device.memory] if device else [],
        "workloads": [_workload(findings, runs) for runs in findings.workloads.values()],
        "rpc_us": asdict(findings.rpc_us) if findings.rpc_us else None,
        "error": findings.error.message if findings.error else None,
    }


def offline_table(host: HostFacts, findings: OfflineFindings, *, width: int) -> str:
    """Where, what, and a line for each workload."""
    plan, device = _plan(findings), findings.device
    versions = {**host.versions, **(device.versions if device else {})}
    lines = [
        f"{_device_name(host, findings)}, {host.date}, Python {host.python}, "
        + ", ".join(f"{name} {version}" for name, version in versions.items()),
        f"{findings.config.model.served_name} {findings.config.model.dtype}, tp {plan['tp']}, "
        f"pp {plan['pp']}, back end {plan['backend']}, attention {plan['attention']}, "
        f"all-reduce {', then '.join(plan['all_reduce'])}",
        f"from the start of this process: ready {_seconds(findings.ready_s)}, first token "
        f"{_seconds(findings.first_token_s)}",
    ]
    if device:
        lines.append(
            f"memory of each rank: peak {_bytes(each.peak_bytes for each in device.memory)}, "
            f"in use {_bytes(each.used_bytes for each in device.memory)}"
        )
    lines = hanging("\n".join(lines), width=width, hang=2)
    if findings.workloads:
        lines += ["", *fitted(_rows(findings), width=width)]
    rpc = findings.rpc_us
    if rpc:
        call = (
            f"call of nothing on {plural(plan['world_size'], 'rank')}: median {rpc.median:.0f} µs, "
            f"min {rpc.min:.0f}, max {rpc.max:.0f} ({rpc.count} calls)"
        )
        lines += hanging(call, width=width, hang=2)
    return "\n".join(lines)


def _rows(findings: OfflineFindings) -> list[tuple[str, ...]]:
    head = (
        "workload",
        "requests",
        "tokens in/out",
        "wall s (all runs)",
        "out tok/s",
        "all tok/s",
        "ms/token",
        "TTFT ms p50/p99",
        "ITL ms p50/p99",
        "floor s bytes/ops",
        "of floor",
    )
    return [head, *(_row(findings, runs) for runs in findings.workloads.values())]


def _row(findings: OfflineFindings, runs: WorkloadRuns) -> tuple[str, ...]:
    best, floors = runs.best, _floors(findings, runs)
    all_runs = ", ".join(f"{run.wall_s:.3f}" for run in runs.runs)
    return (
        runs.workload.name,
        str(len(runs.workload.requests)),
        f"{best.prompt_tokens:,}/{best.output_tokens:,}",
        f"{best.wall_s:.3f} ({all_runs})",
        f"{best.output_tokens_per_s:,.1f}",
        f"{best.total_tokens_per_s:,.1f}",
        _UNKNOWN if runs.ms_per_token is None else f"{runs.ms_per_token:.3f}",
        _milliseconds(best.ttft_s),
        _milliseconds(best.itl_s),
        f"{_number(floors.bytes_s)}/{_number(floors.ops_s)}",
        _UNKNOWN if floors.larger_s is None else f"{best.wall_s / floors.larger_s:.2f}×",
    )


def _workload(findings: OfflineFindings, runs: WorkloadRuns) -> dict[str, Any]:
    workload, floors = runs.workload, _floors(findings, runs)
    return {
        "name": workload.name,
        "requests": len(workload.requests),
        "prompt_tokens": workload.prompt_tokens,
        "output_tokens": workload.output_tokens,
        "temperature": workload.temperature,
        **_run(runs.best),
        "ms_per_token": runs.ms_per_token,
        "runs": [_run(run) for run in runs.runs],
        "floors": {
            "bytes_s": floors.bytes_s,
            "ops_s": floors.ops_s,
            "wall_per_floor": runs.best.wall_s / floors.larger_s if floors.larger_s else None,
        },
    }


def _run(run: OfflineRun) -> dict[str, Any]:
    return {
        "wall_s": run.wall_s,
        "output_tokens_per_s": run.output_tokens_per_s,
        "total_tokens_per_s": run.total_tokens_per_s,
        "ttft_s": asdict(run.ttft_s) if run.ttft_s else None,
        "itl_s": asdict(run.itl_s) if run.itl_s else None,
    }


def _floors(findings: OfflineFindings, runs: WorkloadRuns) -> Floors:
    config = findings.config
    return workload_floors(
        config.plan,
        runs.workload,
        device=findings.speed,
        max_num_seqs=config.scheduler.max_num_seqs,
    )


def _model(findings: OfflineFindings) -> dict[str, Any]:
    model, memory = findings.config.model, findings.config.plan.memory
    return {
        "name": model.served_name,
        "architecture": model.spec.architecture,
        "dtype": model.dtype,
        "load_format": model.load_format,
        "max_model_len": model.max_model_len,
        "parameters": memory.num_parameters if memory else None,
    }


def _plan(findings: OfflineFindings) -> dict[str, Any]:
    plan = findings.config.plan
    return {
        "tp": plan.config.tp,
        "pp": plan.config.pp,
        "world_size": plan.world_size,
        "device_type": plan.device_type,
        "backend": plan.backend.value,
        "start_method": plan.start_method.value,
        "attention": plan.attention.value if plan.attention else None,
        "all_reduce": list(plan.all_reduce.value) if plan.config.tp > 1 else ["none"],
        "enforce_eager": findings.config.enforce_eager,
    }


def _device_name(host: HostFacts, findings: OfflineFindings) -> str:
    if findings.device and findings.device.name:
        return findings.device.name
    is_cpu = findings.config.plan.device_type == "cpu"
    return f"{host.num_cpus}× {host.cpu}" if is_cpu else "a GPU that nobody asked for its name"


def _bytes(sizes: Any) -> str:
    return ", ".join(bytes_text(size) for size in sizes)


def _milliseconds(samples: Distribution | None) -> str:
    return f"{samples.median * 1e3:.2f}/{samples.p99 * 1e3:.2f}" if samples else _UNKNOWN


def _seconds(seconds: float | None) -> str:
    return "not reached" if seconds is None else f"after {seconds:.2f} s"


def _number(seconds: float | None) -> str:
    return _UNKNOWN if seconds is None else f"{seconds:.3g}"
