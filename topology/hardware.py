"""What GPUs and networks can do, for machines that nobody measured: a small table and its units.

Figures are those of the vendors' data sheets; `docs/topo.md` names the source of each. Bandwidths
are bytes per second in one direction.
"""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from vcli.topology.errors import ConfigError
from vcli.topology.facts import GpuFacts, HostFacts, LinkFacts, NicFacts

_GIB: Final = 1 << 30
_GB: Final = 10**9

#: Most GPUs of an assumed node; the links between all pairs are written out.
MAX_GPUS_PER_NODE: Final = 64
_MAX_SHOWN: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuKind:
    """One kind of GPU; `nvlink_bytes_per_s` is 0 without NVLink."""

    name: str
    title: str
    memory_bytes: int
    memory_bytes_per_s: float
    nvlink_bytes_per_s: float
    pcie_bytes_per_s: float
    flops: float
    """Dense 16-bit multiply-adds counted as two operations, per second."""
    compute_capability: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkLink:
    """What joins one node to the others: `count` adapters of `bits_per_s` each."""

    bits_per_s: float
    count: int = 1

    @property
    def bytes_per_s(self) -> float:
        """Of all adapters of a node together, in one direction."""
        return self.bits_per_s * self.count / 8

    def describe(self) -> str:
        """`400 Gbit/s`, `8 x 400 Gbit/s`."""
        each = f"{self.bits_per_s / 1e9:g} Gbit/s"
        return each if self.count == 1 else f"{self.count} x {each}"


def _kind(
    name: str,
    title: str,
    *,
    gib: int,
    memory: float,
    link: float,
    tflops: float,
    cc: tuple[int, int],
) -> GpuKind:
    """A row of the table: memory in GiB, speeds in GB/s, compute in TFLOP/s, its capability."""
    # x16 of the generation that came with the architecture.
    pcie_gb_s = 63.0 if cc >= (9, 0) else 31.5 if cc >= (8, 0) else 15.75
    return GpuKind(
        name=name,
        title=title,
        memory_bytes=gib * _GIB,
        memory_bytes_per_s=memory * _GB,
        nvlink_bytes_per_s=link * _GB,
        pcie_bytes_per_s=pcie_gb_s * _GB,
        flops=tflops * 1e12,
        compute_capability=cc,
    )


GPU_KINDS: Final[Mapping[str, GpuKind]] = {
    kind.name: kind
    for kind in (
        _kind("b200", "NVIDIA B200", gib=180, memory=7700, link=900, tflops=2250, cc=(10, 0)),
        _kind("h200", "NVIDIA H200", gib=141, memory=4800, link=450, tflops=989, cc=(9, 0)),
        _kind(
            "h100", "NVIDIA H100 80GB HBM3", gib=80, memory=3350, link=450, tflops=989, cc=(9, 0)
        ),
        _kind("h800", "NVIDIA H800", gib=80, memory=3350, link=200, tflops=989, cc=(9, 0)),
        _kind("h20", "NVIDIA H20", gib=96, memory=4000, link=450, tflops=148, cc=(9, 0)),
        _kind(
            "a100", "NVIDIA A100-SXM4-80GB", gib=80, memory=2039, link=300, tflops=312, cc=(8, 0)
        ),
        _kind(
            "a100-40gb",
            "NVIDIA A100-SXM4-40GB",
            gib=40,
            memory=1555,
            link=300,
            tflops=312,
            cc=(8, 0),
        ),
        _kind("l40s", "NVIDIA L40S", gib=48, memory=864, link=0, tflops=362, cc=(8, 9)),
        _kind("l4", "NVIDIA L4", gib=24, memory=300, link=0, tflops=121, cc=(8, 9)),
        _kind("a10", "NVIDIA A10", gib=24, memory=600, link=0, tflops=125, cc=(8, 6)),
        _kind("t4", "Tesla T4", gib=16, memory=320, link=0, tflops=65, cc=(7, 5)),
        _kind("v100", "Tesla V100-SXM2-32GB", gib=32, memory=900, link=150, tflops=125, cc=(7, 0)),
        _kind(
            "rtx4090", "NVIDIA GeForce RTX 4090", gib=24, memory=1008, link=0, tflops=165, cc=(8, 9)
        ),
        _kind(
            "rtx3090", "NVIDIA GeForce RTX 3090", gib=24, memory=936, link=0, tflops=71, cc=(8, 6)
        ),
    )
}
DEFAULT_GPU: Final = "h100"
#: dtype -> least compute capability that computes in it.
_LEAST_CAPABILITY: Final[Mapping[str, tuple[int, int]]] = {"bfloat16": (8, 0), "float16": (6, 0)}

_LINK: Final = re.compile(
    r"^(?:(\d+)\s*[x*]\s*)?(\d+(?:\.\d+)?)\s*([GMT])(?:b|bit|bits|bps|bit/s)?(?:ps|/s)?$",
    re.IGNORECASE,
)
_BITS: Final[Mapping[str, float]] = {"M": 1e6, "G": 1e9, "T": 1e12}


