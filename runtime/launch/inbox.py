"""Events of threads and signals, one after the other, for one task of an event loop."""

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Generic, TypeVar

from vcli.runtime.launch.stop_signals import StopSignals

T = TypeVar("T")


class Signalled:
    """The first signal to stop came."""


class Inbox(Generic[T]):
    """Belongs to the running event loop; `put` may be called from any thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[T | Signalled] = asyncio.Queue()

    def put(self, event: T) -> None:
        """Add an event; after the end of the loop nobody wants it."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._queue.put_nowait, event)

    async def get(self, timeout_s: float) -> T | Signalled | None:
        """The next event; None when none came in time."""
        try:
            return await asyncio.wait_for(self._queue.get(), max(0.0, timeout_s))
        except TimeoutError:
            return None

    def drain(self) -> list[T]:
        """What is there already."""
        found: list[T] = []
        while not self._queue.empty():
            event = self._queue.get_nowait()
            if not isinstance(event, Signalled):
                found.append(event)
        return found

    @contextlib.contextmanager
    def with_signals(self, signals: StopSignals) -> Iterator[None]:
        """Have `Signalled` among the events, while this is entered."""
        waiting = asyncio.create_task(signals.first.wait())
        waiting.add_done_callback(self._on_signal)
        try:
            yield
        finally:
            waiting.remove_done_callback(self._on_signal)
            waiting.cancel()

    def _on_signal(self, task: "asyncio.Task[bool]") -> None:
        if not task.cancelled():
            self._queue.put_nowait(Signalled())
