"""What `serve` says while it starts, and in the end: states of all ranks, groups, the address."""

import os
import threading
import time
from collections.abc import Sequence

from vcli.cli.output import Output
from vcli.cli.views.memory import measured_lines
from vcli.cli.views.text import rank_list
from vcli.cli.views.timeline import FIRST_TOKEN, StartupTimeline, timeline_lines
from vcli.runtime.errors import FailureReport
from vcli.runtime.messages import (
    ChildMessage,
    ChildReady,
    ChildState,
    GroupReport,
    MemoryReport,
)
from vcli.topology import TopologyPlan
from vcli.topology.names import API_SERVER

_SLOW_LINE_S = 15.0


class StartupView:
    """Prints one line when every rank reached a state, and names those who are late.

    Called from any thread.
    """

    def __init__(
        self, output: Output, plan: TopologyPlan, name: str, *, has_timeline: bool = False
    ) -> None:
        self._output = output
        self._plan = plan
        self._name = name
        node_rank = plan.config.node_rank
        # Node 0 hears of all ranks, another node of its own.
        self._num_ranks = len(plan.local_ranks(node_rank)) if node_rank else plan.world_size
        self._lock = threading.Lock()
        # What the user waits for begins with the command, not here.
        self._started = output.environment.started_s
        self._timeline = StartupTimeline(self._started) if has_timeline else None
        self._reached: dict[str, set[int]] = {}
        self._latest: dict[int, ChildState] = {}
        self._last_line = self._started
        self._has_status_line = False
        stream = output.environment.stderr
        self._is_live = stream.isatty() and output.environment.environ.get("TERM") != "dumb"

    def on_message(self, message: ChildMessage) -> None:
        """A process reported a start-up state."""
        if self._timeline is not None:
            self._timeline.take(message, time.monotonic())
        with self._lock:
            if isinstance(message, ChildState):
                self._on_state(message)
            elif isinstance(message, ChildReady) and message.process.startswith("EngineCore"):
                self._line(f"{message.process} ready")

    def on_groups(self, reports: Sequence[GroupReport]) -> None:
        """Say what the workers verified: one line for each group."""
        with self._lock:
            for report in reports:
                self._line(_group_line(report))

    def on_memory(self, reports: Sequence[MemoryReport]) -> None:
        """Say where the memory of the ranks went, and what was planned otherwise."""
        with self._lock:
            for line in measured_lines(reports):
                self._line(line)

    def on_serving(self, url: str, kv_tokens: int) -> None:
        """Say that requests are welcome, and how to send the first."""
        with self._lock:
            self._line(f"KV cache holds {kv_tokens:,} tokens on each rank")
            self._tell_timeline("ready")
            self._line(f"serving {self._name} at {url} · try:")
            self._output.note(_first_request(url, self._name), hang=None)

    def on_first_token(self) -> None:
        """Say the whole time line: the first token of the first request is there."""
        with self._lock:
            self._tell_timeline(FIRST_TOKEN)

    def on_failure(self, report: FailureReport) -> None:
        """Say the first cause, once, with the remote traceback behind it."""
        with self._lock:
            self._clear_status()
            if report.traceback:
                self._output.note(report.traceback.rstrip(), hang=None)

    def note(self, text: str) -> None:
        """Say something beside the states."""
        with self._lock:
            self._line(text)

    def _tell_timeline(self, reached: str) -> None:
        """Print all times, if they are asked for, up to what this process reached now."""
        if self._timeline is None:
            return
        now = time.monotonic()
        here = ChildState(
            process=API_SERVER, state=reached, seconds=now - self._started, pid=os.getpid()
        )
        self._timeline.take(here, now)
        self._clear_status()
        for line in timeline_lines(self._timeline):
            self._output.note(line, hang=None)

    def _on_state(self, state: ChildState) -> None:
        rank = -1 if state.rank is None else state.rank
        self._latest[rank] = state
        if rank < 0:
            return
        label = state.state
        is_complete = state.fraction is None or state.fraction >= 1.0
        if is_complete:
            reached = self._reached.setdefault(label, set())
            is_new = rank not in reached
            reached.add(rank)
            if is_new and len(reached) == self._num_ranks:
                self._line(f"{self._who(reached)} {label}")
                return
        now = time.monotonic()
        if self._is_live:
            self._status(self._summary())
        elif now - self._last_line > _SLOW_LINE_S:
            self._line(self._summary())

    def _summary(self) -> str:
        by_state: dict[str, list[int]] = {}
        for rank, state in self._latest.items():
            if rank >= 0:
                text = state.state
                if state.fraction is not None:
                    text += f" {state.fraction:.0%}"
                by_state.setdefault(text, []).append(rank)
        return " · ".join(f"{self._who(ranks)} {text}" for text, ranks in by_state.items())

    def _who(self, ranks: Sequence[int] | set[int]) -> str:
        return f"rank{'s' if len(ranks) > 1 else ''} {rank_list(ranks)}"

    def _line(self, text: str) -> None:
        self._clear_status()
        self._last_line = time.monotonic()
        lead = f"{self._last_line - self._started:6.1f} s  "
        self._output.note(lead + text, hang=len(lead))

    def _status(self, text: str) -> None:
        stream = self._output.environment.stderr
        stream.write(f"\r\x1b[K{text[: self._output.note_width - 1]}")
        stream.flush()
        self._has_status_line = True

    def _clear_status(self) -> None:
        if self._has_status_line:
            self._output.environment.stderr.write("\r\x1b[K")
            self._has_status_line = False


def _group_line(report: GroupReport) -> str:
    ranks = ",".join(map(str, report.ranks)) if len(report.ranks) <= 8 else rank_list(report.ranks)
    text = f"group {report.kind} [{ranks}] {report.transport} {report.version}".rstrip()
    if len(report.ranks) > 1:
        verdict = "verified" if report.verified else "NOT verified"
        text += (
            f" · all-reduce {report.all_reduce} {verdict}, {report.all_reduce_us:.0f} µs for "
            f"{report.all_reduce_bytes // 1024} KiB"
        )
    if report.p2p_pairs_verified:
        text += f" · {report.p2p_pairs_verified} P2P pairs verified"
    return text + (f" · {report.note}" if report.note else "")


def _first_request(url: str, name: str) -> str:
    """A command on lines that a terminal of 80 columns holds and a shell takes."""
    return (
        f"curl {url}/v1/chat/completions \\\n"
        "  -H 'content-type: application/json' \\\n"
        f"""  -d '{{"model": "{name}", "temperature": 0, "max_tokens": 64,\n"""
        """       "messages": [{"role": "user", "content": "Hello"}]}'"""
    )
