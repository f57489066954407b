"""The GPUs of this host: a session with NVML, and what is seen through it, else through /proc.

An absent driver or library is a fact (`NvmlProblem`, `GpuObservation.problem`), no exception, and
no answer is None. Makes no CUDA context. `module` is pynvml, or a stand-in with the same functions.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar

from vcli.diagnostics.errors import CannotMeasureError
from vcli.diagnostics.pci import numa_node_of, pci_path_of
from vcli.topology import GpuFacts, LinkFacts
from vcli.topology.devices import CUDA_VISIBLE_DEVICES, renumbered

Answer = TypeVar("Answer")

NO_PERMISSION: Final = 4
DRIVER_NOT_LOADED: Final = 9
LIBRARY_NOT_FOUND: Final = 12
GPU_IS_LOST: Final = 15
RESET_REQUIRED: Final = 16
LIB_RM_VERSION_MISMATCH: Final = 18
UNKNOWN_ERROR: Final = 999

#: The driver or the device has no answer to this question.
_NO_ANSWER: Final = (2, 3, 6, 13, 22, 25, 26)  # argument, support, found, function, ECC, version

# Named as numbers: the library's own constant for reading is a tuple by mistake.
_P2P_READ: Final = 0
_P2P_OK: Final = 0
#: NVML's distance of two GPUs -> the word of `nvidia-smi topo`
_ANCESTORS: Final[Mapping[int, str]] = {
    0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS",
}  # fmt: skip
_MAX_NVLINKS: Final = 18


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmlProblem:
    """Why NVML could not be started; `code` is its return value, None without the module."""

    code: int | None
    text: str


class DeviceLostError(Exception):
    """The device no longer answers: it fell off the bus, or must be reset."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.is_lost = code == GPU_IS_LOST


class Nvml:
    """A session; `open` it once, ask as often as wanted. Safe from any thread."""

    def __init__(self, module: Any) -> None:
        self.module = module

    @classmethod
    def open(cls, module: Any | None = None) -> "Nvml | NvmlProblem":
        """A session, or why there is none; `module` may be a name to import."""
        if module is None or isinstance(module, str):
            try:
                module = importlib.import_module(module or "pynvml")
            except ImportError:
                return NvmlProblem(code=None, text="nvidia-ml-py is not installed")
        try:
            module.nvmlInit()
        except module.NVMLError as error:
            return NvmlProblem(code=int(getattr(error, "value", UNKNOWN_ERROR)), text=str(error))
        return cls(module)

    def ask(self, question: Callable[[Any], Answer]) -> Answer | None:
        """The answer; None where driver or device have none.

        Raises:
            DeviceLostError: the device is gone.
            CannotMeasureError: NVML refuses to say (permission, unknown error).
        """
        try:
            return question(self.module)
        except self.module.NVMLError as error:
            code = int(getattr(error, "value", UNKNOWN_ERROR))
            if code in _NO_ANSWER:
                return None
            if code in (GPU_IS_LOST, RESET_REQUIRED):
                raise DeviceLostError(code) from error
            raise CannotMeasureError(f"NVML: {error}") from error
        except AttributeError:  # a pynvml that is older than the question
            return None

    def seek(self, question: Callable[[Any], Answer]) -> Answer | None:
        """The answer; None for whatever reason there is none."""
        try:
            return self.ask(question)
        except (DeviceLostError, CannotMeasureError):
            return None

    def handle(self, gpu: GpuFacts) -> Any:
        """NVML's handle of a visible GPU.

        Raises:
            CannotMeasureError: there is no such device any more.
        """
        if gpu.uuid.startswith("GPU-"):
            found = self.ask(lambda nvml: nvml.nvmlDeviceGetHandleByUUID(gpu.uuid))
        else:
            found = self.ask(lambda nvml: nvml.nvmlDeviceGetHandleByIndex(gpu.index))
        if found is None:
            raise CannotMeasureError(f"NVML does not know GPU {gpu.index} ({gpu.uuid})")
        return found


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
    session = Nvml.open(nvml)
    if isinstance(session, Nvml):
        observed = _from_nvml(session, root)
    elif session.code is None:
        observed = GpuObservation(problem="NVML was not asked: pip install nvidia-ml-py")
    else:
        observed = GpuObservation(problem=f"NVML: {session.text}")
    if not observed.gpus:
        observed = replace(observed, gpus=_from_proc(root))
    chosen = _visible(observed.gpus, environ.get(CUDA_VISIBLE_DEVICES))
    gpus, links = renumbered(observed.gpus, observed.links, chosen)
    numbered = tuple(replace(gpu, visible_index=gpu.index) for gpu in gpus)
    return replace(observed, gpus=numbered, links=links)


