"""COLL: combinations of versions that are known to hang or to compute wrongly. Data first."""

from dataclasses import dataclass
from typing import Final

from vcli.diagnostics.check import Finding, Remedy, check, passed, skipped, warned
from vcli.diagnostics.context import CheckContext
from vcli.diagnostics.packages import version_tuple
from vcli.diagnostics.text import listing


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownFault:
    """Versions from `first` up to, not including, `fixed` of a distribution.

    `needs_nodes`: only with more than one node.
    """

    distributions: tuple[str, ...]
    first: tuple[int, ...]
    fixed: tuple[int, ...]
    text: str
    remedy: str
    needs_nodes: bool = False


KNOWN_FAULTS: Final = (
    KnownFault(
        distributions=("nvidia-nccl-cu12", "nvidia-nccl-cu13"),
        first=(2, 28, 9),
        fixed=(2, 28, 10),
        text="NCCL 2.28.9 hangs with CUDA graphs over nodes",
        remedy="--enforce-eager, or another NCCL: pip install -U '{name}>2.28.9'",
        needs_nodes=True,
    ),
    KnownFault(
        distributions=("torch",),
        first=(2, 6),
        fixed=(2, 7),
        text="torch 2.6 hangs when a process group is made with device_id",
        remedy="pip install -U 'torch>=2.11'",
    ),
)


@check(
    "COLL-07",
    "no version with a known fault",
    why="it hangs or computes wrongly without a word",
    expected="none of the combinations in the table of known faults",
    remedy=Remedy(bare_metal="{fix}"),
)
def known_faults(context: CheckContext) -> Finding:
    """Compares the installed versions with a table of combinations that are known to be broken."""
    if not context.is_cuda:
        return skipped("planned for the CPU")
    found: list[tuple[str, str]] = []
    for fault in KNOWN_FAULTS:
        if fault.needs_nodes and context.nnodes == 1:
            continue
        for name in fault.distributions:
            version = version_tuple(context.packages.version(name) or "")
            if version and fault.first <= version < fault.fixed:
                found.append((fault.text, fault.remedy.format(name=name)))
    if found:
        return warned(listing([text for text, _ in found]), values={"fix": found[0][1]})
    return passed(f"none of {len(KNOWN_FAULTS)} known")


CHECKS = (known_faults,)
