"""A report kept as the state that was good, and what differs from it later."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from vcli.diagnostics.check import Status
from vcli.diagnostics.report import Report
from vcli.topology import ConfigError, HostFacts

BASELINE_SCHEMA: Final = "vcli.baseline/1"

#: Facts whose change a person wants to hear of; free memory and the like change all the time.
_STEADY_FACTS: Final = (
    "hostname",
    "kernel",
    "python",
    "cpu_count",
    "cpu_model",
    "memory_total_bytes",
    "shm_total_bytes",
    "driver_version",
    "cuda_driver_version",
)
_SEVERITY: Final = {
    Status.PASS: 0,
    Status.SKIP: 0,
    Status.UNKNOWN: 1,
    Status.WARN: 2,
    Status.FAIL: 3,
}


def baseline_json(report: Report, host: HostFacts) -> dict[str, Any]:
    """What `changes_since` compares with."""
    return {
        "schema": BASELINE_SCHEMA,
        "host": host.to_json(),
        "checks": {
            result.id: {"status": result.status.value, "measured": result.measured}
            for result in report.results
        },
    }


def changes_since(
    baseline: Mapping[str, Any], report: Report, host: HostFacts
) -> tuple[dict[str, str], ...]:
    """What is otherwise than in the baseline: `{subject, before, now}`, worse checks first.

    Raises:
        ConfigError: this is no baseline.
    """
    kept, facts = baseline.get("checks"), baseline.get("host")
    if baseline.get("schema") != BASELINE_SCHEMA or not isinstance(kept, Mapping):
        raise ConfigError(
            "the baseline file holds no baseline", hint="vcli doctor --save-baseline FILE"
        )
    before_host = HostFacts.from_json(facts if isinstance(facts, Mapping) else {})
    return (*_check_changes(kept, report), *_fact_changes(before_host, host))


def _check_changes(kept: Mapping[str, Any], report: Report) -> Sequence[dict[str, str]]:
    found: list[tuple[int, dict[str, str]]] = []
    for result in report.results:
        before = kept.get(result.id)
        if not isinstance(before, Mapping) or before.get("status") == result.status.value:
            continue
        try:
            step = _SEVERITY[result.status] - _SEVERITY[Status(str(before.get("status")))]
        except ValueError:
            continue
        if step:
            change = {
                "subject": result.id,
                "before": f"{before.get('status')}: {before.get('measured')}",
                "now": f"{result.status.value}: {result.measured}",
            }
            found.append((-step, change))
    return [change for _, change in sorted(found, key=lambda item: item[0])]


def _fact_changes(before: HostFacts, now: HostFacts) -> Sequence[dict[str, str]]:
    old, new = before.to_json(), now.to_json()
    pairs = {name: (old[name], new[name]) for name in _STEADY_FACTS}
    pairs["gpus"] = (_gpu_names(before), _gpu_names(now))
    pairs["links"] = (
        [f"{link.first}-{link.second} {link.kind}" for link in before.links],
        [f"{link.first}-{link.second} {link.kind}" for link in now.links],
    )
    pairs["nics"] = (_nic_names(before), _nic_names(now))
    return [
        {"subject": name, "before": str(one), "now": str(other)}
        for name, (one, other) in pairs.items()
        if one != other
    ]


def _gpu_names(host: HostFacts) -> list[str]:
    return [f"{gpu.name} {gpu.uuid}".strip() for gpu in host.gpus]


def _nic_names(host: HostFacts) -> list[str]:
    return [
        f"{nic.name} {'up' if nic.is_up else 'down'} mtu {nic.mtu} speed {nic.speed_mbit}"
        for nic in host.nics
        if not nic.is_loopback
    ]
