"""/ready: whether every rank answered a moment ago."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from vcli.runtime.server.state import ServerState
from vcli.topology.errors import VcliError

_DEADLINE_S = 5.0
_MARGIN_S = 1.0  # the core's own deadline comes first, and its answer names the ranks
_VALID_S = 1.0


class ReadinessProbe:
    """Asks the engine core to ask every rank; at most once a second, however often it is probed."""

    def __init__(
        self,
        state: ServerState,
        *,
        deadline_s: float = _DEADLINE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state = state
        self._deadline_s = deadline_s
        self._clock = clock
        self._lock = asyncio.Lock()
        self._last: tuple[float, int, dict[str, Any]] | None = None

    async def check(self) -> tuple[int, dict[str, Any]]:
        """HTTP status and body: 200, or 503 with who did not answer."""
        if self._state.is_draining:
            return 503, {"ready": False, "reason": "shutting down"}
        if self._state.engine.failure is not None:
            return 503, {"ready": False, "reason": self._state.engine.failure.describe()}
        async with self._lock:
            if self._last is None or self._clock() - self._last[0] > _VALID_S:
                status, body = await self._ask()
                self._last = (self._clock(), status, body)
            return self._last[1], self._last[2]

    async def _ask(self) -> tuple[int, dict[str, Any]]:
        try:
            answer = await self._state.engine.call(
                "check_health", self._deadline_s, timeout_s=self._deadline_s + _MARGIN_S
            )
        except VcliError as error:
            trouble = self._state.engine.trouble
            reason = f"{error.message}: {trouble}" if trouble else error.message
            return 503, {"ready": False, "reason": reason}
        if not answer["is_healthy"]:
            missing = ", ".join(str(rank) for rank in answer["missing"])
            return 503, {"ready": False, "reason": f"no answer of rank {missing}", **answer}
        return 200, {"ready": True, **answer}
