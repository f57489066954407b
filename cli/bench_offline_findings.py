"""What `vcli bench offline` found, for its views."""

from dataclasses import dataclass, field

from vcli.runtime.bench.floors import DeviceSpeed
from vcli.runtime.bench.offline import DeviceReport, WorkloadRuns
from vcli.runtime.bench.stats import Distribution
from vcli.runtime.config import EngineConfig
from vcli.topology import VcliError


@dataclass(slots=True, kw_only=True)
class OfflineFindings:
    """What is known so far; grows while it is measured."""

    config: EngineConfig
    started: dict[str, object] = field(default_factory=dict)
    ready_s: float | None = None
    first_token_s: float | None = None
    workloads: dict[str, WorkloadRuns] = field(default_factory=dict)
    rpc_us: Distribution | None = None
    device: DeviceReport | None = None
    speed: DeviceSpeed = field(default_factory=DeviceSpeed)
    error: VcliError | None = None
