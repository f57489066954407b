"""Why a queue could not send or receive."""

import signal
from collections.abc import Sequence

from vcli.runtime.ipc.layout import ReaderState
from vcli.topology.errors import ExitStatus, VcliError


class QueueError(VcliError):
    """The broadcast queue cannot do what was asked."""

    exit_status = ExitStatus.DIED_SERVING


class QueueTimeout(QueueError, TimeoutError):
    """Nothing came in time."""


class HandshakeTimeout(QueueTimeout):
    """Not every end attached in time; `missing` are readers, by index."""

    def __init__(
        self,
        name: str,
        waited_s: float,
        missing: Sequence[int],
        pids: Sequence[int | None] = (),
        *,
        writer_pid: int | None = None,
    ) -> None:
        known = dict(zip(missing, pids, strict=False))
        who = [
            f"reader {index}" + (f" (pid {pid})" if (pid := known.get(index)) else "")
            for index in missing
        ]
        if not who:
            who = [f"the handshake of the writer (pid {writer_pid or 'unknown'})"]
        super().__init__(
            f"queue {name!r}: after {waited_s:.1f} s still missing: {', '.join(who)}",
            hint="look at the log of those processes; they may have failed before",
        )
        self.missing = list(missing)


class QueueFullTimeout(QueueTimeout):
    """No space in time; `behind` are the readers that did not read, as they were then."""

    def __init__(self, name: str, waited_s: float, behind: list[ReaderState]) -> None:
        who = "; ".join(state.describe() for state in behind)
        super().__init__(
            f"queue {name!r} had no space for {waited_s:.1f} s: {who}",
            hint="look at the stacks of those processes",
        )
        self.behind = behind


class QueueCancelled(QueueError):
    """`cancel()` was called on this end."""

    def __init__(self, name: str) -> None:
        super().__init__(f"queue {name!r} was cancelled")


class PeerDiedError(QueueError):
    """The process at the other end is dead. `reader_index` is None when it was the writer.

    `exit_code` (negative: a signal) is there for its parent, and for others where the kernel tells.
    """

    def __init__(
        self,
        message: str,
        *,
        reader_index: int | None,
        pid: int | None,
        exit_code: int | None = None,
    ) -> None:
        super().__init__(message)
        self.reader_index = reader_index
        self.pid = pid
        self.exit_code = exit_code


class PeerClosedError(PeerDiedError):
    """The other end closed the queue in order; its process may live on."""


def death_in_words(exit_code: int | None) -> str:
    """What to say of a dead peer."""
    if exit_code is None:
        return "died"
    if exit_code >= 0:
        return f"exited with status {exit_code}"
    names = {number.value: number.name for number in signal.Signals}
    return f"was killed by {names.get(-exit_code, f'signal {-exit_code}')}"
