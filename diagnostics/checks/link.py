"""LINK: the ways between the GPUs, as driver and kernel describe them."""

from collections.abc import Iterator
from itertools import combinations
from typing import Any, Final

from vcli.diagnostics.check import Finding, Level, Remedy, check, passed, skipped, warned
from vcli.diagnostics.context import CheckContext
from vcli.diagnostics.gpu import DeviceLostError, Nvml
from vcli.diagnostics.text import listing, plural
from vcli.topology import GpuFacts, LinkFacts

_ONE_GPU: Final = "no two GPUs"
#: P2P status by NVML's number, as nvidia-smi writes it.
_P2P_WORDS: Final = {0: "OK", 1: "CNS", 2: "GNS", 3: "TNS", 4: "DR", 5: "NS", 6: "U"}
_READ, _WRITE = 0, 1
#: Far first.
_DISTANCES: Final = ("SYS", "NODE", "PHB", "PXB", "PIX")
_CUSTOM_SIZES: Final = (2, 4, 6, 8, 16)


def tp_pairs(context: CheckContext) -> set[tuple[int, int]]:
    """Pairs of device indices within a TP group on this node; all pairs without ranks on GPUs."""
    if not context.is_cuda:
        return set(combinations([gpu.index for gpu in context.host.gpus], 2))
    pairs: set[tuple[int, int]] = set()
    groups: dict[tuple[int, int, int], list[int]] = {}
    for rank in context.local_ranks:
        key = (rank.dp_rank, rank.pp_rank, rank.pcp_rank)
        groups.setdefault(key, []).append(rank.device_index)
    for devices in groups.values():
        pairs.update(combinations(sorted(devices), 2))
    return pairs


def _tp_links(context: CheckContext) -> list[LinkFacts]:
    pairs = tp_pairs(context)
    return [
        link
        for link in context.host.links
        if (min(link.first, link.second), max(link.first, link.second)) in pairs
    ]


@check(
    "LINK-01",
    "GPUs may read each other's memory",
    level=Level.L1,
    why="NCCL goes through host memory instead, and the fast all-reduce is off",
    expected="read and write access within each tensor-parallel group",
    remedy=Remedy(
        bare_metal="nvidia-smi topo -p2p r   shows the table; enable peer access in the BIOS (no "
        "ACS on the bridges), or keep groups inside what is OK with CUDA_VISIBLE_DEVICES",
        kubernetes="run on bare metal nodes, or give the virtual machine ACS-free passthrough",
    ),
    requires=("CUDA-01",),
)
def p2p_table(context: CheckContext) -> Finding:
    """Reads the driver's table of peer access, for reading and writing.

    It says what the driver allows, not that data arrive.
    """
    if len(context.host.gpus) < 2:
        return skipped(_ONE_GPU)
    session = context.open_nvml()
    by_index = {gpu.index: gpu for gpu in context.host.gpus}
    bad: list[str] = []
    pairs = sorted(tp_pairs(context))
    for first, second in pairs:
        if first not in by_index or second not in by_index:
            continue
        status = _p2p_status(session, by_index[first], by_index[second])
        if status:
            bad.append(f"{first}-{second} {status}")
    if bad:
        return warned(f"{len(bad)} of {plural(len(pairs), 'pair')} not OK: {listing(bad)}")
    return passed(f"{plural(len(pairs), 'pair')} OK")


def _p2p_status(session: Nvml, first: GpuFacts, second: GpuFacts) -> str:
    """The word of the first kind of access that is not OK; empty if both are."""
    try:
        one, other = session.handle(first), session.handle(second)
        for kind in (_READ, _WRITE):
            status = _p2p_answer(session, one, other, kind)
            if status:
                return _P2P_WORDS.get(status, "U")
    except DeviceLostError:
        return "lost"
    return ""


def _p2p_answer(session: Nvml, one: Any, other: Any, kind: int) -> int | None:
    return session.ask(lambda nvml: int(nvml.nvmlDeviceGetP2PStatus(one, other, kind)))


@check(
    "LINK-05",
    "near GPUs in a group",
    level=Level.L1,
    why="a group over two CPU sockets talks through the link between them",
    expected="no tensor-parallel group over SYS while nearer GPUs are free",
    remedy=Remedy(bare_metal="export CUDA_VISIBLE_DEVICES={order}"),
    requires=("CUDA-01",),
)
def distance(context: CheckContext) -> Finding:
    """Looks at the farthest way within each tensor-parallel group, and for a nearer choice.

    Warns only where another choice of as many GPUs has no pair as far apart.
    """
    links = _tp_links(context)
    if not links:
        return skipped(_ONE_GPU)
    kinds = {(min(x.first, x.second), max(x.first, x.second)): x.kind for x in context.host.links}
    far = [link for link in links if link.kind == "SYS"]
    worst = max((link.kind for link in links), key=_farness)
    size = context.plan.config.tp
    if not far or not context.is_cuda or size > len(context.host.gpus):
        return passed(f"{worst} at most within a group")
    better = next(_nearer_choices(context, kinds, size), None)
    if better is None:
        return passed("SYS within a group, and no nearer choice")
    text = listing([f"{link.first}-{link.second}" for link in far])
    return warned(f"SYS between {text} of a group", values={"order": ",".join(map(str, better))})


