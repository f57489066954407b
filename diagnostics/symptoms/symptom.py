"""What a symptom is: the lines that give a failure away, its cause, and what mends it."""

from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    """What a line of this kind is in the story of a failure.

    What vcli says of its own failure (`own`) is told where no cause is known, before a
    consequence. An echo (a closed connection, a signal to the other ranks) stands in healthy ends
    too, and is only counted behind a cause.
    """

    CAUSE = "cause"
    OWN = "own"
    CONSEQUENCE = "consequence"
    ECHO = "echo"


@dataclass(frozen=True, slots=True)
class Sign:
    """One line of a log. `needle` stands in every line that `pattern`, a regular expression, finds.

    The needle begins and ends with whole words.

    A group `key` in the pattern tells apart what a later line ends (see `Symptom.ended_by`);
    other groups are values for the texts.
    """

    needle: str
    pattern: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Symptom:
    """One row of the catalogue.

    signs: any of these lines, at least `min_hits` times.
    also: context; one sign of each of these groups must stand somewhere in the log.
    below: a line shortly below the first hit; its group `remedy` is told instead of `remedy`.
    ended_by: a later line of these takes the hits before it back: it went on.
    check: the id of the check that tells it before the start; None where there is none.
    reports: where it was reported, for the page.

    `{name}` in `cause` and `remedy` stands for a value of the first hit.
    """

    name: str
    title: str
    signs: tuple[Sign, ...]
    cause: str
    remedy: str
    check: str | None = None
    role: Role = Role.CAUSE
    also: tuple[tuple[Sign, ...], ...] = ()
    below: tuple[Sign, ...] = ()
    ended_by: tuple[Sign, ...] = ()
    min_hits: int = 1
    reports: str = ""
