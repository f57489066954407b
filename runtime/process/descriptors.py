"""Which open files a process has, under which numbers."""

import contextlib
import os
from collections.abc import Collection, Sequence


def place_descriptors(sources: Sequence[int], targets: Sequence[int]) -> None:
    """Give the open file `sources[i]` the number `targets[i]`, not inheritable, for every i.

    A source that is no target is closed; any other file under a target's number is, too.
    """
    moves = dict(zip(targets, sources, strict=True))
    while moves:
        # A target that is still the source of another move must wait for that one.
        free = [target for target in moves if target not in moves.values()]
        if not free:
            target, source = next(iter(moves.items()))
            if target == source:
                os.set_inheritable(target, False)
                del moves[target]
                continue
            # A circle: one step aside opens it.
            aside = os.dup(source)
            moves[target] = aside
            continue
        for target in free:
            source = moves.pop(target)
            os.dup2(source, target, inheritable=False)
            if source not in targets:
                os.close(source)


def close_all_but(kept: Collection[int]) -> None:
    """Close every open file whose number is not in `kept`."""
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - numbers, not paths
        if int(name) not in kept:
            with contextlib.suppress(OSError):  # the listing's own descriptor is closed already
                os.close(int(name))
