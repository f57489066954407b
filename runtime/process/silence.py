"""A process that owes an answer and gives none: whether it is stopped or stuck, and for how long.

Who waits for the answer looks each second. Only time in which that one ran itself counts: a host
that was suspended, or a whole instance that was frozen, is nobody's silence.
"""

import socket
import time
from collections.abc import Callable
from typing import Final

from vcli.runtime.errors import FailureReport
from vcli.runtime.log import get_logger
from vcli.runtime.process.held import STOPPED_HINT, Hold, HoldWatch

logger = get_logger(__name__)

LOOK_EVERY_S: Final = 1.0

#: Silence after which an answer is asked for, which is quick for a process that is only busy.
_ASK_AFTER_S: Final = 2.0

#: An answer that was asked for may take until then, whatever shorter deadlines say.
_LEAST_S: Final = 5.0

_LOOK_HINT: Final = "vcli doctor --instance shows the stacks of a process that is stuck"


class SilenceWatch:
    """Warns with the name once it is known what is wrong; a failure after `limit_s`.

    A process that is stopped is named by the second look that finds it so, since a debugger stops
    one for a moment; another one after `stall_s`. One thread calls everything.
    """

    def __init__(
        self,
        title: str,
        pid: int,
        *,
        stall_s: float,
        limit_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._title = title
        self._pid = pid
        self._hold_watch = HoldWatch(pid, clock=clock)
        self._stall_s = max(stall_s, _LEAST_S)
        self._limit_s = max(limit_s, _LEAST_S)
        self._clock = clock
        self._looked_s = clock()
        self._silent_s = 0.0
        self._hold = Hold()
        self._has_asked = False
        self.trouble = ""
        """What is wrong with the process, as far as that was told; empty: nothing."""

    @property
    def is_owed(self) -> bool:
        """Whether the process was asked and has not answered, whoever else waits for it."""
        return self._has_asked

    def rest(self) -> None:
        """Nobody waits for anything."""
        self._looked_s, self._silent_s, self._hold = self._clock(), 0.0, Hold()

    def heard(self) -> None:
        """Something came."""
        if self.trouble:
            logger.warning(
                "%s pid %d answers again after %.0f s", self._title, self._pid, self._silent_s
            )
        self._has_asked, self.trouble = False, ""
        self.rest()

    def wants_to_ask(self) -> bool:
        """Whether to ask for a sign of life now; once, until something comes."""
        if self._has_asked or self._silent_s < _ASK_AFTER_S:
            return False
        self._has_asked = True
        return True

    def look(self) -> FailureReport | None:
        """Judge one more second of silence; gives the failure once there is too much of it."""
        now_s = self._clock()
        self._silent_s += min(now_s - self._looked_s, 2 * LOOK_EVERY_S)
        self._looked_s = now_s
        was_stopped, self._hold = self._hold.is_stopped, self._hold_watch.look()
        is_named = self._hold.is_stopped and was_stopped
        if self._silent_s >= self._limit_s:
            return self._report()
        if not self.trouble and (is_named or self._silent_s >= self._stall_s):
            self.trouble = f"{self._title} pid {self._pid} {self._describe()}"
            logger.error("requests wait: %s", self.trouble)
        return None

    def _describe(self) -> str:
        hold = self._hold.text
        if self._hold.is_stopped:
            return f"is {hold}"
        return f"has not answered for {self._silent_s:.0f} s" + (f": {hold}" if hold else "")

    def _report(self) -> FailureReport:
        hold, stopped = self._hold.text, self._hold.is_stopped
        silence = f"no answer for {self._silent_s:.0f} s"
        return FailureReport(
            process=self._title,
            phase="serving",
            kind="ProcessStopped" if stopped else "ProcessStuck",
            message=f"{silence}: {hold}" if hold else f"{silence}, it neither waits nor ends",
            pid=self._pid,
            host=socket.gethostname(),
            hint=STOPPED_HINT if stopped else _LOOK_HINT,
        )
