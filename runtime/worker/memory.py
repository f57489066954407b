"""How many bytes of this rank's device the KV cache may take: pure arithmetic, and what it reads.

CPU: a part of what the machine and the memory cgroup leave, shared by the ranks of the node.
CUDA: what `gpu_memory_utilization` allows, less the weights and the measured peak of a full step.
"""

from dataclasses import dataclass

import torch

from vcli.runtime.ipc.segment import memory_budgets
from vcli.topology.errors import UnfitError

_GIB = 1 << 30

#: part of the free memory of a CPU node that the KV caches of all its ranks may fill
CPU_CACHE_PART = 0.25

#: bytes of a GPU left free besides everything counted: late library buffers, fragmentation
GPU_RESERVE_BYTES = 150 << 20


def cpu_kv_cache_bytes(free_bytes: int, ranks_on_node: int) -> int:
    """Bytes for the KV cache of one rank on a CPU node where `free_bytes` can be had."""
    return int(free_bytes * CPU_CACHE_PART) // ranks_on_node


def free_host_bytes() -> int:
    """What a process may still allocate: the least of MemAvailable and each cgroup's rest.

    Raises:
        UnfitError: the kernel does not say how much is available.
    """
    budgets = memory_budgets()
    if not budgets:
        raise UnfitError(
            "neither /proc/meminfo nor a memory cgroup says how much memory is free",
            hint="give the size: --kv-cache-memory-bytes",
        )
    return max(min(budget.available_bytes for budget in budgets), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemory:
    """What a GPU and torch's allocator say at one moment, in bytes."""

    total_bytes: int
    free_bytes: int
    torch_allocated_bytes: int
    torch_reserved_bytes: int
    torch_peak_bytes: int
    """Most that was allocated since the last reset of the peak."""

    @property
    def outside_torch_bytes(self) -> int:
        """In use by others: CUDA contexts, NCCL's buffers, other processes."""
        return self.total_bytes - self.free_bytes - self.torch_reserved_bytes


def measure_gpu(device: torch.device) -> GpuMemory:
    """The present state of `device`."""
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return GpuMemory(
        total_bytes=total_bytes,
        free_bytes=free_bytes,
        torch_allocated_bytes=torch.cuda.memory_allocated(device),
        torch_reserved_bytes=torch.cuda.memory_reserved(device),
        torch_peak_bytes=torch.cuda.max_memory_allocated(device),
    )


def gpu_kv_cache_bytes(
    *,
    at_start: GpuMemory,
    after_profile: GpuMemory,
    gpu_memory_utilization: float,
    graph_bytes: int = 0,
) -> int:
    """Bytes for the KV cache of one GPU.

    `at_start` was taken after the groups were made and before the weights, `after_profile` after
    a step of the largest size. The budget pays for the weights and the step's peak (both are in
    torch's peak), for what grew outside torch meanwhile, and for the graphs, which are captured
    when the cache is there (`graph_bytes`, an estimate). However large the budget is, what is free
    now has to hold the cache together with the next peak and the graphs.

    Raises:
        UnfitError: nothing is left.
    """
    budget = int(after_profile.total_bytes * gpu_memory_utilization)
    grown = max(after_profile.outside_torch_bytes - at_start.outside_torch_bytes, 0)
    by_budget = budget - after_profile.torch_peak_bytes - grown - graph_bytes
    next_peak = after_profile.torch_peak_bytes - after_profile.torch_reserved_bytes
    by_free = after_profile.free_bytes - max(next_peak, 0) - graph_bytes - GPU_RESERVE_BYTES
    left = min(by_budget, by_free)
    if left <= 0:
        raise UnfitError(
            f"no GPU memory is left for the KV cache: {_gib(after_profile.total_bytes)} in all, "
            f"{_gib(budget)} allowed (gpu_memory_utilization={gpu_memory_utilization:g}), weights "
            f"and one step take {_gib(after_profile.torch_peak_bytes)}, CUDA graphs about "
            f"{_gib(graph_bytes)}, {_gib(after_profile.free_bytes)} are free",
            hint="raise --gpu-memory-utilization, lower --max-num-batched-tokens, or use more "
            "GPUs (--tensor-parallel-size)",
        )
    return left


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.2f} GiB"
