"""The load on a server: when requests are sent, and what became of them.

It ends when every request has ended, when somebody stops it, or when the server is gone.
"""

import asyncio
import contextlib
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from vcli.runtime.bench.http_client import HttpClient, ServerAddress
from vcli.runtime.bench.serve_client import ServeClient, served_model
from vcli.runtime.bench.serve_spec import RequestRecord, ServeBenchSpec
from vcli.runtime.bench.stats import Distribution
from vcli.runtime.launch.stop_signals import StopSignals
from vcli.topology.errors import ExitStatus

_NOTE_EVERY_S: Final = 5.0
#: what differs in messages that say the same: numbers and ids, but not the status
_NUMBERS: Final = re.compile(r"(?<!HTTP )\b[0-9a-f-]*[0-9][0-9a-f-]*")


@dataclass(slots=True)
class FailureKind:
    """Failures that say the same; `error` is the first of them."""

    error: str
    count: int = 0


@dataclass(slots=True, kw_only=True)
class ServeBenchResult:
    """What is known; `records` has ended requests alone."""

    spec: ServeBenchSpec
    model: str = ""
    prompts: str = ""
    counts_from: str = ""
    """`usage`, or `chunks` where the server reports no counts."""
    records: list[RequestRecord] = field(default_factory=list)
    duration_s: float = 0.0
    status: ExitStatus = ExitStatus.OK
    is_server_gone: bool = False

    @property
    def successes(self) -> list[RequestRecord]:
        """Requests with their whole answer."""
        return [record for record in self.records if not record.error]

    @property
    def failures(self) -> list[RequestRecord]:
        """The others that were sent."""
        return [record for record in self.records if record.error]

    @property
    def num_unsent(self) -> int:
        """Requests that nobody sent, or whose answer was not waited for."""
        return self.spec.num_prompts - len(self.records)

    def failure_kinds(self) -> list["FailureKind"]:
        """The failures by what was said, numbers aside; the most frequent kind first."""
        kinds: dict[str, FailureKind] = {}
        for record in sorted(self.failures, key=lambda record: record.ended_s):
            kind = kinds.setdefault(_NUMBERS.sub("#", record.error), FailureKind(record.error))
            kind.count += 1
        return sorted(kinds.values(), key=lambda kind: -kind.count)

    def per_second(self, amount: float) -> float:
        """`amount` by the duration."""
        return amount / self.duration_s if self.duration_s else 0.0

    def latencies(self) -> dict[str, Distribution | None]:
        """TTFT, TPOT, ITL and E2E of the successes, in seconds."""
        done = self.successes
        return {
            "ttft_s": Distribution.of([r.ttft_s for r in done if r.ttft_s is not None]),
            "tpot_s": Distribution.of([r.tpot_s for r in done if r.tpot_s is not None]),
            "itl_s": Distribution.of([gap for record in done for gap in record.itl_s]),
            "e2e_s": Distribution.of([record.e2e_s for record in done]),
        }


def run_serve_bench(
    spec: ServeBenchSpec,
    address: ServerAddress,
    *,
    model: str | None,
    headers: Mapping[str, str],
    note: Callable[[str], None],
) -> ServeBenchResult:
    """Run the load; blocks. What happens to requests stands in the result.

    Raises:
        ConfigError: nobody is there, no such model, or requests that the server refuses.
        UnfitError: the server cannot answer.
    """
    return asyncio.run(_Load(spec, address, model, headers, note).run())


class _Load:
    def __init__(
        self,
        spec: ServeBenchSpec,
        address: ServerAddress,
        model: str | None,
        headers: Mapping[str, str],
        note: Callable[[str], None],
    ) -> None:
        self._spec = spec
        self._model = model
        self._note = note
        self._client = HttpClient(address, headers=headers)
        self._result = ServeBenchResult(spec=spec)
        self._server_gone = asyncio.Event()

    async def run(self) -> ServeBenchResult:
        signals = StopSignals()
        signals.install()
        work = asyncio.create_task(self._work())
        stops = [
            asyncio.create_task(signals.first.wait()),
            asyncio.create_task(self._server_gone.wait()),
        ]
        try:
            await asyncio.wait({work, *stops}, return_when=asyncio.FIRST_COMPLETED)
            work.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await work
        finally:
            for stop in stops:
                stop.cancel()
            self._client.close()
            signals.uninstall()
        result = self._result
        result.is_server_gone = self._server_gone.is_set()
        if signals.exit_status is not ExitStatus.OK:
            result.status = signals.exit_status
        elif any(record.is_connection_lost for record in result.records):
            result.status = ExitStatus.DIED_SERVING
        elif result.failures:
            result.status = ExitStatus.UNFIT
        return result

    async def _work(self) -> None:
        result, spec = self._result, self._spec
        result.model = self._model or await served_model(self._client)
        client = ServeClient(self._client, spec, result.model)
        refusals = await client.settle()
        result.prompts = client.dialect.prompts
        result.counts_from = "usage" if client.dialect.has_extras else "chunks"
        if refusals:
            for refusal in refusals:
                self._note(f"! the server refused {refusal}")
            self._note(f"! so prompts are {result.prompts}, token counts from {result.counts_from}")
        began_s = time.monotonic()
        places = asyncio.Semaphore(spec.max_concurrency or spec.num_prompts)
        progress = asyncio.create_task(self._tell_progress(client))
        try:
            async with asyncio.TaskGroup() as group:
                for index, start_s in enumerate(spec.start_times()):
                    await asyncio.sleep(max(began_s + start_s - time.monotonic(), 0))
                    # Here, not in the task: to cancel many that wait takes quadratic time.
                    await places.acquire()
                    group.create_task(self._one(client, index, places))
        finally:
            progress.cancel()
            result.duration_s = time.monotonic() - began_s

    async def _one(self, client: ServeClient, index: int, places: asyncio.Semaphore) -> None:
        try:
            record = await client.measure(index)
        finally:
            places.release()
        self._result.records.append(record)
        if record.is_connection_lost and not await self._client.is_listening():
            # What is still to be sent would fail in the same way, one after the other.
            self._server_gone.set()

    async def _tell_progress(self, client: ServeClient) -> None:
        while True:
            await asyncio.sleep(_NOTE_EVERY_S)
            result = self._result
            failed = f", {len(result.failures)} failed" if result.failures else ""
            running = sum(len(record.arrivals) for record in client.running)
            tokens = sum(record.output_tokens for record in result.records) + running
            self._note(
                f"{len(result.records)} of {self._spec.num_prompts} requests{failed}, "
                f"{'about ' if running else ''}{tokens:,} of "
                f"{self._spec.num_prompts * self._spec.output_len:,} output tokens"
            )
