"""Finds the first cause in a log: the catalogue of symptoms against a stream of any length."""

import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

from vcli.diagnostics.explain_failure import FailureFinder, FirstFailure
from vcli.diagnostics.explain_lines import line_around, line_blocks, shown, words_of
from vcli.diagnostics.redact import redact
from vcli.diagnostics.symptoms import SYMPTOMS, Role, Sign, Symptom

_MAX_EVIDENCE: Final = 5
#: Hits that are told apart by a key (a rank that begins and ends) are kept up to this number.
_MAX_KEYS: Final = 4096
#: A message of several lines stands between a hit and the line below it that belongs to it.
_MAX_LINES_BELOW: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One line of the log, cut to its interesting part, secrets removed."""

    line: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """A symptom that was found, its texts filled with what the log says."""

    symptom: Symptom
    cause: str
    remedy: str
    evidence: tuple[Evidence, ...]

    @property
    def line(self) -> int:
        """Where it is seen first."""
        return self.evidence[0].line

    def to_json(self) -> dict[str, Any]:
        """An entry of `matches` of the document vcli.explain/1."""
        return {
            "name": self.symptom.name,
            "check": self.symptom.check,
            "symptom": self.symptom.title,
            "cause": self.cause,
            "evidence": [{"line": item.line, "text": item.text} for item in self.evidence],
            "remedy": self.remedy,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What a log says.

    matches: causes, the first in the log first; where no cause is known, vcli's own words, or
    else the first consequence.
    followers: what only follows from it.
    """

    matches: tuple[Match, ...]
    followers: tuple[Match, ...]
    first_failure: FirstFailure | None
    num_lines: int


@dataclass(frozen=True, slots=True)
class _Block:
    """Whole lines of the log, from line `number` on, and all words in them."""

    number: int
    data: bytes
    words: Set[bytes]


@dataclass(frozen=True, slots=True)
class _Hit:
    """One line that has a sign, found at `position` of its text."""

    begin: int
    line: int
    text: str
    position: int
    values: Mapping[str, str]


@dataclass(slots=True)
class _Found:
    """What was found of one symptom so far."""

    symptom: Symptom
    hits: list[_Hit] = field(default_factory=list)
    context: dict[int, _Hit] = field(default_factory=dict)
    below: _Hit | None = None

    @property
    def is_complete(self) -> bool:
        """Whether it is one: enough hits, and all of the context."""
        symptom = self.symptom
        return len(self.hits) >= symptom.min_hits and len(self.context) == len(symptom.also)

    def take(self, block: _Block) -> None:
        """Look for the symptom in the next block."""
        for index, signs in enumerate(self.symptom.also):
            if index not in self.context:
                self.context.update((index, hit) for hit in _hits(signs, block, limit=1))
        is_keyed = any("(?P<key>" in sign.pattern for sign in self.symptom.signs)
        limit = _MAX_KEYS if is_keyed else _MAX_EVIDENCE
        hits = _hits(self.symptom.signs, block, limit=limit - len(self.hits))
        if self.symptom.ended_by and (hits or self.hits):
            hits = self._go_on(block, hits, limit=limit)
        self.hits += hits
        if self.symptom.below and self.hits:
            self._look_below(block)

    def _look_below(self, block: _Block) -> None:
        first = self.hits[0]
        if self.below is not None or block.number > first.line + _MAX_LINES_BELOW:
            return
        is_here = first.line >= block.number
        begin = block.data.find(b"\n", first.begin) if is_here else 0
        for hit in _hits(self.symptom.below, block, limit=1, begin=begin):
            if hit.line <= first.line + _MAX_LINES_BELOW:
                self.below = hit

    def _go_on(self, block: _Block, hits: list[_Hit], *, limit: int) -> list[_Hit]:
        """Take back what was ended in this block; the hits of the block that are left."""
        for end in _hits(self.symptom.ended_by, block, limit=_MAX_KEYS):
            key = end.values.get("key")
            if key is None:
                self.hits.clear()
                later = block.data.find(b"\n", end.begin)
                hits = _hits(self.symptom.signs, block, limit=limit, begin=later)
            else:
                self.hits = [hit for hit in self.hits if hit.values.get("key") != key]
                hits = [h for h in hits if h.begin > end.begin or h.values.get("key") != key]
        return hits


