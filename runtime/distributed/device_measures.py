"""What one device does by itself: a product with a known result, copies to and from the host."""

import importlib
from typing import Any, Final

import torch

from vcli.runtime.distributed.trials import timing_event, wait_for_device

#: Rows of the square matrices.
PRODUCT_SIZES: Final = (1024, 4096)
_CPU_SIZES: Final = (256, 512)
_NUM_PRODUCTS: Final = 10
_COPY_BYTES: Final = 64 << 20
_NUM_COPIES: Final = 20


def check_product(device: torch.device) -> dict[str, Any]:
    """Products of small whole numbers, exact in 16 bits, against sums in 64-bit numbers.

    `num_wrong` rows over all sizes, `ms` of one product of the largest.
    """
    is_cuda = device.type == "cuda"
    generator = torch.Generator(device).manual_seed(1)

    def numbers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(
            low, high, shape, generator=generator, device=device, dtype=torch.int8
        )  # fmt: skip

    num_wrong, ms = 0, 0.0
    for size in PRODUCT_SIZES if is_cuda else _CPU_SIZES:
        dtype = torch.float16 if is_cuda else torch.float32
        a, b = (numbers(-2, 3, size, size).to(dtype) for _ in range(2))
        # (a b) v = a (b v): one wrong element of the product changes its row.
        v = numbers(1, 8, size).double()
        product = a @ b
        num_wrong += int(((product.double() @ v) != (a.double() @ (b.double() @ v))).sum())
        if is_cuda:
            start, end = (timing_event() for _ in range(2))
            start.record()
            for _ in range(_NUM_PRODUCTS):
                torch.mm(a, b, out=product)
            end.record()
            wait_for_device(device)
            ms = float(start.elapsed_time(end)) / _NUM_PRODUCTS
    return {"num_wrong": num_wrong, "ms": round(ms, 3)}


def measure_host_copies(device: torch.device, uuid: str) -> dict[str, Any]:
    """Copies of pinned memory both ways in GB/s, and the PCIe link as NVML sees it meanwhile.

    `gen`, `max_gen`, `width`, `max_width` are absent where NVML does not tell.
    """
    on_host = torch.zeros(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    on_device = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=device)
    nvml = _open_nvml()
    found: dict[str, Any] = {}
    for name, target, source in (
        ("to_device_GBps", on_device, on_host),
        ("from_device_GBps", on_host, on_device),
    ):
        target.copy_(source, non_blocking=True)
        start, end = (timing_event() for _ in range(2))
        start.record()
        for _ in range(_NUM_COPIES):
            target.copy_(source, non_blocking=True)
        end.record()
        if nvml is not None:
            found |= _pcie_link(nvml, uuid)
        wait_for_device(device)
        found[name] = round(_COPY_BYTES * _NUM_COPIES / start.elapsed_time(end) / 1e6, 1)
    return found


def device_facts(device: torch.device) -> dict[str, Any]:
    """Name, UUID, compute capability, and the architectures that this torch has kernels for."""
    properties = torch.cuda.get_device_properties(device)
    uuid = getattr(properties, "uuid", "")
    return {
        "name": properties.name,
        "uuid": f"GPU-{uuid}" if uuid else "",
        "capability": [properties.major, properties.minor],
        "architectures": torch.cuda.get_arch_list(),
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),  # type: ignore[no-untyped-call]
    }


def _open_nvml() -> Any | None:
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # noqa: BLE001 - border: NVML is optional, and fails in many ways
        return None
    return nvml


def _pcie_link(nvml: Any, uuid: str) -> dict[str, int]:
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        return {
            "gen": int(nvml.nvmlDeviceGetCurrPcieLinkGeneration(handle)),
            "max_gen": int(nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)),
            "width": int(nvml.nvmlDeviceGetCurrPcieLinkWidth(handle)),
            "max_width": int(nvml.nvmlDeviceGetMaxPcieLinkWidth(handle)),
        }
    except nvml.NVMLError:
        return {}
