"""How small tensors are summed over a TP group: the intended way and its fall-back order.

Only the workers can verify it. They try the ways in this order and report the one in effect.
Nothing here needs NVLink multicast.
"""

from typing import Final

from vcli.topology.decision import Decision
from vcli.topology.facts import HostFacts, LinkFacts

#: Most ranks for which one-shot exchange over peer memory gains anything.
MAX_SYMM_MEM_RANKS: Final = 8


def decide_all_reduce(
    *,
    device_type: str,
    group_size: int,
    is_within_node: bool,
    devices: tuple[int, ...] = (),
    host: HostFacts | None = None,
) -> Decision[tuple[str, ...]]:
    """The ways to try, first to last; `devices` are the GPUs of one TP group on `host`."""
    if device_type != "cuda":
        return _decision(("gloo",), f"the device is {device_type}")
    if group_size == 1:
        return _decision(("nccl",), "TP groups have one rank, so nothing is summed")
    if not is_within_node:
        return _decision(("nccl",), "a TP group spans nodes, where there is no peer memory")
    if group_size > MAX_SYMM_MEM_RANKS:
        return _decision(
            ("nccl",), f"TP groups of {group_size} are above {MAX_SYMM_MEM_RANKS} ranks"
        )
    links = host.links if host else ()
    blocked = tuple(_blocked(link) for link in links if _is_inside(link, devices))
    reasons = tuple(reason for reason in blocked if reason)
    if reasons:
        return _decision(("nccl",), *reasons)
    return _decision(
        ("symm_mem", "nccl"),
        f"{group_size} GPUs on one node: one-shot and two-shot sums over peer memory are faster "
        "for small tensors",
        "NCCL where the workers' check of the data does not pass",
    )


def _is_inside(link: LinkFacts, devices: tuple[int, ...]) -> bool:
    return link.first in devices and link.second in devices


def _blocked(link: LinkFacts) -> str:
    pair = f"GPU {link.first} and GPU {link.second} ({link.kind})"
    if link.can_access_peer is False:
        return f"no peer access between {pair}"
    if link.is_verified is False:
        return f"peer access between {pair} gave wrong data"
    return ""


def _decision(value: tuple[str, ...], *reasons: str) -> Decision[tuple[str, ...]]:
    return Decision(name="all_reduce", value=value, reasons=reasons)
