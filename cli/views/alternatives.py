"""Other layouts: all valid ones ranked, or one beside another."""

from typing import Any

from vcli.cli.topo_report import TopoReport, estimate_to_json
from vcli.cli.views.costs import UNKNOWN_LINK, latency_text, parts_text, rate_text
from vcli.cli.views.text import bytes_text, columns, fill, seconds_text
from vcli.topology.suggest import Suggestion, Suggestions, layout_flags

_MAX_ROWS = 20
_MAX_PARTS = 3
_UNSERVED = "*"


def suggest_view(found: Suggestions, *, title: str, width: int) -> str:
    """The layouts by latency, the parts of the best, and what was left out."""
    lines = fill(title.split(" "), width=width, indent="")
    rows = [["#", "layout", "a token", "tokens/s", "#", "KV tokens"]]
    for item in found.layouts[:_MAX_ROWS]:
        estimate = item.estimate
        kv = "?" if estimate.kv_tokens is None else f"{estimate.kv_tokens:,}"
        rows.append(
            [
                str(item.latency_rank),
                _marked(item),
                latency_text(estimate),
                rate_text(estimate),
                str(item.throughput_rank),
                kv,
            ]
        )
    lines += ["", *columns(rows)]
    if len(found.layouts) > _MAX_ROWS:
        lines.append(f"… {len(found.layouts) - _MAX_ROWS} more (--json has them all)")
    if not all(item.estimate.is_known for item in found.layouts):
        lines += fill(UNKNOWN_LINK.split(), width=width, indent="")
    lines += _best(found, width=width)
    left_out = []
    if found.too_large:
        left_out.append(f"{found.too_large} whose weights leave no room for one request")
    if found.refused:
        left_out.append(f"{found.refused} that a rule forbids")
    if left_out:
        lines.append(f"left out: {'; '.join(left_out)}")
    note = (
        "Estimates by formula, not measured; KV tokens are those of one replica. The first # "
        "ranks latency, the second throughput."
    )
    if any(item.plan.config.unserved_flags for item in found.layouts):
        note += f" {_UNSERVED} is planned for any engine, and not served by vcli yet."
    lines += fill(note.split(), width=width, indent="")
    return "\n".join(lines)


def _marked(item: Suggestion) -> str:
    """The flags of a layout, marked where vcli itself does not serve it."""
    return item.flags + (f" {_UNSERVED}" if item.plan.config.unserved_flags else "")


def _best(found: Suggestions, *, width: int) -> list[str]:
    fastest = found.layouts[0]
    busiest = min(found.layouts, key=lambda item: item.throughput_rank)
    lines = [""]
    if fastest.estimate.is_known:
        lines += [
            f"lowest latency      {_marked(fastest)}",
            f"highest throughput  {_marked(busiest)}",
        ]
    lines.append("parts of a token (one request)")
    for item in _worth_explaining(found, busiest):
        words = f"{item.flags}: {parts_text(item.estimate.single)}".split(" ")
        filled = fill(words, width=width, indent="    ")
        lines += ["  " + filled[0].strip(), *filled[1:]]
    return lines


def suggestions_to_json(found: Suggestions) -> dict[str, Any]:
    """All layouts with the parts of their estimates."""
    return {
        "layouts": [
            {
                "flags": item.flags,
                "latency_rank": item.latency_rank,
                "throughput_rank": item.throughput_rank,
                "estimate": estimate_to_json(item.estimate),
                "warnings": [warning.id for warning in item.plan.warnings],
            }
            for item in found.layouts
        ],
        "too_large": found.too_large,
        "refused": found.refused,
    }


def compare_view(first: TopoReport, second: TopoReport, *, width: int) -> str:
    """Two plans side by side; rows that differ are marked."""
    rows = [["", layout_flags(first.plan.config), layout_flags(second.plan.config), ""]]
    most = (width - 30) // 2
    for name, ours, theirs in compare_rows(first, second):
        rows.append([name, _cut(ours, most), _cut(theirs, most), "" if ours == theirs else "*"])
    lines = columns(rows)
    for report in (first, second):
        if report.warnings:
            lines += ["", f"findings of {layout_flags(report.plan.config)}"]
        for warning in report.warnings:
            words = f"! {warning.message} [{warning.id}]".split()
            filled = fill(words, width=width, indent="    ")
            lines += ["  " + filled[0].strip(), *filled[1:]]
    return "\n".join(lines)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def compare_rows(first: TopoReport, second: TopoReport) -> list[tuple[str, str, str]]:
    """(what, of the first, of the second)."""
    ours, theirs = _facts(first), _facts(second)
    names = dict.fromkeys((*ours, *theirs))
    return [(name, ours.get(name, "-"), theirs.get(name, "-")) for name in names]


def _facts(report: TopoReport) -> dict[str, str]:
    plan = report.plan
    totals = plan.totals
    facts = {
        "ranks": str(len(plan.ranks)),
        "ranks of a replica": str(plan.world_size),
        "output rank": str(plan.output_rank),
        "back end": plan.backend.value,
        "rendezvous": plan.rendezvous.value.scheme,
        "all-reduce": ", then ".join(plan.all_reduce.value),
        "processes": str(totals.all) if totals else "-",
        "rings": bytes_text(plan.ring_bytes),
    }
    for kind, groups in plan.groups.items():
        facts[f"{kind} groups"] = f"{len(groups)} of {len(groups[0])}"
    if plan.memory is not None:
        facts["weights, fullest rank"] = bytes_text(plan.memory.max_weight_bytes)
        kv = max(rank.kv_bytes_per_token for rank in plan.memory.ranks)
        facts["KV a token and rank"] = bytes_text(kv)
    if report.fit is not None and report.fit.kv_tokens is not None:
        facts["KV tokens of a replica"] = f"{report.fit.kv_tokens:,}"
    for item in report.transfers:
        facts[f"{item.kind} link"] = item.link.value
        if plan.model is not None:
            facts[f"{item.kind} a token"] = bytes_text(item.bytes_per_token)
            facts[f"{item.kind} time a step"] = seconds_text(item.seconds)
    if report.estimate is not None:
        facts["latency a token"] = latency_text(report.estimate)
        facts["tokens/s"] = rate_text(report.estimate)
    return facts


def _worth_explaining(found: Suggestions, busiest: Suggestion) -> list[Suggestion]:
    chosen = list(found.layouts[:_MAX_PARTS])
    return chosen if busiest in chosen else [*chosen, busiest]