def _farness(kind: str) -> int:
    return len(_DISTANCES) - _DISTANCES.index(kind) if kind in _DISTANCES else 0


def _nearer_choices(
    context: CheckContext, kinds: dict[tuple[int, int], str], size: int
) -> Iterator[tuple[int, ...]]:
    """Choices of `size` GPUs without a pair over SYS; the rest of the ranks need their own."""
    if len(context.local_ranks) != size:
        return
    for chosen in combinations([gpu.index for gpu in context.host.gpus], size):
        if all(kinds.get(pair, "SYS") != "SYS" for pair in combinations(chosen, 2)):
            yield chosen


@check(
    "LINK-06",
    "no address translation between GPUs",
    why="behind a translating IOMMU, peer writes may never arrive though the driver says OK",
    expected="iommu=pt or off, where GPUs talk over PCIe",
    remedy=Remedy(
        bare_metal="add iommu=pt to the kernel's command line and reboot (or switch VT-d/AMD-Vi "
        "and ACS off in the BIOS); until then NCCL_P2P_DISABLE=1",
        docker="on the host: iommu=pt on the kernel's command line; until then docker run -e "
        "NCCL_P2P_DISABLE=1 …",
    ),
)
def iommu(context: CheckContext) -> Finding:
    """Looks at the type of the IOMMU groups of the GPUs, with several GPUs that have no NVLink.

    A group of type DMA or DMA-FQ is translated, one of type identity is not.
    """
    gpus = context.host.gpus
    if len(gpus) < 2:
        return skipped(_ONE_GPU)
    if context.host.links and all(link.kind.startswith("NV") for link in context.host.links):
        return skipped("all GPUs are joined by NVLink")
    translated = []
    for gpu in gpus:
        path = f"/sys/bus/pci/devices/{gpu.pci_bus_id}/iommu_group/type"
        kind = (context.files.read(path) or "").strip()
        if kind.startswith("DMA"):
            translated.append(f"GPU {gpu.index} ({kind})")
    if translated:
        return warned(f"translated: {listing(translated)}")
    return passed("not translated")


@check(
    "LINK-09",
    "fast all-reduce",
    level=Level.L1,
    why="it decides how small messages are summed",
    expected="2, 4, 6, 8 or 16 ranks on one node with peer access",
    remedy=Remedy(bare_metal="nothing to do: NCCL is used where it is not possible"),
)
def custom_all_reduce(context: CheckContext) -> Finding:
    """Says which all-reduce the plan intends, and why. Never fails."""
    config = context.plan.config
    if not context.is_cuda or config.tp == 1:
        return skipped("no tensor parallelism on GPUs")
    decision = context.plan.all_reduce
    order = " > ".join(decision.value)
    size = "" if config.tp in _CUSTOM_SIZES else f"; {config.tp} ranks have no fast one"
    return passed(f"{order}: {'; '.join(decision.reasons)}{size}")


@check(
    "LINK-11",
    "a network card near each GPU",
    why="GPUDirect goes through the CPU where no card is near",
    expected="a card below the same bridge as the GPU, where other GPUs have one",
    remedy=Remedy(
        bare_metal="export NCCL_IB_HCA={devices}   (the near cards first)",
        docker="docker run -e NCCL_IB_HCA={devices} …, with all cards in the container",
    ),
)
def near_nic(context: CheckContext) -> Finding:
    """Compares the places of GPUs and RDMA cards on PCIe, with several nodes."""
    cards = [nic for nic in context.host.nics if nic.rdma_device and nic.pci_path]
    gpus = [gpu for gpu in context.gpus if gpu.pci_path]
    if context.nnodes == 1 or not cards or not gpus:
        return skipped("one node" if context.nnodes == 1 else "no RDMA card or GPU")
    near = {
        gpu.index: [nic for nic in cards if len(_common(gpu.pci_path, nic.pci_path)) >= 2]
        for gpu in gpus
    }
    without = [index for index, found in near.items() if not found]
    if without and len(without) < len(near):
        devices = ",".join(dict.fromkeys(n.rdma_device or "" for f in near.values() for n in f))
        return warned(f"no near card: GPU {listing(list(map(str, without)))}",
                      values={"devices": devices})  # fmt: skip
    return passed(f"{plural(len(cards), 'card')} for {plural(len(gpus), 'GPU')}")


def _common(first: tuple[str, ...], second: tuple[str, ...]) -> tuple[str, ...]:
    shared = []
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        shared.append(one)
    return tuple(shared)


CHECKS = (p2p_table, distance, iommu, custom_all_reduce, near_nic)
