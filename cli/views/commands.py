"""`--print-commands`: the line of each node, for each engine."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from vcli.cli.hosts import HostList
from vcli.topology.commands import NodeCommand


def commands_view(commands: Sequence[NodeCommand], hosts: HostList) -> str:
    """Lines to copy: a comment with the node before each; long lines are not broken."""
    lines = [f"# nodes from {hosts.source}"]
    if hosts.node_rank is not None:
        lines.append(f"# this is node {hosts.node_rank}")
    engine = ""
    for command in commands:
        if command.engine != engine:
            engine = command.engine
            lines += ["", f"# {engine}"]
        if not command.line:
            lines.append(f"# not possible: {command.note}")
            continue
        lines += [f"# node{command.node_rank} {command.host}", command.line]
    return "\n".join(lines)


def commands_to_json(commands: Sequence[NodeCommand], hosts: HostList) -> dict[str, Any]:
    """The same as values."""
    return {
        "hosts": list(hosts.hosts),
        "source": hosts.source,
        "node_rank": hosts.node_rank,
        "commands": [asdict(command) for command in commands],
    }