def gpu_kind(name: str) -> GpuKind:
    """The kind that the user calls `name`.

    Raises:
        ConfigError: not in the table; the hint has the nearest names.
    """
    wanted = name.strip().lower().replace(" ", "").removeprefix("nvidia")
    if wanted in GPU_KINDS:
        return GPU_KINDS[wanted]
    near = difflib.get_close_matches(wanted, GPU_KINDS, n=3, cutoff=0.5)
    raise ConfigError(
        f"GPU kind {name!r} is not in the table",
        hint=f"--gpu: {', '.join(near or GPU_KINDS)}; or --facts FILE saved on such a machine",
    )


def gpus_without(dtype: str, gpus: Sequence[GpuFacts]) -> tuple[str, str] | None:
    """What the first GPUs that can't compute in `dtype` lack, and the type to use instead.

    None where all can; a GPU of unknown compute capability can.
    """
    least = _LEAST_CAPABILITY.get(dtype, (0, 0))
    old = [gpu for gpu in gpus if gpu.compute_capability and gpu.compute_capability < least]
    if not old:
        return None
    shown = [
        f"GPU {gpu.index} {gpu.name} has {'.'.join(map(str, gpu.compute_capability or ()))}"
        for gpu in old[:_MAX_SHOWN]
    ]
    more = f" and {len(old) - _MAX_SHOWN} more" if len(old) > _MAX_SHOWN else ""
    need = f"{dtype} needs compute capability {least[0]}.{least[1]}"
    other = "float16" if dtype == "bfloat16" else "float32"
    return f"{need}: {', '.join(shown)}{more}", other


def kind_of_gpu(gpu: GpuFacts) -> GpuKind | None:
    """The kind of an observed GPU, by its name as the driver writes it; None if not known."""
    name = gpu.name.lower().replace(" ", "").replace("-", "")
    # Longer names first: a100-40gb goes before a100.
    for kind in sorted(GPU_KINDS.values(), key=lambda kind: -len(kind.name)):
        if kind.name.replace("-", "") in name or kind.title.lower() == gpu.name.lower():
            return kind
    if "a100" in name:
        small = gpu.memory_total_bytes is not None and gpu.memory_total_bytes < 60 * _GIB
        return GPU_KINDS["a100-40gb" if small else "a100"]
    return None


def parse_link(text: str) -> NetworkLink:
    """`400Gb`, `25G`, `8x400Gb` (adapters of a node) as a speed.

    Raises:
        ConfigError: no speed.
    """
    match = _LINK.match(text.strip())
    # A capital B after the unit would mean bytes; adapters are sold in bits.
    if not match or text.strip().removesuffix("/s").endswith("B"):
        raise ConfigError(
            f"--link {text!r} is no speed in bits per second", hint="--link 400Gb, or 8x400Gb"
        )
    count, speed = int(match[1] or 1), float(match[2]) * _BITS[match[3].upper()]
    if count < 1 or speed <= 0:
        raise ConfigError(f"--link {text!r} must be above 0", hint="--link 400Gb")
    return NetworkLink(bits_per_s=speed, count=count)


def assumed_gpu_host(
    kind: GpuKind, num_gpus: int, *, cpu_count: int | None = None, link: NetworkLink | None = None
) -> HostFacts:
    """A node with `num_gpus` of `kind`, all joined alike, that nobody looked at.

    The first half of the GPUs is taken to be near NUMA node 0, the rest near node 1, where there
    are four or more.

    Raises:
        ConfigError: fewer than one or very many GPUs.
    """
    if not 1 <= num_gpus <= MAX_GPUS_PER_NODE:
        raise ConfigError(
            f"--gpus {num_gpus} must lie in 1..{MAX_GPUS_PER_NODE} (GPUs of one node)",
            hint="--gpus 8 with --nnodes for more",
        )
    half = -(-num_gpus // 2) if num_gpus >= 4 else num_gpus
    gpus = tuple(
        GpuFacts(
            index=index,
            name=kind.title,
            compute_capability=kind.compute_capability,
            memory_total_bytes=kind.memory_bytes,
            memory_free_bytes=kind.memory_bytes,
            numa_node=int(index >= half),
        )
        for index in range(num_gpus)
    )
    has_nvlink = kind.nvlink_bytes_per_s > 0
    links = tuple(
        LinkFacts(
            first=first,
            second=second,
            kind="NV" if has_nvlink else _pcie_class(first, second, half),
            can_access_peer=True if has_nvlink else None,
        )
        for first in range(num_gpus)
        for second in range(first + 1, num_gpus)
    )
    nics = _assumed_nics(link, num_gpus, half) if link else ()
    return HostFacts(
        hostname="assumed",
        is_assumed=True,
        cpu_count=cpu_count or 16 * num_gpus,
        gpus=gpus,
        links=links,
        nics=nics,
    )


def _pcie_class(first: int, second: int, half: int) -> str:
    return "PHB" if (first >= half) == (second >= half) else "SYS"


def _assumed_nics(link: NetworkLink, num_gpus: int, half: int) -> tuple[NicFacts, ...]:
    return tuple(
        NicFacts(
            name=f"nic{index}",
            speed_mbit=int(link.bits_per_s / 1e6),
            numa_node=int(index * num_gpus // link.count >= half),
        )
        for index in range(min(link.count, MAX_GPUS_PER_NODE))
    )
