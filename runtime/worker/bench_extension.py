"""What `vcli bench offline` asks of each rank, as a worker extension."""

import resource
import time
from typing import Any, Final

import torch

_COPY_BYTES: Final = {"cuda": 1 << 30, "cpu": 64 << 20}
_NUM_COPIES: Final = 8
_NUM_ROUNDS: Final = 3


class BenchExtension:
    """Methods that every worker of a benchmark has; none of them touches a request."""

    device: torch.device

    def bench_noop(self) -> None:
        """Nothing, to time the way to the ranks and back."""

    def bench_device(self) -> dict[str, Any]:
        """Name, versions, and the memory in use, in bytes.

        On a GPU `peak_bytes` is the most that torch held, `used_bytes` what the whole device has
        in use now, libraries and other processes included; on a CPU both are the process' peak.
        """
        versions: dict[str, str] = {"torch": str(torch.__version__)}
        if self.device.type != "cuda":
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            return {"name": "", "versions": versions, "peak_bytes": peak, "used_bytes": peak}
        free_bytes, total_bytes = torch.cuda.mem_get_info(self.device)
        return {
            "name": torch.cuda.get_device_name(self.device),
            "versions": {**versions, "cuda": torch.version.cuda or ""},
            "peak_bytes": torch.cuda.max_memory_reserved(self.device),
            "used_bytes": total_bytes - free_bytes,
        }

    def bench_copy(self) -> float:
        """Bytes per second of a copy within the device's memory, read and written both counted."""
        is_cuda = self.device.type == "cuda"
        num_bytes = _COPY_BYTES["cuda" if is_cuda else "cpu"]
        if is_cuda:
            num_bytes = min(num_bytes, torch.cuda.mem_get_info(self.device)[0] // 4)
        source = torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
        target = torch.zeros_like(source)
        best_s = min(_copy_s(source, target) for _ in range(_NUM_ROUNDS + 1))
        del source, target
        if is_cuda:
            torch.cuda.empty_cache()
        return 2 * num_bytes / best_s


def _copy_s(source: torch.Tensor, target: torch.Tensor) -> float:
    _wait(source.device)
    began = time.perf_counter()
    for _ in range(_NUM_COPIES):
        target.copy_(source)
    _wait(source.device)
    return (time.perf_counter() - began) / _NUM_COPIES


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
