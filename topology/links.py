"""What joins the ranks: link classes, their speeds, and which of them a group's traffic takes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from vcli.topology.facts import GpuFacts, HostFacts, NicFacts
from vcli.topology.hardware import GPU_KINDS, GpuKind, NetworkLink, kind_of_gpu

#: Part of a data sheet's link speed that large collectives reach (measured: 302 of 450 GB/s).
LINK_EFFICIENCY: Final = 0.67
#: Part of a data sheet's memory speed that copies reach (measured on H200: 4.3 of 4.8 TB/s).
MEMORY_EFFICIENCY: Final = 0.9
#: Part of the peak that large matrix products reach.
COMPUTE_EFFICIENCY: Final = 0.6
#: A CPU's memory speed where nobody measured it.
CPU_MEMORY_BYTES_PER_S: Final = 40e9
CPU_FLOPS: Final = 1e12
#: Two channels of loopback or shared memory between processes of one node.
CPU_LINK_BYTES_PER_S: Final = 4e9


class LinkClass(StrEnum):
    """From near to far."""

    NVLINK = "NVLink"
    PCIE = "PCIe"
    SOCKET = "PCIe over the CPU sockets"
    MEMORY = "shared memory"
    NETWORK = "network"


#: Seconds that a small message needs from one rank to the next, software included.
HOP_LATENCY_S: Final[Mapping[LinkClass, float]] = {
    LinkClass.NVLINK: 3.75e-6,
    LinkClass.PCIE: 7e-6,
    LinkClass.SOCKET: 9e-6,
    LinkClass.MEMORY: 20e-6,
    LinkClass.NETWORK: 12e-6,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Speeds of one rank's device and of its links, in one direction; all nodes are alike.

    `gpu` is None on CPUs and for a GPU that the table does not have (`is_guessed`).
    """

    gpu: GpuKind | None
    memory_bytes: int | None
    memory_bytes_per_s: float
    flops: float
    near: LinkClass
    near_bytes_per_s: float
    network: NetworkLink | None
    is_guessed: bool = False

    def link_bytes_per_s(self, link: LinkClass) -> float:
        """What a large transfer reaches over `link`; 0 where nothing is known."""
        if link is LinkClass.NETWORK:
            return self.network.bytes_per_s * 0.9 if self.network else 0.0
        speed = self.near_bytes_per_s * LINK_EFFICIENCY
        if link is LinkClass.SOCKET and self.near is not LinkClass.SOCKET:
            speed = min(speed, 20e9)
        return speed

    def describe(self) -> str:
        """One line for people."""
        parts = [self.gpu.title if self.gpu else "CPU"]
        parts.append(f"{self.near.value} {self.near_bytes_per_s / 1e9:g} GB/s a direction")
        if self.network:
            parts.append(f"network {self.network.describe()} a node")
        return ", ".join(parts)


def hardware_of(
    host: HostFacts | None, device_type: str, network: NetworkLink | None = None
) -> Hardware:
    """The speeds that follow from the facts; `network` goes before the adapters of the host."""
    network = network or _network_of(host)
    if device_type != "cuda":
        return Hardware(
            gpu=None,
            memory_bytes=None,
            memory_bytes_per_s=CPU_MEMORY_BYTES_PER_S,
            flops=CPU_FLOPS,
            near=LinkClass.MEMORY,
            near_bytes_per_s=CPU_LINK_BYTES_PER_S,
            network=network,
            is_guessed=True,
        )
    gpus = host.gpus if host else ()
    known = kind_of_gpu(gpus[0]) if gpus else None
    kind = known or GPU_KINDS["h100"]
    sizes = [gpu.memory_total_bytes for gpu in gpus if gpu.memory_total_bytes]
    near = _near_class(host, kind)
    return Hardware(
        gpu=kind,
        memory_bytes=min(sizes) if sizes else (known.memory_bytes if known else None),
        memory_bytes_per_s=kind.memory_bytes_per_s,
        flops=kind.flops,
        near=near,
        near_bytes_per_s=kind.nvlink_bytes_per_s
        if near is LinkClass.NVLINK
        else kind.pcie_bytes_per_s,
        network=network,
        is_guessed=known is None,
    )


def worst_class(
    host: HostFacts | None, devices: Sequence[int], default: LinkClass
) -> tuple[LinkClass, tuple[int, int] | None]:
    """The slowest way between any two of `devices`, and the first pair that has it."""
    wanted = set(devices)
    inside = [
        link
        for link in (host.links if host else ())
        if link.first in wanted and link.second in wanted
    ]
    if not inside:
        return default, None
    order = list(LinkClass)
    worst = max(inside, key=lambda link: order.index(pair_class_of(link.kind)))
    return pair_class_of(worst.kind), (worst.first, worst.second)


def pair_class_of(kind: str) -> LinkClass:
    """The class of a link as `nvidia-smi topo` writes it."""
    if kind.startswith("NV"):
        return LinkClass.NVLINK
    return LinkClass.SOCKET if kind in ("SYS", "NODE") else LinkClass.PCIE


def nearest_nic(gpu: GpuFacts, host: HostFacts) -> tuple[NicFacts, str] | None:
    """The adapter with the shortest way to `gpu` and the class of that way; None without any.

    Where several are equally near, they are dealt out by the GPU's index.
    """
    nics = [nic for nic in host.nics if not nic.is_loopback and nic.is_up]
    preferred = [nic for nic in nics if nic.rdma_device] or nics
    if not preferred:
        return None
    ranked = [(_distance(gpu, nic), nic) for nic in preferred]
    best = min(distance for distance, _ in ranked)
    near = [nic for distance, nic in ranked if distance == best]
    return near[gpu.index % len(near)], _DISTANCES[best]


_DISTANCES: Final = ("PIX", "PXB", "NODE", "SYS", "?")


def _distance(gpu: GpuFacts, nic: NicFacts) -> int:
    """Index into `_DISTANCES`: one PCIe switch, several, one socket, two sockets, not known."""
    ours, theirs = gpu.pci_path, nic.pci_path
    if ours and theirs:
        shared = 0
        for a, b in zip(ours, theirs, strict=False):
            if a != b:
                break
            shared += 1
        # The first part is the root complex; two parts in common are a switch.
        if shared >= 2:
            return 0 if shared >= min(len(ours), len(theirs)) - 1 else 1
    if gpu.numa_node is None or nic.numa_node is None:
        return 4
    return 2 if gpu.numa_node == nic.numa_node else 3


def _near_class(host: HostFacts | None, kind: GpuKind) -> LinkClass:
    if host and host.links:
        return worst_class(host, [gpu.index for gpu in host.gpus], LinkClass.PCIE)[0]
    return LinkClass.NVLINK if kind.nvlink_bytes_per_s else LinkClass.PCIE


def _network_of(host: HostFacts | None) -> NetworkLink | None:
    speeds = [
        nic.speed_mbit
        for nic in (host.nics if host else ())
        if nic.speed_mbit and nic.is_up and not nic.is_loopback
    ]
    if not speeds:
        return None
    fastest = max(speeds)
    return NetworkLink(bits_per_s=fastest * 1e6, count=speeds.count(fastest))
