"""Decisions and their reasons as text."""

from vcli.cli.views.text import fill
from vcli.topology import TopologyPlan


def decision_lines(plan: TopologyPlan, *, width: int) -> list[str]:
    """One decision a line, its reasons behind it."""
    lines = ["decisions"]
    for decision in plan.decisions:
        words = decision.describe().split()
        filled = fill(words, width=width, indent=" " * 6)
        lines.append("  " + filled[0].strip())
        lines += filled[1:]
    return lines
