"""The first line of a log that looks like a failure, for logs that no symptom fits."""

import re
from collections.abc import Set
from dataclasses import dataclass
from typing import Final

from vcli.diagnostics.explain_lines import MAX_LINE_BYTES, line_around, shown, speaker

_TRACEBACK: Final = b"Traceback (most recent call last)"
#: A traceback is said better by its last line than by the line of the log before it.
_MAX_LINES_BEFORE_TRACEBACK: Final = 5
_WORDS: Final = re.compile(
    rb"Traceback \(most recent call last\)|\b(?:ERROR|FATAL|CRITICAL)\b|[Ee]rror: |Exception: |"
    rb"NCCL WARN|terminate called|Segmentation fault|Bus error|core dumped"
)
#: A block without any of these words, or one that ends so, has none of the above.
_TRIGGERS: Final = frozenset(
    b"Traceback ERROR FATAL CRITICAL error WARN terminate Segmentation Bus dumped".split()
)
_ENDS: Final = (b"Error", b"Exception", b"error")
_EXCEPTION: Final = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?::|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstFailure:
    """A line with its number, and who speaks there, if that is written."""

    line: int
    text: str
    speaker: str = ""


class FailureFinder:
    """Takes the blocks of a log in their order."""

    def __init__(self) -> None:
        self._error: FirstFailure | None = None
        self._result: FirstFailure | None = None
        self._is_in_traceback = False
        self._width: int | None = None
        self._speaker = ""

    @property
    def result(self) -> FirstFailure | None:
        """The end of the first traceback, or the first line that tells of an error."""
        return self._result or self._error

    def take(self, number: int, block: bytes, words: Set[bytes]) -> None:
        """Look at one block, whose first line has this number; `words` are all that it has."""
        if self._result is not None:
            return
        is_plain = words.isdisjoint(_TRIGGERS) and not any(word.endswith(_ENDS) for word in words)
        if is_plain and not self._is_in_traceback:
            return
        begin = 0
        if not self._is_in_traceback:
            match = _WORDS.search(block)
            if match is None:
                return
            begin = block.rfind(b"\n", 0, match.start()) + 1
            number += block.count(b"\n", 0, begin)
        while begin < len(block) and self._result is None:
            end = block.find(b"\n", begin)
            end = len(block) if end < 0 else end
            self._take_line(number, block[begin:end])
            begin, number = end + 1, number + 1

    def _take_line(self, number: int, raw: bytes) -> None:
        if self._is_in_traceback:
            self._take_frame(number, raw[:MAX_LINE_BYTES].decode(errors="replace"))
            return
        if self._error and number > self._error.line + _MAX_LINES_BEFORE_TRACEBACK:
            self._result = self._error
            return
        match = _WORDS.search(raw)
        if match is None:
            return
        _, text = line_around(raw, match.start())
        if self._error is None:
            self._error = FirstFailure(line=number, text=shown(text), speaker=speaker(text))
        if _TRACEBACK in raw:
            self._is_in_traceback, self._speaker = True, speaker(text)

    def _take_frame(self, number: int, text: str) -> None:
        """A line behind the head of a traceback; other ranks may speak in between."""
        if self._width is None:
            # Times in front of each line vary, the width does not.
            frame = text.find('  File "')
            if frame >= 0:
                self._width, self._speaker = frame, speaker(text[:frame])
            return
        end = text[self._width :]
        if self._speaker == speaker(text[: self._width]) and _EXCEPTION.match(end):
            self._result = FirstFailure(line=number, text=shown(text), speaker=self._speaker)
