"""Which collective each rank is in: a line of shared memory per rank, for when a step stalls.

    line of a rank: collectives entered | code of the one it is in, 0 outside | since (monotonic ns)

A rank writes its own line, with three stores a collective; the executor reads all of them, those
of other nodes as these tell them. In a group all ranks call the same collectives, so the ranks that
a waiting one waits for are those of its group that are not in it.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from vcli.runtime.ipc.segment import SharedSegment

_LINE_WORDS = 8
_LINE_BYTES = 8 * _LINE_WORDS

OPERATIONS: Final = ("all_reduce", "all_gather", "broadcast", "send", "recv", "broadcast_object")
KINDS: Final = ("TP", "PCP", "DCP", "PP", "DP", "EP", "EPLB")
_CODES: Final = {
    (operation, kind): 1 + index * len(KINDS) + place
    for index, operation in enumerate(OPERATIONS)
    for place, kind in enumerate(KINDS)
}
_NAMES: Final = {code: names for names, code in _CODES.items()}


class RankProgress(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank does, as it was `age_s` ago at the most.

    `operation` and `kind` are empty outside of a collective.
    """

    rank: int
    num_entered: int
    operation: str
    kind: str
    seconds: float
    age_s: float = 0.0

    @property
    def is_waiting(self) -> bool:
        """Whether the rank is in a collective."""
        return bool(self.operation)

    def describe(self) -> str:
        """In words."""
        if self.is_waiting:
            return f"in {self.operation} of {self.kind} (collective {self.num_entered})"
        plural = "s" * (self.num_entered != 1)
        return f"outside of a collective, after {self.num_entered} collective{plural}"


class ProgressLine:
    """One rank's own line. One thread writes."""

    def __init__(self, words: memoryview) -> None:
        self._words = words

    def enter(self, operation: str, kind: str) -> None:
        """The rank is about to wait for its peers."""
        words = self._words
        words[2] = time.monotonic_ns()
        words[1] = _CODES[operation, kind]
        words[0] += 1

    def leave(self) -> None:
        """All peers came."""
        self._words[1] = 0

    def read(self, rank: int) -> RankProgress:
        """The line as a value."""
        num_entered, code, since_ns = self._words[0], self._words[1], self._words[2]
        operation, kind = _NAMES.get(code, ("", ""))
        return RankProgress(
            rank=rank,
            num_entered=num_entered,
            operation=operation,
            kind=kind,
            seconds=(time.monotonic_ns() - since_ns) / 1e9 if code else 0.0,
        )


class ProgressBoard:
    """The lines of all ranks of a replica on one node."""

    def __init__(self, segment: SharedSegment) -> None:
        self._segment = segment
        self._words = segment.buffer.cast("q")

    @classmethod
    def create(cls, num_ranks: int) -> "ProgressBoard":
        """A board of empty lines.

        Raises:
            UnfitError: not enough memory for it.
        """
        return cls(SharedSegment.create(num_ranks * _LINE_BYTES, "vcli-progress"))

    @classmethod
    def attach(cls, fd: int) -> "ProgressBoard":
        """A board whose descriptor was inherited; takes the descriptor over."""
        return cls(SharedSegment.attach(fd))

    @property
    def fd(self) -> int:
        """The descriptor to inherit."""
        return self._segment.fd

    def line(self, rank: int) -> ProgressLine:
        """The line of a rank."""
        return ProgressLine(self._words[rank * _LINE_WORDS : (rank + 1) * _LINE_WORDS])

    def read(self, num_ranks: int) -> list[RankProgress]:
        """The lines of the first ranks."""
        return [self.line(rank).read(rank) for rank in range(num_ranks)]

    def close(self) -> None:
        """Give the memory back; lines that were given out must not be written any more."""
        self._words.release()
        self._segment.close()


def read_progress(data: bytes) -> list[RankProgress]:
    """All lines of a board, from a copy of its bytes."""
    words = memoryview(data[: len(data) // _LINE_BYTES * _LINE_BYTES]).cast("q")
    return [
        ProgressLine(words[rank * _LINE_WORDS :]).read(rank)
        for rank in range(len(words) // _LINE_WORDS)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Absence:
    """A rank that others wait for in `collective`.

    `progress` is None when it is not known where the rank has been since the wait began: perhaps
    it has come.
    """

    rank: int
    collective: str
    progress: RankProgress | None


def missing_from_collective(
    ranks: Sequence[RankProgress | None], group_of: Sequence[dict[str, tuple[int, ...]]]
) -> list[Absence]:
    """Ranks that others wait for in a collective; empty: nobody waits.

    `ranks[rank]` is None where nothing is known. `group_of[rank]` are the ranks of each kind of
    group that the rank is in.
    """
    missing: dict[int, Absence] = {}
    for waiting in ranks:
        if waiting is None or not waiting.is_waiting:
            continue
        group = group_of[waiting.rank].get(waiting.kind, ())
        collective = f"{waiting.operation} of {waiting.kind} {list(group)}"
        for peer in _awaited(waiting, group):
            if peer >= len(ranks):
                continue  # of another replica
            line = ranks[peer]
            if line is not None and _has_come(waiting, line):
                continue
            if line is not None and line.age_s > waiting.seconds:
                line = None  # it was not late yet when this was seen
            if peer not in missing or missing[peer].progress is None:
                missing[peer] = Absence(rank=peer, collective=collective, progress=line)
    absences = [missing[rank] for rank in sorted(missing)]
    # One that waits itself is only late because of somebody else.
    causes = [each for each in absences if each.progress is None or not each.progress.is_waiting]
    return causes or absences


_PARTNER_OF: Final = {"send": ("recv", 1), "recv": ("send", -1)}
"""What the partner does, and where it stands in the group."""


def _awaited(waiting: RankProgress, group: tuple[int, ...]) -> tuple[int, ...]:
    if waiting.rank not in group:
        return ()
    if waiting.operation not in _PARTNER_OF:
        return group
    place = group.index(waiting.rank) + _PARTNER_OF[waiting.operation][1]
    return (group[place],) if 0 <= place < len(group) else ()


def _has_come(waiting: RankProgress, peer: RankProgress) -> bool:
    if waiting.operation in _PARTNER_OF:
        return (peer.operation, peer.kind) == (_PARTNER_OF[waiting.operation][0], waiting.kind)
    # In a group all ranks enter the same collectives, so their numbers can be compared.
    return peer.num_entered >= waiting.num_entered