class _Blanks(dict[str, str]):
    """Values for a text; one that is not known is told by its name."""

    def __missing__(self, key: str) -> str:
        return key.upper()


def explain_log(chunks: Iterable[bytes], *, symptoms: Sequence[Symptom] = SYMPTOMS) -> Explanation:
    """Read a log in one pass, a chunk at a time; it is never held as a whole."""
    found = [_Found(symptom) for symptom in symptoms]
    finder = FailureFinder()
    num_lines = 0
    for number, data in line_blocks(chunks):
        num_lines = number + data.count(b"\n") - data.endswith(b"\n")
        block = _Block(number, data, words_of(data))
        finder.take(number, data, block.words)
        for item in found:
            item.take(block)
    matches = _matches(found)
    causes = [match for match in matches if match.symptom.role is Role.CAUSE]
    follow = [match for match in matches if match.symptom.role is not Role.CAUSE]
    for role in (Role.OWN, Role.CONSEQUENCE):
        causes = causes or [match for match in follow if match.symptom.role is role][:1]
    if not any(match.symptom.role is Role.CAUSE for match in causes):
        follow = [match for match in follow if match not in causes] if causes else []
    return Explanation(
        matches=tuple(causes),
        followers=tuple(follow),
        first_failure=finder.result,
        num_lines=num_lines,
    )


def explain_text(text: str) -> Match | None:
    """The first known cause in a short text, such as a traceback; None where there is none."""
    matches = explain_log([text.encode(errors="replace")]).matches
    return next((match for match in matches if match.symptom.role is Role.CAUSE), None)


def _hits(signs: Sequence[Sign], block: _Block, *, limit: int, begin: int = 0) -> list[_Hit]:
    """The first lines of the block, from `begin` on, that have one of the signs."""
    data = block.data
    raw: dict[int, tuple[str, re.Match[str]]] = {}
    for sign in signs:
        needle, word = _needle(sign)
        if limit <= 0 or begin < 0 or (word and word not in block.words):
            continue
        position, count = data.find(needle, begin), 0
        while position >= 0 and count < limit:
            start, text = line_around(data, position)
            match = re.search(sign.pattern or re.escape(sign.needle), text)
            if match is not None:
                count += 1
                raw.setdefault(start, (text, match))
            end = data.find(b"\n", position)
            position = data.find(needle, end) if end >= 0 else -1
    hits: list[_Hit] = []
    line, counted = block.number, 0
    for start in sorted(raw)[: max(limit, 0)]:
        line, counted = line + data.count(b"\n", counted, start), start
        text, match = raw[start]
        values = {name: value for name, value in match.groupdict().items() if value}
        hits.append(_Hit(start, line, text, match.start(), values))
    return hits


@cache
def _needle(sign: Sign) -> tuple[bytes, bytes]:
    """The needle, and its longest word, which a block without it lacks; empty if it has none."""
    words = re.findall(r"\w+", sign.needle, re.ASCII)
    return sign.needle.encode(), max(words, key=len, default="").encode()


def _matches(found: Sequence[_Found]) -> list[Match]:
    """The complete symptoms in the order of the log; of two that share a line, the first listed."""
    taken: set[int] = set()
    matches: list[Match] = []
    for item in found:
        lines = {hit.line for hit in item.hits}
        if item.is_complete and taken.isdisjoint(lines):
            taken |= lines
            matches.append(_match(item, item.hits[:_MAX_EVIDENCE]))
    return sorted(matches, key=lambda match: match.line)


def _match(found: _Found, hits: Sequence[_Hit]) -> Match:
    values = _Blanks()
    for hit in (*found.context.values(), hits[0]):
        values.update(hit.values)
    symptom = found.symptom
    below = [found.below] if found.below else []
    remedy = below[0].values["remedy"] if below else symptom.remedy.format_map(values)
    context = [hit for hit in found.context.values() if hit.line not in {h.line for h in hits}]
    return Match(
        symptom=symptom,
        cause=redact(symptom.cause.format_map(values)),
        remedy=redact(remedy.strip()),
        evidence=tuple(
            Evidence(line=hit.line, text=shown(hit.text, hit.position))
            for hit in (*hits, *below, *sorted(context, key=lambda hit: hit.line))
        ),
    )
