"""Where the facts come from, what fits into memory, what the links carry, what a step takes."""

from collections.abc import Sequence
from typing import Final

from vcli.cli.topo_report import TopoReport
from vcli.cli.views.text import bytes_text, columns, fill, plural, seconds_text, short_list
from vcli.topology.estimate import Estimate, StepEstimate

UNKNOWN_LINK: Final = "? takes a network of unknown speed: --link 400Gb, or 8x400Gb, gives it"


def cost_sections(report: TopoReport, *, width: int) -> list[list[str]]:
    """Facts, memory, experts, links and estimate, those that there are."""
    sections = (
        facts_lines(report, width=width),
        fit_lines(report, width=width),
        expert_lines(report),
        link_lines(report, width=width),
        estimate_lines(report, width=width),
    )
    return [lines for lines in sections if lines]


def facts_lines(report: TopoReport, *, width: int) -> list[str]:
    """Which machines the plan is for."""
    lines = fill(f"facts  {report.facts.source}".split(" "), width=width, indent="")
    if report.facts.device_type == "cuda":
        lines += fill(report.hardware.describe().split(" "), width=width, indent="       ")
    return lines


def fit_lines(report: TopoReport, *, width: int) -> list[str]:
    """Weights, KV bytes and the tokens that fit, ranks that hold equally much in one line."""
    memory, fit = report.plan.memory, report.fit
    if memory is None or fit is None:
        return []
    name = f"{report.model.name}, " if report.model else ""
    head = f"memory {name}{memory.num_parameters / 1e6:,.1f} M parameters, {memory.dtype}"
    lines = fill(head.split(" "), width=width, indent="")
    rows = [["ranks", "weights", "KV a token", "KV cache", "tokens"]]
    for group in fit.groups:
        budget = group.budget
        rows.append(
            [
                short_list([rank for _, rank in group.ranks]),
                bytes_text(group.memory.weight_bytes),
                bytes_text(group.memory.kv_bytes_per_token),
                bytes_text(budget.kv_bytes) if budget else "?",
                f"{budget.num_tokens:,}" if budget else "?",
            ]
        )
    lines += columns(rows, indent="  ")
    if fit.kv_tokens is not None and report.max_model_len:
        times = fit.kv_tokens / report.max_model_len
        text = (
            f"a replica holds {fit.kv_tokens:,} tokens: {times:,.1f} sequences of "
            f"{report.max_model_len:,}"
        )
        lines += fill(text.split(" "), width=width, indent="  ")
    return lines


def expert_lines(report: TopoReport) -> list[str]:
    """Which experts each EP rank holds, the first and the last of many."""
    experts = report.plan.experts
    if experts is None:
        return []
    lines = [f"experts  {experts.num_experts} in each layer, by EP rank"]
    held = experts.experts_of_rank
    shown = list(enumerate(held)) if len(held) <= 8 else [(0, held[0]), (1, held[1])]
    lines += [f"  {rank}: {short_list(numbers)}" for rank, numbers in shown]
    if len(held) > 8:
        lines.append(f"  … {len(held) - 1}: {short_list(held[-1])}")
    return lines


def link_lines(report: TopoReport, *, width: int) -> list[str]:
    """Bytes that each kind of group moves in a decode step, over which link, for how long."""
    if not report.transfers:
        return []
    if report.plan.model is None:
        return _links_without_bytes(report, width=width)
    step = plural(report.step_tokens, "token")
    lines = [f"links (one rank of a replica sends, decode step of {step})"]
    rows = [["group", "slowest link", "over nodes", "calls", "a token", "a step", "time"]]
    rows += [
        [
            f"{item.kind} {item.group_size}",
            item.link.value,
            f"{item.num_network_groups}/{item.num_groups}",
            str(item.num_calls),
            bytes_text(item.bytes_per_token),
            bytes_text(item.bytes_per_step),
            seconds_text(item.seconds),
        ]
        for item in report.transfers
    ]
    table = columns(rows, indent="  ")
    if max(map(len, table)) > width:
        rows = [[*row[:2], *row[3:]] for row in rows]
        table = columns(rows, indent="  ")
    lines += table
    for transfer in report.transfers:
        if transfer.network_bytes:
            leaving = bytes_text(transfer.network_bytes)
            text = f"{transfer.kind}: {leaving} leave the busiest node in a step"
            lines += fill(text.split(" "), width=width, indent="  ")
    return lines


def _links_without_bytes(report: TopoReport, *, width: int) -> list[str]:
    lines = ["links (bytes and times need a model)"]
    for item in report.transfers:
        crossing = f", {item.num_network_groups} over nodes" if item.num_network_groups else ""
        groups = f"{plural(item.num_groups, 'group')} of {item.group_size}{crossing}"
        lines += fill([f"{item.kind}:", groups, "·", item.link.value], width=width, indent="  ")
    return lines


def estimate_lines(report: TopoReport, *, width: int) -> list[str]:
    """Latency of one request and throughput of all, with the parts."""
    estimate = report.estimate
    if estimate is None or report.facts.device_type != "cuda":
        return []
    work = report.workload
    lines = fill(
        f"estimate (by formula, not measured; {work.num_requests} requests of "
        f"{work.context_tokens:,} tokens)".split(" "),
        width=width,
        indent="",
    )
    rows = [
        ["one request", f"{latency_text(estimate)} a token"],
        ["all", _throughput(estimate, work.num_requests)],
    ]
    lines += columns(rows, indent="  ")
    if not estimate.is_known:
        lines += fill(UNKNOWN_LINK.split(), width=width, indent="  ")
    lines += fill(f"parts: {parts_text(estimate.single)}".split(" "), width=width, indent="  ")
    return lines


def latency_text(estimate: Estimate) -> str:
    """Time of a token of one request."""
    return seconds_text(estimate.latency_s if estimate.is_known else None)


def rate_text(estimate: Estimate) -> str:
    """Tokens per second of all requests."""
    return f"{estimate.tokens_per_s:,.0f}" if estimate.is_known else "?"


def parts_text(step: StepEstimate) -> str:
    """`weights 3.47 ms + KV 31 µs + layers 1.41 ms + TP ?`."""
    parts = [("weights", step.weights_s), ("KV", step.kv_s), ("compute", step.compute_s)]
    parts += [("layers", step.overhead_s), *step.communication_s.items()]
    texts = [f"{name} {seconds_text(value)}" for name, value in parts if value > 0]
    return " + ".join([*texts, *(f"{name} ?" for name in step.unknown)])


def _throughput(estimate: Estimate, wanted: int) -> str:
    text = f"{rate_text(estimate)} tokens/s"
    if estimate.num_requests < wanted:
        text += f", {estimate.num_requests} requests at once (KV cache)"
    return text


def join_sections(sections: Sequence[Sequence[str]]) -> str:
    """Sections with an empty line between them."""
    return "\n\n".join("\n".join(lines) for lines in sections if lines)
