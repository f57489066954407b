"""What a trial of devices gave: processes that try them together, and what each of them wrote.

Whoever runs it hands the lines over as they came; here they become questions with answers.
"""

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from vcli.diagnostics.text import listing

Event = Mapping[str, Any]

_BROKEN: Final = ("failed", "hung")
#: cuBLAS says the latter two where its workspace finds no room.
_OUT_OF_MEMORY: Final = (
    "out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUBLAS_STATUS_NOT_INITIALIZED",
)  # fmt: skip
#: Torn by the failure of another, and no news.
_FOLLOWERS: Final = (
    "Connection closed by peer",
    "Connection reset by peer",
    "remote process exited",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """`events` in the order in which they came; `devices` by rank.

    `skip_reason` is why nothing was tried. `status_server` is what NCCL's own status server said
    of the ranks, and `status_server_problem` why it said nothing; both empty where it was not
    asked.
    """

    devices: tuple[int, ...] = ()
    device_type: str = "cuda"
    events: tuple[Event, ...] = ()
    skip_reason: str = ""
    status_server: str = ""
    status_server_problem: str = ""

    @property
    def problems(self) -> tuple[Event, ...]:
        """What failed or hung, causes before those that only lost a peer."""
        found = [
            event for event in self.events if event.get("state") in _BROKEN and "rank" in event
        ]
        return tuple(sorted(found, key=_is_follower))

    @property
    def broken_step(self) -> str:
        """The step in which it broke: of several the earliest, which the others wait for."""
        problems = self.problems
        if not problems:
            return ""
        hung = [str(event["step"]) for event in problems if event["state"] == "hung"]
        if problems[0]["state"] == "failed" or not hung:
            return str(problems[0]["step"])
        return min(hung, key=self._place)

    def done(self, step: str) -> tuple[Event, ...]:
        """What every rank wrote when it had done `step`, by rank."""
        found = [e for e in self.events if e.get("step") == step and e.get("state") == "done"]
        return tuple(sorted(found, key=lambda event: int(event.get("rank", 0))))

    def is_done(self, step: str) -> bool:
        """Whether all ranks have done it, for every group that they began it for."""
        if step == self.broken_step:
            return False
        return {event.get("rank") for event in self.done(step)} >= set(range(len(self.devices)))

    def name(self, rank: int) -> str:
        """`rank 1 (GPU 3)`."""
        if self.device_type != "cuda" or not 0 <= rank < len(self.devices):
            return f"rank {rank}"
        return f"rank {rank} (GPU {self.devices[rank]})"

    def problem_text(self) -> str:
        """Who broke in which step, and how."""
        problems = self.problems
        if not problems:
            return ""
        first = problems[0]
        if first["state"] == "failed":
            return f"{self.name(first['rank'])} {_failure(first)}"
        by_step: dict[str, list[int]] = {}
        for event in problems:
            if event["state"] == "hung":
                by_step.setdefault(_step_text(event, self.events), []).append(int(event["rank"]))
        order = sorted(by_step, key=lambda text: self._place(text.partition(" of ")[0]))
        parts = [f"{listing([self.name(rank) for rank in by_step[text]], limit=8)} in {text!r}"
                 for text in order]  # fmt: skip
        return f"no progress for {first.get('seconds', 0):g} s, killed: {'; '.join(parts)}"

    def is_out_of_memory(self) -> bool:
        """Whether a device had no room for the trial."""
        text = str(self.problems[0].get("message", "")) if self.problems else ""
        return any(word in text for word in _OUT_OF_MEMORY)

    def _place(self, step: str) -> int:
        """Where the step stands in the order in which the ranks go through them."""
        order = list(dict.fromkeys(str(event.get("step")) for event in self.events
                                   if event.get("state") == "started"))  # fmt: skip
        return order.index(step) if step in order else -1


def _is_follower(event: Event) -> bool:
    """Whether it only lost a peer; a process that a signal ended is a cause."""
    if int(event.get("exit_status") or 0) < 0:
        return False
    return any(word in str(event.get("message", "")) for word in _FOLLOWERS)


def _step_text(event: Event, events: Sequence[Event]) -> str:
    """The step, with the group that it was begun for."""
    begun = [e for e in events if e.get("rank") == event["rank"] and e.get("step") == event["step"]
             and e.get("state") == "started"]  # fmt: skip
    kind = begun[-1].get("kind") if begun else None
    return f"{event['step']} of {kind}" if kind else str(event["step"])


def _failure(event: Event) -> str:
    step, message = event["step"], str(event.get("message", ""))
    status = event.get("exit_status")
    last = message.splitlines()[-1].strip() if message.strip() else ""
    if "No module named 'torch'" in message:
        return "cannot import torch"
    if isinstance(status, int) and status < 0:
        return f"was killed by {_signal_name(-status)} in {step!r}" + (f": {last}" if last else "")
    if isinstance(status, int):
        return f"ended with status {status} in {step!r}: {last or 'it said nothing'}"
    return f"failed in {step!r}: {message}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
