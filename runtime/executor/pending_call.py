"""A call in flight: what was asked of which ranks, until when, and what they have answered."""

import math
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from vcli.runtime.errors import FailureReport
from vcli.runtime.executor.base import Aggregate, RankReply


@dataclass(eq=False, slots=True, kw_only=True)
class PendingCall:
    """A call whose replies are not all there. `results` by rank."""

    call_id: int
    method: str
    expected: frozenset[int]
    reply_rank: int | None
    timeout_s: float
    deadline_s: float
    aggregate: Aggregate | None = None
    future: "Future[Any]" = field(default_factory=Future)
    results: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, FailureReport] = field(default_factory=dict)
    """Of ranks that handed something on, which is in `results`; for the aggregator."""
    suspect: FailureReport | None = None
    """A failure that is perhaps only a consequence; it counts from `suspect_until_s` on."""
    suspect_until_s: float = 0.0
    is_sent: bool = False
    stalls_at_s: float = math.inf
    """When a step that still runs is told to be stuck; once."""
    looks_at_s: float = math.inf
    """When it is looked whether a process is stopped."""

    @property
    def missing(self) -> list[int]:
        """Ranks whose result is not there."""
        return sorted(self.expected - self.results.keys())

    @property
    def due_s(self) -> float:
        """When the clerk must look at it; while it is sent, the ring keeps its deadline."""
        if self.suspect is not None:
            return self.suspect_until_s
        if not self.is_sent:
            return math.inf
        return min(self.deadline_s, self.stalls_at_s, self.looks_at_s)

    def put_off(self, seconds: float) -> None:
        """Let every deadline be so much later."""
        self.deadline_s += seconds
        self.stalls_at_s += seconds
        self.suspect_until_s += seconds

    def settle(self) -> None:
        """Give the future its value, from complete results."""
        if self.reply_rank is not None:
            self.future.set_result(self.results[self.reply_rank])
            return
        ranks = sorted(self.results)
        if self.aggregate is None:
            self.future.set_result([self.results[rank] for rank in ranks])
            return
        replies = [
            RankReply(rank=rank, value=self.results[rank], failure=self.failures.get(rank))
            for rank in ranks
        ]
        try:
            value = self.aggregate(replies)
        except Exception as error:  # noqa: BLE001 - the caller's code: its error is the result
            self.future.set_exception(error)
        else:
            self.future.set_result(value)
