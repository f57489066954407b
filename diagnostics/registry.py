"""The list of checks: order, look-up by id or group, suggestions for a mistyped one."""

import difflib
from collections.abc import Collection, Iterable
from typing import Final

from vcli.diagnostics.check import Check, Level
from vcli.topology import ConfigError

#: Group -> heading of its line, in the order of the report, which is the order of repair.
GROUPS: Final = {
    "host": "Host",
    "py": "Python",
    "env": "Environment",
    "cuda": "CUDA & driver",
    "gpu": "GPU health",
    "link": "P2P & NVLink",
    "numa": "NUMA & CPU",
    "lim": "Limits & memory",
    "net": "Network",
    "ib": "InfiniBand",
    "proc": "Processes",
    "fit": "Model fit",
    "rdv": "Nodes agree",
    "coll": "Collectives",
    "ray": "Ray",
}


class CheckRegistry:
    """Checks in the order of their groups, each id once."""

    def __init__(self, checks: Iterable[Check]) -> None:
        order = list(GROUPS)
        listed = sorted(checks, key=lambda item: (order.index(item.group), item.id))
        self._by_id = {item.id: item for item in listed}
        if len(self._by_id) != len(listed):
            raise ValueError("two checks have the same id")
        unknown = [
            f"{item.id} requires {need}"
            for item in listed
            for need in item.requires
            if need not in self._by_id
        ]
        if unknown:
            raise ValueError(", ".join(unknown))

    @property
    def checks(self) -> tuple[Check, ...]:
        """All of them."""
        return tuple(self._by_id.values())

    def get(self, id_: str) -> Check:
        """The check with this id."""
        return self._by_id[id_]

    def has(self, word: str) -> bool:
        """Whether `word` is the id of a check or the name of a group, in any case."""
        return word.upper() in self._by_id or word.lower() in self._groups()

    def select(self, words: Collection[str], *, is_fast: bool = False) -> tuple[Check, ...]:
        """The checks with these ids and of these groups, all without a word; in their order.

        Where `is_fast` those of level L3 only by their own id.

        Raises:
            ConfigError: a word is neither; the hint has the nearest.
        """
        named = {word.upper() for word in words}
        wanted = {id_ for word in words for id_ in self.expand(word)}
        return tuple(
            item
            for item in self.checks
            if (item.id in wanted or not wanted)
            and (not is_fast or item.level is not Level.L3 or item.id in named)
        )

    def expand(self, word: str) -> tuple[str, ...]:
        """The ids that one word stands for.

        Raises:
            ConfigError: none; the hint has the nearest.
        """
        if word.upper() in self._by_id:
            return (word.upper(),)
        ids = tuple(item.id for item in self.checks if item.group == word.lower())
        if ids:
            return ids
        known = [*self._by_id, *self._groups()]
        near = difflib.get_close_matches(word.upper(), known, n=3, cutoff=0.6)
        near += difflib.get_close_matches(word.lower(), known, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(dict.fromkeys(near[:3]))}?" if near else ""
        raise ConfigError(
            f"there is no check or group {word!r}",
            hint=hint
            or f"groups: {', '.join(self._groups())}; all checks: vcli doctor --list-checks",
        )

    def with_requirements(self, checks: Iterable[Check]) -> tuple[Check, ...]:
        """The checks and all that they require, in their order."""
        wanted: set[str] = set()
        waiting = [item.id for item in checks]
        while waiting:
            id_ = waiting.pop()
            if id_ not in wanted:
                wanted.add(id_)
                waiting += self._by_id[id_].requires
        return tuple(item for item in self.checks if item.id in wanted)

    def _groups(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(item.group for item in self.checks))