def _from_nvml(session: Nvml, root: Path) -> GpuObservation:
    nvml = session.module
    try:
        count = int(nvml.nvmlDeviceGetCount())
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
    except nvml.NVMLError as error:
        return GpuObservation(problem=f"NVML: {error}")
    gpus = tuple(_gpu(session, root, index, handle) for index, handle in enumerate(handles))
    links = tuple(
        _link(session, handles, gpus, first, second)
        for first in range(count)
        for second in range(first + 1, count)
    )
    cuda = session.seek(lambda nvml: nvml.nvmlSystemGetCudaDriverVersion_v2())
    observed = GpuObservation(
        gpus=gpus,
        links=links,
        driver_version=_text(session.seek(lambda nvml: nvml.nvmlSystemGetDriverVersion())) or None,
        cuda_driver_version=_cuda_version(cuda),
    )
    session.seek(lambda nvml: nvml.nvmlShutdown())
    return observed


def _gpu(session: Nvml, root: Path, index: int, handle: Any) -> GpuFacts:
    memory = session.seek(lambda nvml: nvml.nvmlDeviceGetMemoryInfo(handle))
    pci = session.seek(lambda nvml: nvml.nvmlDeviceGetPciInfo(handle))
    bus_id = _short_bus_id(_text(getattr(pci, "busId", "")))
    capability = session.seek(lambda nvml: nvml.nvmlDeviceGetCudaComputeCapability(handle))
    mig = session.seek(lambda nvml: nvml.nvmlDeviceGetMigMode(handle))
    return GpuFacts(
        index=index,
        physical_index=index,
        name=_text(session.seek(lambda nvml: nvml.nvmlDeviceGetName(handle))) or "unknown GPU",
        uuid=_text(session.seek(lambda nvml: nvml.nvmlDeviceGetUUID(handle))),
        pci_bus_id=bus_id,
        compute_capability=(int(capability[0]), int(capability[1])) if capability else None,
        memory_total_bytes=int(memory.total) if memory else None,
        memory_free_bytes=int(memory.free) if memory else None,
        numa_node=numa_node_of(root, bus_id),
        is_mig=bool(mig and mig[0]),
        pci_path=pci_path_of(root, bus_id),
    )


def _link(
    session: Nvml, handles: Sequence[Any], gpus: Sequence[GpuFacts], first: int, second: int
) -> LinkFacts:
    one, other = handles[first], handles[second]
    status = session.seek(lambda nvml: nvml.nvmlDeviceGetP2PStatus(one, other, _P2P_READ))
    num_links = _num_nvlinks(session, one, gpus[second].pci_bus_id)
    kind = f"NV{num_links}" if num_links else ""
    if not kind:
        distance = session.seek(lambda nvml: nvml.nvmlDeviceGetTopologyCommonAncestor(one, other))
        kind = _ANCESTORS.get(int(distance), "SYS") if distance is not None else "SYS"
    return LinkFacts(
        first=first,
        second=second,
        kind=kind,
        can_access_peer=None if status is None else int(status) == _P2P_OK,
    )


def _num_nvlinks(session: Nvml, handle: Any, peer_bus_id: str) -> int:
    """Active NVLinks to the peer, or to a switch, through which every GPU is reached alike."""
    direct = switched = 0
    for link in range(_MAX_NVLINKS):
        bus_id = _far_end(session, handle, link)
        if bus_id is None:
            continue
        if bus_id == peer_bus_id:
            direct += 1
        elif _is_switch(session, handle, link):
            switched += 1
    return direct or switched


def _far_end(session: Nvml, handle: Any, link: int) -> str | None:
    """Bus id of what an active link leads to, empty where it does not say; None if it is down."""
    if session.seek(lambda nvml: nvml.nvmlDeviceGetNvLinkState(handle, link)) != 1:
        return None
    remote = session.seek(lambda nvml: nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link))
    return _short_bus_id(_text(getattr(remote, "busId", "")))


def _is_switch(session: Nvml, handle: Any, link: int) -> bool:
    # 0 GPU, 1 IBM NPU, 2 switch
    kind = session.seek(lambda nvml: nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link))
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
                physical_index=index,
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


def _text(value: object) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value or "")


def _cuda_version(value: object) -> str | None:
    return f"{value // 1000}.{value % 1000 // 10}" if isinstance(value, int) else None


def _short_bus_id(bus_id: str) -> str:
    """`0000:1b:00.0`, as sysfs writes it; NVML writes eight digits and capitals."""
    domain, separator, rest = bus_id.strip("\0").lower().partition(":")
    return f"{domain[-4:]}{separator}{rest}" if separator else ""
