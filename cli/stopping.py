"""SIGTERM like ^C, for commands that print what they know when somebody stops them."""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

from vcli.topology import ExitStatus


class Terminated(KeyboardInterrupt):
    """SIGTERM came."""


@contextlib.contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """In this block SIGTERM raises `Terminated`; main thread only."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def status_of(interrupt: KeyboardInterrupt) -> ExitStatus:
    """130 for ^C, 143 for SIGTERM."""
    return ExitStatus.TERMINATED if isinstance(interrupt, Terminated) else ExitStatus.INTERRUPTED
