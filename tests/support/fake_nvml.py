"""A stand-in for pynvml: GPUs as data; what is not told is not supported."""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from vcli.topology import GpuFacts

NOT_SUPPORTED = 3
FUNCTION_NOT_FOUND = 13
GPU_IS_LOST = 15
RESET_REQUIRED = 16


class NVMLError(Exception):
    """As pynvml's: the code is `value`."""

    def __init__(self, value: int) -> None:
        super().__init__(f"error {value}")
        self.value = value


@dataclass
class FakeGpu:
    """`answers`: function name without `nvmlDeviceGet` -> value, a list for successive calls."""

    index: int = 0
    uuid: str = ""
    answers: dict[str, Any] = field(default_factory=dict)
    error: int = 0
    links: Sequence[int] = ()
    link_errors: dict[int, list[int]] = field(default_factory=dict)
    p2p: Mapping[int, int] = field(default_factory=dict)
    fabric_state: int = 0


class FakeNvml:
    """The module."""

    NVMLError = NVMLError

    def __init__(self, gpus: Sequence[FakeGpu] = (), *, init_error: int = 0) -> None:
        self.gpus = list(gpus)
        for index, gpu in enumerate(self.gpus):
            gpu.index, gpu.uuid = index, gpu.uuid or f"GPU-{index}"
        self.init_error = init_error

    def nvmlInit(self) -> None:
        if self.init_error:
            raise NVMLError(self.init_error)

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakeGpu:
        found = [gpu for gpu in self.gpus if gpu.uuid == uuid]
        if not found:
            raise NVMLError(6)
        return found[0]

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        return self.gpus[index]

    def nvmlDeviceGetP2PStatus(self, one: FakeGpu, other: FakeGpu, kind: int) -> int:
        assert isinstance(kind, int)
        return one.p2p.get(other.index, 0)

    def nvmlDeviceGetNvLinkState(self, gpu: FakeGpu, link: int) -> int:
        self._alive(gpu)
        if link >= len(gpu.links):
            raise NVMLError(NOT_SUPPORTED)
        return gpu.links[link]

    def nvmlDeviceGetNvLinkErrorCounter(self, gpu: FakeGpu, link: int, kind: int) -> int:
        counts = gpu.link_errors.get(link)
        if counts is None or kind:
            raise NVMLError(NOT_SUPPORTED)
        return counts.pop(0) if len(counts) > 1 else counts[0]

    class c_nvmlGpuFabricInfoV_t(ctypes.Structure):
        _fields_: ClassVar = [("state", ctypes.c_uint8)]

    def nvmlDeviceGetGpuFabricInfoV(self, gpu: FakeGpu, info: Any) -> int:
        if not gpu.fabric_state:
            raise NVMLError(FUNCTION_NOT_FOUND)
        info._obj.state = gpu.fabric_state  # a reference, as C wants it
        return 0

    def _alive(self, gpu: FakeGpu) -> None:
        if gpu.error:
            raise NVMLError(gpu.error)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if not name.startswith("nvmlDeviceGet"):
            raise AttributeError(name)

        def answer(gpu: FakeGpu, *_: Any) -> Any:
            self._alive(gpu)
            value = gpu.answers.get(name.removeprefix("nvmlDeviceGet"))
            if value is None:
                raise NVMLError(NOT_SUPPORTED)
            if isinstance(value, list) and not name.endswith("Processes"):
                return value.pop(0) if len(value) > 1 else value[0]
            return value

        return answer


def gpu_facts(count: int, **changes: Any) -> tuple[GpuFacts, ...]:
    """H100s of 80 GiB, all free; a list in `changes` has a value for each."""
    gib = 1024**3
    found = []
    for index in range(count):
        fields: dict[str, Any] = {
            "name": "NVIDIA H100",
            "uuid": f"GPU-{index}",
            "pci_bus_id": f"0000:{index + 1:02x}:00.0",
            "compute_capability": (9, 0),
            "memory_total_bytes": 80 * gib,
            "memory_free_bytes": 79 * gib,
        }
        fields |= {
            name: value[index] if isinstance(value, list) else value
            for name, value in changes.items()
        }
        found.append(GpuFacts(index=index, **fields))
    return tuple(found)
