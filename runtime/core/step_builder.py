"""A step while the scheduler puts it together."""

from collections.abc import Sequence

from vcli.runtime.core.request import Request
from vcli.runtime.messages import (
    NOT_SAMPLED,
    OWN_SAMPLE,
    NewRequestData,
    RunningRequests,
    SchedulerOutput,
)


class StepBuilder:
    """Rows of the coming `SchedulerOutput`, and what is left of its token budget."""

    def __init__(self, max_tokens: int, *, keeps_samples: bool = False) -> None:
        self.num_tokens_left = max_tokens
        self._keeps_samples = keeps_samples
        self._new: list[NewRequestData] = []
        self._new_scheduled: list[int] = []
        self._numbers: list[int] = []
        self._token_ids: list[int] = []
        self._num_computed_tokens: list[int] = []
        self._new_block_ids: list[list[int]] = []
        self._running_scheduled: list[int] = []

    @property
    def is_empty(self) -> bool:
        """Whether no request has a row."""
        return not self._new and not self._numbers

    @property
    def num_running(self) -> int:
        """Rows of requests that the workers know."""
        return len(self._numbers)

    def add_new(self, request: Request, block_ids: Sequence[int], num_tokens: int) -> None:
        """A row for a request that the workers do not know, with everything about it."""
        self._new.append(
            NewRequestData(
                number=request.number,
                token_ids=list(request.token_ids),
                num_prompt_tokens=request.num_prompt_tokens,
                num_computed_tokens=request.num_computed_tokens,
                block_ids=list(block_ids),
                sampling=request.sampling,
                eos_token_ids=tuple(sorted(request.eos_token_ids)),
            )
        )
        self._new_scheduled.append(num_tokens)
        self._count(request, num_tokens)

    def add_running(self, request: Request, new_block_ids: list[int], num_tokens: int) -> None:
        """A row for a request that the workers know: what changed since its last step."""
        self._numbers.append(request.number)
        self._token_ids.append(request.unsent_token_id)
        self._num_computed_tokens.append(request.num_computed_tokens)
        self._new_block_ids.append(new_block_ids)
        self._running_scheduled.append(num_tokens)
        self._count(request, num_tokens)

    def build(self, step: int, removed: list[int]) -> SchedulerOutput:
        """The finished step."""
        return SchedulerOutput(
            step=step,
            new=self._new,
            running=RunningRequests(
                numbers=self._numbers,
                token_ids=self._token_ids,
                num_computed_tokens=self._num_computed_tokens,
                new_block_ids=self._new_block_ids,
            ),
            num_scheduled_tokens=self._new_scheduled + self._running_scheduled,
            removed=removed,
            keeps_samples=self._keeps_samples,
        )

    def _count(self, request: Request, num_tokens: int) -> None:
        request.unsent_token_id = NOT_SAMPLED
        request.num_computed_tokens += num_tokens
        request.num_in_flight_tokens += num_tokens
        self.num_tokens_left -= num_tokens
        if self._keeps_samples and request.num_pending_tokens == 0:
            # The step samples the next token, which may be scheduled before it is known here.
            request.num_unknown_tokens += 1
            request.unsent_token_id = OWN_SAMPLE
