"""What a process shows of itself to `vcli doctor --instance`, also while it hangs.

    memfd "vcli-live", one for each process, seen as /proc/PID/fd/N:
    version | text's seq | text's bytes | steps begun | steps ended | last of both (ns) | text ...
    TEXT_END: stacks of all threads, appended by each SIGNAL

The reader needs nothing of the process: it reads memory, and the stacks are written by a handler
of the interpreter's C code. The memory has no name, so nothing is left after a SIGKILL.
"""

import faulthandler
import fcntl
import mmap
import os
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from vcli.runtime.messages import ChildState

MEMFD_NAME: Final = "vcli-live"
#: Appends the stacks of all threads to the file; whoever sends it looks first whether it is caught.
SIGNAL: Final = signal.SIGUSR1

TEXT_BEGIN: Final = 64
#: Pages that are never written take no memory.
TEXT_END: Final = 1 << 20

_MAX_READS: Final = 20
_VERSION: Final = 0x7663_6C69_0001
_VERSION_AT, _SEQ, _LENGTH, _BEGUN, _ENDED, _LAST_NS = range(6)


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveFacts:
    """A page as somebody else reads it. `told` is what the process told of itself."""

    told: Mapping[str, Any]
    steps_begun: int
    steps_ended: int
    last_seconds: float
    """Since the last step began or ended; 0 without a step."""

    @property
    def is_in_step(self) -> bool:
        """Whether a step runs."""
        return self.steps_begun > self.steps_ended


class LivePage:
    """The page of this process, and the handler of `SIGNAL`; `tell` from any thread."""

    def __init__(self) -> None:
        self._fd = os.memfd_create(MEMFD_NAME)
        os.ftruncate(self._fd, TEXT_END)
        # Stacks go behind the text, wherever a reader has cut the file before.
        fcntl.fcntl(self._fd, fcntl.F_SETFL, os.O_APPEND)
        self._mapping = mmap.mmap(self._fd, TEXT_END)
        self._words = memoryview(self._mapping)[:TEXT_BEGIN].cast("q")
        self._words[_VERSION_AT] = _VERSION
        self._told: dict[str, Any] = {}
        self._ranks: dict[str, str] = {}
        self._lock = threading.Lock()
        self._is_closed = False
        faulthandler.register(SIGNAL, file=self._fd, all_threads=True)

    def tell(self, **facts: Any) -> None:
        """Add facts, or replace those of the same name; what is too long for the page is left out.

        Does nothing once the page is closed.
        """
        with self._lock:
            if self._is_closed:
                return
            self._told |= facts
            text = msgspec.json.encode(self._told)
            if len(text) > TEXT_END - TEXT_BEGIN:
                for name in facts:
                    del self._told[name]
                text = msgspec.json.encode(self._told)
            # Odd while the text changes: a reader that sees that, or another one afterwards than
            # before, reads again.
            self._words[_SEQ] += 1
            self._mapping[TEXT_BEGIN : TEXT_BEGIN + len(text)] = text
            self._words[_LENGTH] = len(text)
            self._words[_SEQ] += 1

    def note_state(self, state: ChildState) -> None:
        """A rank, or this process, reached a state or came further within it."""
        text = state.state if state.fraction is None else f"{state.state} {state.fraction:.0%}"
        if state.rank is None:
            self.tell(state=text)
        else:
            self._ranks[str(state.rank)] = text
            self.tell(ranks=self._ranks)

    def begin_step(self) -> None:
        """Work starts. One thread calls this and `end_step`."""
        if not self._is_closed:
            self._words[_LAST_NS] = time.monotonic_ns()
            self._words[_BEGUN] += 1

    def end_step(self) -> None:
        """All work that was begun is done."""
        if not self._is_closed:
            self._words[_LAST_NS] = time.monotonic_ns()
            self._words[_ENDED] = self._words[_BEGUN]

    def close(self) -> None:
        """Give the handler and the memory back."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        faulthandler.unregister(SIGNAL)
        self._words.release()
        self._mapping.close()
        os.close(self._fd)


def read_live_page(fd: int) -> LiveFacts | None:
    """The page in this file; None if it is none, or is written again and again meanwhile."""
    for _ in range(_MAX_READS):
        data = os.pread(fd, TEXT_END, 0)
        if len(data) < TEXT_BEGIN:
            return None
        words = memoryview(data)[:TEXT_BEGIN].cast("q")
        if words[_VERSION_AT] != _VERSION:
            return None
        again = memoryview(os.pread(fd, TEXT_BEGIN, 0)).cast("q")
        if words[_SEQ] % 2 == 0 and words[_SEQ] == again[_SEQ]:
            return _facts_of(words, data)
    return None


def _facts_of(words: memoryview, data: bytes) -> LiveFacts | None:
    text = data[TEXT_BEGIN : TEXT_BEGIN + words[_LENGTH]]
    try:
        told = msgspec.json.decode(text or b"{}", type=dict[str, Any])
    except msgspec.DecodeError:
        return None
    last_ns = words[_LAST_NS]
    return LiveFacts(
        told=told,
        steps_begun=words[_BEGUN],
        steps_ended=words[_ENDED],
        last_seconds=(time.monotonic_ns() - last_ns) / 1e9 if last_ns else 0.0,
    )
