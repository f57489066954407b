"""Everything that can wake the engine core's loop, besides what the client sends."""

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from vcli.runtime.errors import FailureReport
from vcli.runtime.messages import ClientMessage


@dataclass(frozen=True, slots=True)
class ClientGone:
    """The client closed its socket, or it broke."""


@dataclass(frozen=True, slots=True)
class StepDone:
    """The result of a step in flight is there."""


@dataclass(frozen=True, slots=True)
class CallDone:
    """The ranks answered a utility call, or its deadline passed."""

    call_id: int
    futures: "tuple[Future[Any], ...]"


@dataclass(frozen=True, slots=True)
class ExecutorFailed:
    """The executor's monitor saw a worker die or fail."""

    report: FailureReport


CoreEvent = ClientMessage | ClientGone | StepDone | CallDone | ExecutorFailed
