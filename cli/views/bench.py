"""Figures of `vcli bench` as text and as JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from vcli.cli.views.tables import fitted
from vcli.cli.views.text import bytes_text, hanging
from vcli.runtime.bench.ipc import IpcBenchRow, IpcBenchSpec
from vcli.runtime.bench.ipc_deaths import DeathRow
from vcli.runtime.bench.stats import HostFacts, Summary


def document(
    host: HostFacts, spec: IpcBenchSpec, rows: Sequence[IpcBenchRow], deaths: Sequence[DeathRow]
) -> dict[str, Any]:
    """The content of the JSON document: units are in the names."""
    return {
        "host": asdict(host),
        "spec": asdict(spec),
        "rows": [asdict(row) for row in rows],
        "deaths": [asdict(row) for row in deaths],
    }


def table(
    host: HostFacts, rows: Sequence[IpcBenchRow], deaths: Sequence[DeathRow], *, width: int
) -> str:
    """A line per number of readers and payload, then one per end whose process was killed."""
    versions = ", ".join(f"{name} {version}" for name, version in host.versions.items())
    head = (
        f"{host.num_cpus}× {host.cpu}, Linux {host.kernel}, load {host.load:g}, {host.date}\n"
        f"Python {host.python}, {versions}\n"
    )
    lines = hanging(head, width=width, hang=2)
    cells = [
        (
            "readers",
            "payload",
            "round trip µs (p99)",
            "one-way µs (p99)",
            "messages/s",
            "rate",
            "CPU µs w/r",
            "idle CPU",
        )
    ]
    cells += [
        (
            str(row.readers),
            bytes_text(row.payload_bytes),
            _latency(row.round_trip_us),
            _latency(row.one_way_us),
            f"{row.messages_per_s:,.0f}",
            f"{bytes_text(row.bytes_per_s)}/s",
            f"{row.writer_cpu_us:.0f} / {row.reader_cpu_us:.0f}",
            f"{row.idle_cpu_s / row.idle_s:.3%}",
        )
        for row in rows
    ]
    return "\n".join([*lines, *fitted(cells, width=width), *_deaths(deaths, width)])


def _deaths(deaths: Sequence[DeathRow], width: int) -> list[str]:
    if not deaths:
        return []
    cells = [("killed", "times", "named after ms min", "median", "max")]
    for row in deaths:
        ms = row.named_ms
        figures = (f"{ms.min:.2f}", f"{ms.p50:.2f}", f"{ms.max:.2f}")
        cells.append((f"{row.killed}, the other end waits", str(ms.count), *figures))
    return ["", *fitted(cells, width=width)]


def _latency(summary: Summary) -> str:
    return f"{summary.p50:.1f} ({summary.p99:.1f})"
