"""Figures of `vcli bench serve` as text and as JSON."""

import math
from dataclasses import asdict
from typing import Any

from vcli.cli.views.tables import fitted
from vcli.cli.views.text import hanging, plural
from vcli.runtime.bench.http_client import ServerAddress
from vcli.runtime.bench.serve import ServeBenchResult
from vcli.runtime.bench.stats import Distribution, HostFacts

_MAX_KINDS = 20
_MAX_SHOWN_KINDS = 5
_TITLES = {"ttft_s": "TTFT", "tpot_s": "TPOT", "itl_s": "ITL", "e2e_s": "E2E"}


def serve_document(
    host: HostFacts, address: ServerAddress, result: ServeBenchResult
) -> dict[str, Any]:
    """The content of the JSON document: units are in the names; an infinite rate is null."""
    spec = asdict(result.spec)
    if math.isinf(result.spec.request_rate):
        spec["request_rate"] = None
    failures = sorted(result.failures, key=lambda record: record.ended_s)
    return {
        "host": asdict(host),
        "server": address.authority + address.prefix,
        "model": result.model,
        "spec": spec,
        "prompts": result.prompts,
        "counts_from": result.counts_from,
        "successes": len(result.successes),
        "failures": len(failures),
        "unfinished": result.num_unsent,
        "first_error": failures[0].error if failures else None,
        "failure_kinds": [asdict(kind) for kind in result.failure_kinds()[:_MAX_KINDS]],
        "duration_s": result.duration_s,
        **_throughput(result),
        **{
            name: asdict(samples) if samples else None
            for name, samples in result.latencies().items()
        },
    }


def serve_table(
    host: HostFacts, address: ServerAddress, result: ServeBenchResult, *, width: int
) -> str:
    """What was asked, the throughput, and a line for each latency."""
    spec, rates = result.spec, _throughput(result)
    rate = "all at once" if math.isinf(spec.request_rate) else f"{spec.request_rate:g}/s on average"
    limit = f", at most {spec.max_concurrency} at a time" if spec.max_concurrency else ""
    sent_as = f" (sent as {result.prompts})" if result.prompts else ""
    unfinished = f", {result.num_unsent} not finished" if result.num_unsent else ""
    lines = [
        f"{address.authority}{address.prefix}, model {result.model or '-'}, {spec.endpoint}, "
        f"{host.date}",
        f"{spec.num_prompts} requests {rate}{limit}: {spec.input_len} prompt tokens "
        f"each{sent_as}, {spec.output_len} output tokens",
        f"{len(result.successes)} succeeded, {len(result.failures)} failed{unfinished}, "
        f"{result.duration_s:.2f} s",
        f"{rates['requests_per_s']:.2f} requests/s, {rates['output_tokens_per_s']:,.1f} output "
        f"tok/s, {rates['total_tokens_per_s']:,.1f} tok/s with prompts "
        f"(tokens counted by {result.counts_from or '-'})",
        "",
    ]
    cells: list[tuple[str, ...]] = [("ms", "mean", "median", "p90", "p99")]
    cells += [
        (_TITLES[name], *_milliseconds(samples)) for name, samples in result.latencies().items()
    ]
    head = hanging("\n".join(lines), width=width, hang=2)
    return "\n".join([*head, *fitted(cells, width=width)])


def failures_text(result: ServeBenchResult) -> str:
    """How many requests failed, and a line for each of the most frequent kinds."""
    kinds = result.failure_kinds()
    shown = kinds[:_MAX_SHOWN_KINDS]
    lines = [f"{len(result.failures)} of {len(result.records)} requests failed"]
    lines += [f"  {kind.count} × {kind.error}" for kind in shown]
    if others := kinds[len(shown) :]:
        count = sum(kind.count for kind in others)
        lines.append(f"  {count} × {plural(len(others), 'other kind')} (--json has them)")
    return "\n".join(lines)


def request_rows(result: ServeBenchResult) -> list[dict[str, Any]]:
    """Every ended request, in the order in which they were made; sent since the first one."""
    records = sorted(result.records, key=lambda record: record.index)
    began_s = min((record.sent_s for record in records), default=0.0)
    return [
        {
            "index": record.index,
            "sent_s": record.sent_s - began_s,
            "prompt_tokens": record.prompt_tokens,
            "output_tokens": record.output_tokens,
            "ttft_s": record.ttft_s,
            "tpot_s": record.tpot_s,
            "e2e_s": record.e2e_s,
            "itl_s": record.itl_s,
            "error": record.error or None,
        }
        for record in records
    ]


def _throughput(result: ServeBenchResult) -> dict[str, float]:
    done = result.successes
    prompt_tokens = sum(record.prompt_tokens for record in done)
    output_tokens = sum(record.output_tokens for record in done)
    return {
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "requests_per_s": result.per_second(len(done)),
        "output_tokens_per_s": result.per_second(output_tokens),
        "total_tokens_per_s": result.per_second(prompt_tokens + output_tokens),
    }


def _milliseconds(samples: Distribution | None) -> tuple[str, ...]:
    if samples is None:
        return ("-",) * 4
    figures = (samples.mean, samples.median, samples.p90, samples.p99)
    return tuple(f"{seconds * 1e3:,.2f}" for seconds in figures)
