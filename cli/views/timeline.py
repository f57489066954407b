"""When each process reached which state of its start, as one table.

All times are seconds since the command began, so that rows can be compared.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from vcli.runtime.messages import ChildFailure, ChildMessage, ChildSignalled, ChildState

_READY: Final = "ready"
FIRST_TOKEN: Final = "first token"

#: t0 to t10; a state that no process reported has no column.
STATES: Final = (
    "spawned",
    "imported",
    "device",
    "joined",
    "groups",
    "weights",
    "memory",
    "kv",
    "warm-up",
    _READY,
    FIRST_TOKEN,
)


@dataclass(slots=True)
class ProcessTimeline:
    """One process: when it was started, and what it reached how long after that."""

    process: str
    pid: int
    started_s: float
    reached_s: dict[str, float] = field(default_factory=dict)

    def at(self, state: str) -> float | None:
        """When it reached `state`; None where it did not.

        A worker says that it is ready once it takes calls; what it still does then, from its
        memory to the warm-up, it is called to do. It is ready to serve after the last of that.
        """
        seconds = self.reached_s.get(state)
        if state == _READY and seconds is not None:
            seconds = max(
                self.reached_s.get(name, 0.0) for name in STATES[: STATES.index(_READY) + 1]
            )
        return None if seconds is None else self.started_s + seconds


class StartupTimeline:
    """Collects the messages of all processes. `begin_s` is on the monotonic clock. Thread-safe.

    A process counts from its own start, which this one did not see: it is at the latest as long
    before the arrival of a message as the message says, and the earliest such moment is kept.
    """

    def __init__(self, begin_s: float) -> None:
        self._begin_s = begin_s
        self._lock = threading.Lock()
        self._rows: dict[tuple[str, int], ProcessTimeline] = {}

    def take(self, message: ChildMessage, now_s: float) -> None:
        """Note one message that arrived at `now_s`; of a state the last report counts."""
        if isinstance(message, ChildFailure | ChildSignalled):
            return
        state = message.state if isinstance(message, ChildState) else _READY
        started_s = now_s - self._begin_s - message.seconds
        key = (message.process, message.pid)
        with self._lock:
            row = self._rows.setdefault(
                key, ProcessTimeline(message.process, message.pid, started_s)
            )
            row.started_s = min(row.started_s, started_s)
            row.reached_s[state] = message.seconds

    def rows(self) -> list[ProcessTimeline]:
        """The processes in the order of their start."""
        with self._lock:
            return sorted(self._rows.values(), key=lambda row: row.started_s)


def timeline_lines(timeline: StartupTimeline) -> Sequence[str]:
    """The table; under each state the second in which the process had reached it."""
    rows = timeline.rows()
    states = [state for state in STATES if any(state in row.reached_s for row in rows)]
    numbered = [f"t{STATES.index(state)} {state}" for state in states]
    table = [["process", "pid", "started", *numbered]]
    for row in rows:
        times = [row.at(state) for state in states]
        cells = ["-" if time is None else f"{time:.2f}" for time in times]
        table.append([row.process, str(row.pid), f"{row.started_s:.2f}", *cells])
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]
