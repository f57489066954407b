"""The GPUs of this host and the ways between them: NVML where it can be had, else what /proc shows.

An absent driver or library is a fact (`GpuObservation.problem`), never an exception.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar

from vcli.diagnostics.pci import numa_node_of, pci_path_of
from vcli.topology import GpuFacts, LinkFacts

_T = TypeVar("_T")

# Named as numbers: the library's own constant for reading is a tuple by mistake.
_P2P_READ: Final = 0
_P2P_OK: Final = 0
#: NVML's distance of two GPUs -> the word of `nvidia-smi topo`
_ANCESTORS: Final[Mapping[int, str]] = {
    0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS",
}  # fmt: skip
_MAX_NVLINKS: Final = 18


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuObservation:
    """What was seen; `problem` says why it is less than everything, empty if it is not."""

    gpus: tuple[GpuFacts, ...] = ()
    links: tuple[LinkFacts, ...] = ()
    driver_version: str | None = None
    cuda_driver_version: str | None = None
    problem: str = ""


def collect_gpus(
    environ: Mapping[str, str], root: Path = Path("/"), nvml: Any | None = None
) -> GpuObservation:
    """Observe the GPUs that CUDA_VISIBLE_DEVICES of `environ` leaves visible, in its order.

    `nvml` stands in for the pynvml module in tests. Makes no CUDA context.
    """
    module, problem = (nvml, "") if nvml is not None else _load_nvml()
    observed = GpuObservation(problem=problem)
    if module is not None:
        observed = _from_nvml(module, root)
    if not observed.gpus:
        observed = replace(observed, gpus=_from_proc(root))
    chosen = _visible(observed.gpus, environ.get("CUDA_VISIBLE_DEVICES"))
    return _renumbered(observed, chosen)


def _load_nvml() -> tuple[Any | None, str]:
    try:
        return importlib.import_module("pynvml"), ""
    except ImportError:
        return None, "NVML was not asked: pip install nvidia-ml-py"


def _from_nvml(nvml: Any, root: Path) -> GpuObservation:
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return GpuObservation(problem=f"NVML: {error}")
    try:
        count = int(nvml.nvmlDeviceGetCount())
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
        gpus = tuple(_gpu(nvml, root, index, handle) for index, handle in enumerate(handles))
        links = tuple(
            _link(nvml, handles, gpus, first, second)
            for first in range(count)
            for second in range(first + 1, count)
        )
        return GpuObservation(
            gpus=gpus,
            links=links,
            driver_version=_text(_ask(nvml, nvml.nvmlSystemGetDriverVersion)) or None,
            cuda_driver_version=_cuda_version(_ask(nvml, nvml.nvmlSystemGetCudaDriverVersion_v2)),
        )
    except nvml.NVMLError as error:
        return GpuObservation(problem=f"NVML: {error}")
    finally:
        _ask(nvml, nvml.nvmlShutdown)


def _gpu(nvml: Any, root: Path, index: int, handle: Any) -> GpuFacts:
    memory = _ask(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    pci = _ask(nvml, nvml.nvmlDeviceGetPciInfo, handle)
    bus_id = _short_bus_id(_text(getattr(pci, "busId", "")))
    capability = _ask(nvml, nvml.nvmlDeviceGetCudaComputeCapability, handle)
    mig = _ask(nvml, nvml.nvmlDeviceGetMigMode, handle)
    return GpuFacts(
        index=index,
        name=_text(_ask(nvml, nvml.nvmlDeviceGetName, handle)) or "unknown GPU",
        uuid=_text(_ask(nvml, nvml.nvmlDeviceGetUUID, handle)),
        pci_bus_id=bus_id,
        compute_capability=(int(capability[0]), int(capability[1])) if capability else None,
        memory_total_bytes=int(memory.total) if memory else None,
        memory_free_bytes=int(memory.free) if memory else None,
        numa_node=numa_node_of(root, bus_id),
        is_mig=bool(mig and mig[0]),
        pci_path=pci_path_of(root, bus_id),
    )


def _link(
    nvml: Any, handles: Sequence[Any], gpus: Sequence[GpuFacts], first: int, second: int
) -> LinkFacts:
    one, other = handles[first], handles[second]
    status = _ask(nvml, nvml.nvmlDeviceGetP2PStatus, one, other, _P2P_READ)
    num_links = _num_nvlinks(nvml, one, gpus[second].pci_bus_id)
    kind = f"NV{num_links}" if num_links else ""
    if not kind:
        distance = _ask(nvml, nvml.nvmlDeviceGetTopologyCommonAncestor, one, other)
        kind = _ANCESTORS.get(int(distance), "SYS") if distance is not None else "SYS"
    return LinkFacts(
        first=first,
        second=second,
        kind=kind,
        can_access_peer=None if status is None else int(status) == _P2P_OK,
    )


def _num_nvlinks(nvml: Any, handle: Any, peer_bus_id: str) -> int:
    """Active NVLinks to the peer, or to a switch, through which every GPU is reached alike."""
    direct = switched = 0
    for link in range(_MAX_NVLINKS):
        if _ask(nvml, nvml.nvmlDeviceGetNvLinkState, handle, link) != 1:
            continue
        remote = _ask(nvml, nvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)
        bus_id = _short_bus_id(_text(getattr(remote, "busId", "")))
        if bus_id == peer_bus_id:
            direct += 1
        elif _is_switch(nvml, handle, link):
            switched += 1
    return direct or switched


def _is_switch(nvml: Any, handle: Any, link: int) -> bool:
    # 0 GPU, 1 IBM NPU, 2 switch
    kind = _ask(nvml, nvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link)
    return kind == 2


def _from_proc(root: Path) -> tuple[GpuFacts, ...]:
    """What the kernel module tells without NVML: names and places, no memory."""
    folder = root / "proc/driver/nvidia/gpus"
    found = []
    try:
        entries = sorted(folder.iterdir())
    except OSError:
        return ()
    for index, entry in enumerate(entries):
        try:
            text = (entry / "information").read_text()
        except OSError:
            text = ""
        values = {
            name.strip(): value.strip()
            for name, _, value in (line.partition(":") for line in text.splitlines())
        }
        bus_id = _short_bus_id(entry.name)
        found.append(
            GpuFacts(
                index=index,
                name=values.get("Model", "unknown GPU"),
                uuid=values.get("GPU UUID", ""),
                pci_bus_id=bus_id,
                numa_node=numa_node_of(root, bus_id),
                pci_path=pci_path_of(root, bus_id),
            )
        )
    return tuple(found)


def _visible(gpus: Sequence[GpuFacts], variable: str | None) -> list[int]:
    """Indices that CUDA would show: it stops at the first entry that it doesn't know."""
    if variable is None:
        return list(range(len(gpus)))
    chosen: list[int] = []
    for entry in (part.strip() for part in variable.split(",")):
        found = [
            gpu.index
            for gpu in gpus
            if entry == str(gpu.index)
            or (entry.startswith(("GPU-", "MIG-")) and gpu.uuid.startswith(entry))
        ]
        if len(found) != 1 or found[0] in chosen:
            break
        chosen += found
    return chosen


def _renumbered(observed: GpuObservation, chosen: Sequence[int]) -> GpuObservation:
    position = {old: new for new, old in enumerate(chosen)}
    return replace(
        observed,
        gpus=tuple(replace(observed.gpus[old], index=new) for old, new in position.items()),
        links=tuple(
            replace(link, first=position[link.first], second=position[link.second])
            for link in observed.links
            if link.first in position and link.second in position
        ),
    )


def _ask(nvml: Any, function: Callable[..., _T], *arguments: Any) -> _T | None:
    """The answer, None where this driver or device has none."""
    try:
        return function(*arguments)
    except nvml.NVMLError:
        return None


def _text(value: object) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value or "")


def _cuda_version(value: object) -> str | None:
    return f"{value // 1000}.{value % 1000 // 10}" if isinstance(value, int) else None


def _short_bus_id(bus_id: str) -> str:
    """`0000:1b:00.0`, as sysfs writes it; NVML writes eight digits and capitals."""
    domain, separator, rest = bus_id.strip("\0").lower().partition(":")
    return f"{domain[-4:]}{separator}{rest}" if separator else ""
