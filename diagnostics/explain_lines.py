"""A log as blocks of whole lines, cleaned of colours; which rank speaks in a line."""

import codecs
import re
from collections.abc import Iterable, Iterator
from typing import Final

from vcli.diagnostics.redact import redact

#: A line without an end is cut here, so that no file is held in memory.
MAX_LINE_BYTES: Final = 1 << 20
#: What is looked at, and what is shown, around the place that was found.
_WINDOW_BYTES: Final = 2000
MAX_SHOWN: Final = 240

# Colours and titles of terminals, also as JSON writes the escape character.
_ESCAPES: Final = re.compile(
    rb"(?:\x1b|\\u001b|\\x1b)(?:\[[0-9;:?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\))"
)
_CONTROLS: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_BOMS: Final = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}

_SEPARATORS: Final = bytes(
    byte if chr(byte).isalnum() or chr(byte) == "_" else 32 for byte in range(128)
) + bytes(range(128, 256))

#: How launchers and engines write who speaks; the first that is found.
_SPEAKERS: Final = tuple(
    re.compile(pattern)
    for pattern in (
        r"\((node\d+ r\d+[^)]*)\)",
        r"\((\w+(?: rank=\d+)? pid=\d+(?:, ip=[\w.:]+)?)\)",
        r"\[(rank ?\d+)\]",
        r"\[\d{4}-\d\d-\d\d [\d:]+ ((?:(?:DP|PP|TP|EP)\d+ ?)+)\]",
        r"\[\d+,(\d+)\]<std(?:err|out)>",
        r"^\[(\w+\d+)\]:",
        r"([\w.-]+:\d+:\d+ \[\d+\]) [\w/.:]*(?:\s|$)",
        r"^\[(pod/[^\]]+)\]",
        r"^([\w.-]+-\d+) +\| ",
        r"^ *(\d{1,6}): ",
    )
)


def line_blocks(chunks: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """Blocks of whole lines without colours, each with the number of its first line, from 1."""
    number, rest = 1, b""
    for chunk in _as_utf8(chunks):
        data = rest + chunk
        end = data.rfind(b"\n") + 1
        if not end and len(data) > MAX_LINE_BYTES:
            end = len(data)
        block, rest = data[:end], data[end:]
        if len(rest) > MAX_LINE_BYTES:
            block, rest = data, b""
        if block:
            yield number, _without_colors(block)
            number += block.count(b"\n")
    if rest:
        yield number, _without_colors(rest)


def words_of(block: bytes) -> set[bytes]:
    """Every word of the block, once: to know quickly what cannot be in it."""
    # In JSON an end of line is a backslash and an n, which would become part of the next word.
    return set(block.replace(b"\\n", b"  ").translate(_SEPARATORS).split())


def line_around(block: bytes, position: int) -> tuple[int, str]:
    """Where the line at `position` begins, and its text near there.

    Of a line that a progress bar has rewritten, the part that `position` is in.
    """
    begin = block.rfind(b"\n", 0, position) + 1
    end = block.find(b"\n", position)
    end = len(block) if end < 0 else end
    part = max(begin, block.rfind(b"\r", begin, position) + 1)
    part_end = block.find(b"\r", position, end)
    part_end = end if part_end < 0 else part_end
    piece = block[max(part, position - _WINDOW_BYTES) : min(part_end, position + _WINDOW_BYTES)]
    return begin, piece.decode(errors="replace")


def shown(text: str, position: int = 0) -> str:
    """The text as evidence: secrets and control characters removed, cut around `position`."""
    text = _CONTROLS.sub("", text.replace("\t", " "))
    # The cut comes after: else the name of a secret may go and its value stay.
    marked = redact(text[:position]) if position > MAX_SHOWN // 2 else ""
    text = redact(text).strip()
    if len(text) <= MAX_SHOWN:
        return text
    begin = max(0, len(marked) - MAX_SHOWN // 3)
    cut = text[begin : begin + MAX_SHOWN].strip()
    return f"{'…' if begin else ''}{cut}{'…' if begin + MAX_SHOWN < len(text) else ''}"


def speaker(text: str) -> str:
    """The rank, worker, pod or task that a line is of, as it is written there; or nothing."""
    for pattern in _SPEAKERS:
        match = pattern.search(text[:300])
        if match:
            return match[1].strip()
    return ""


def _without_colors(block: bytes) -> bytes:
    if b"\x1b" in block or b"\\u001b" in block or b"\\x1b" in block:
        return _ESCAPES.sub(b"", block)
    return block


def _as_utf8(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The chunks; those of UTF-16, which some shells write into files, in UTF-8."""
    decoder: codecs.IncrementalDecoder | None = None
    for index, chunk in enumerate(chunks):
        if index == 0 and chunk[:2] in _BOMS:
            decoder = codecs.getincrementaldecoder(_BOMS[chunk[:2]])(errors="replace")
        yield chunk if decoder is None else decoder.decode(chunk).encode(errors="replace")
