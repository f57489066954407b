"""Runs workloads on an offline engine and sums up what it saw.

All times are the front end's: a token counts when this process has it.
"""

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from vcli.runtime.bench.offline_engine import OfflineEngine, RequestTimes
from vcli.runtime.bench.stats import Distribution, process_age_s
from vcli.runtime.bench.workloads import Workload

_NUM_WARM_CALLS: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineRun:
    """One run of a workload. `ttft_s` of each request, `itl_s` of each token after its first."""

    wall_s: float
    prompt_tokens: int
    output_tokens: int
    ttft_s: Distribution | None
    itl_s: Distribution | None

    @property
    def output_tokens_per_s(self) -> float:
        """Generated tokens of all requests."""
        return self.output_tokens / self.wall_s

    @property
    def total_tokens_per_s(self) -> float:
        """Prompt and generated tokens of all requests."""
        return (self.prompt_tokens + self.output_tokens) / self.wall_s


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadRuns:
    """The runs of one workload so far, in their order."""

    workload: Workload
    runs: tuple[OfflineRun, ...]

    @property
    def best(self) -> OfflineRun:
        """The run that took least."""
        return min(self.runs, key=lambda run: run.wall_s)

    @property
    def ms_per_token(self) -> float | None:
        """Wall time per generated token of the best run; None for several requests at once."""
        if len(self.workload.requests) > 1:
            return None
        return self.best.wall_s / self.best.output_tokens * 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """What one rank's device holds, in bytes; see `BenchExtension.bench_device`."""

    rank: int
    peak_bytes: int
    used_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReport:
    """The devices of all ranks after the runs; the name is empty for a CPU."""

    name: str
    versions: dict[str, str]
    memory: tuple[RankMemory, ...]


class OfflineBench:
    """The measurements on one started engine."""

    def __init__(self, engine: OfflineEngine) -> None:
        self._engine = engine
        #: Age of this process when the first token of all came; None before.
        self.first_token_age_s: float | None = None

    def run_all(
        self, workloads: Sequence[Workload], *, repeat: int
    ) -> Generator[WorkloadRuns, None, None]:
        """Each workload `repeat` times in a row; yields after every run.

        Raises:
            EngineDeadError, RequestError, RpcTimeoutError: see `OfflineEngine.generate`.
        """
        for workload in workloads:
            runs: tuple[OfflineRun, ...] = ()
            for _ in range(repeat):
                runs = (*runs, self._run(workload))
                yield WorkloadRuns(workload=workload, runs=runs)

    def call_us(self, count: int) -> Distribution | None:
        """Microseconds of a call of nothing on all ranks, there and back, `count` times."""
        for _ in range(_NUM_WARM_CALLS if count else 0):
            self._engine.call_ranks("bench_noop")
        samples = []
        for _ in range(count):
            began = time.perf_counter()
            self._engine.call_ranks("bench_noop")
            samples.append((time.perf_counter() - began) * 1e6)
        return Distribution.of(samples)

    def memory_bytes_per_s(self) -> float:
        """Speed of the slowest rank's memory, by a copy in it."""
        return min(map(float, self._engine.call_ranks("bench_copy")))

    def device_report(self) -> DeviceReport:
        """Name, versions and memory of the devices."""
        ranks: list[dict[str, Any]] = self._engine.call_ranks("bench_device")
        return DeviceReport(
            name=ranks[0]["name"],
            versions=ranks[0]["versions"],
            memory=tuple(
                RankMemory(rank=rank, peak_bytes=each["peak_bytes"], used_bytes=each["used_bytes"])
                for rank, each in enumerate(ranks)
            ),
        )

    def _run(self, workload: Workload) -> OfflineRun:
        began_s = time.monotonic()
        times = self._engine.generate(workload.requests, temperature=workload.temperature)
        wall_s = time.monotonic() - began_s
        if self.first_token_age_s is None:
            first_s = min(each.arrivals[0][0] for each in times)
            self.first_token_age_s = process_age_s() - (time.monotonic() - first_s)
        return OfflineRun(
            wall_s=wall_s,
            prompt_tokens=workload.prompt_tokens,
            output_tokens=sum(len(each.token_ids) for each in times),
            ttft_s=Distribution.of([each.ttft_s for each in times]),
            itl_s=Distribution.of(_gaps(times)),
        )


def _gaps(times: Sequence[RequestTimes]) -> list[float]:
    return [gap for each in times for gap in each.itl_s]
