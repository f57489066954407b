"""Signals to stop that children left to this process, which did not get one: somebody is told."""

import os
import threading
from collections.abc import Callable
from typing import Final

from vcli.runtime.log import get_logger
from vcli.runtime.messages import ChildMessage, ChildSignalled

logger = get_logger(__name__)

#: Who sends a signal to all processes of an instance has reached this one by then.
_WINDOW_S: Final = 1.0


class LeftSignals:
    """Tells, once for what comes together, which children leave a signal to this process.

    Whoever ends a single child by SIGTERM wants something else than what happens, which is
    nothing. Where `is_stopping` says that this process got a signal too, there is nothing to tell.
    """

    def __init__(self, is_stopping: Callable[[], bool]) -> None:
        self._is_stopping = is_stopping
        self._lock = threading.Lock()
        self._waiting: dict[str, list[str]] = {}
        """Children by the signal that they got."""

    def take(self, message: ChildMessage) -> bool:
        """Whether it is such a message; from any thread."""
        if not isinstance(message, ChildSignalled):
            return False
        rank = "" if message.rank is None else f"rank {message.rank}, "
        with self._lock:
            if not self._waiting:
                timer = threading.Timer(_WINDOW_S, self._tell)
                timer.name, timer.daemon = "left-signals", True
                timer.start()
            children = self._waiting.setdefault(message.signal_name, [])
            children.append(f"{message.process} ({rank}pid {message.pid})")
        return True

    def _tell(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        if self._is_stopping():
            return
        for name, children in waiting.items():
            logger.warning(
                "%s got %s and runs on: only the process that the user started ends an instance, "
                "in order; `kill %d` stops this one",
                ", ".join(children),
                name,
                os.getpid(),
            )
