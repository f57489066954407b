"""What `vcli serve` tells its user, as the launcher sees whoever prints it."""

from collections.abc import Sequence
from typing import Protocol

from vcli.runtime.errors import FailureReport
from vcli.runtime.messages import ChildMessage, GroupReport, MemoryReport


class ServeView(Protocol):
    """What the server tells while it starts and ends; called from any thread."""

    def on_message(self, message: ChildMessage) -> None:
        """A process reported a start-up state."""

    def on_groups(self, reports: Sequence[GroupReport]) -> None:
        """All ranks are ready; their groups were verified."""

    def on_memory(self, reports: Sequence[MemoryReport]) -> None:
        """All ranks are warm; where their memory went, beside what was planned."""

    def on_serving(self, url: str, kv_tokens: int) -> None:
        """The port is open."""

    def on_first_token(self) -> None:
        """The first request of all has its first token."""

    def on_failure(self, report: FailureReport) -> None:
        """Something failed; the report is the first cause."""

    def note(self, text: str) -> None:
        """Anything else."""
