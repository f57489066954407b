"""What the memory of a rank went to, noted phase by phase of its start.

begin            groups made, cuBLAS warm: what is taken now is not the model's
note_model       parameters are allocated
kv_cache_bytes   weights are there; a step of the largest size is measured
note_kv_cache    the cache is allocated
capture          CUDA graphs; their memory is what is free before less what is free after
"""

import gc
from collections.abc import Callable

import torch

from vcli.runtime.config import EngineConfig
from vcli.runtime.messages import KVCacheConfig, MemoryReport
from vcli.runtime.models.decoder import CausalLM
from vcli.runtime.worker.device import device_uuid, warm_up_blas
from vcli.runtime.worker.memory import (
    GpuMemory,
    cpu_kv_cache_bytes,
    free_host_bytes,
    gpu_kv_cache_bytes,
    measure_gpu,
)
from vcli.topology.plan import RankPlan
from vcli.topology.rank_memory import (
    MemoryItems,
    RankMemoryPlan,
    known_items,
    planned_graph_bytes,
)


class MemoryLedger:
    """Belongs to the thread that starts the rank; `report` may be called at any time."""

    def __init__(self, config: EngineConfig, plan: RankPlan) -> None:
        self._config = config
        self._plan = plan
        self._device = torch.device("cpu")
        self._planned = next(
            (item for item in config.memory_plan if item.rank == plan.rank),
            RankMemoryPlan(rank=plan.rank, items=MemoryItems()),
        )
        self._at_start: GpuMemory | None = None
        self._context_bytes: int | None = None
        self._weight_bytes: int | None = None
        self._activation_bytes: int | None = None
        self._graph_bytes: int | None = None
        self._kv_bytes: int | None = None
        self._kv_tokens: int | None = None

    def begin(self, device: torch.device, dtype: torch.dtype) -> None:
        """The baseline; after the groups, so that NCCL's buffers are no growth of the model's."""
        self._device = device
        if device.type != "cuda":
            return
        warm_up_blas(device, dtype)
        self._at_start = now = self._settled()
        if self._planned.free_bytes is not None:
            taken = self._planned.free_bytes - now.free_bytes - now.torch_reserved_bytes
            self._context_bytes = max(taken, 0)

    def note_model(self, model: CausalLM) -> None:
        """Count the parameters as they are made: what packs them for a CPU hides their size."""
        self._weight_bytes = sum(parameter.nbytes for parameter in model.parameters())

    def kv_cache_bytes(self, run_largest_step: Callable[[], None]) -> tuple[int, str]:
        """Bytes that the KV cache of this rank may take, and where the number comes from.

        Raises:
            UnfitError: nothing is left for it.
        """
        given = self._config.cache.kv_cache_memory_bytes
        if self._at_start is not None:
            allocated = torch.cuda.memory_allocated(self._device)
            self._weight_bytes = allocated - self._at_start.torch_allocated_bytes
        if given is not None:
            return given, "as configured"
        if self._at_start is None:
            num_here = len(self._config.plan.local_ranks(self._plan.node_rank))
            how = f"a quarter of the free memory, for {num_here} ranks on this node"
            return cpu_kv_cache_bytes(free_host_bytes(), num_here), how
        part = self._config.cache.gpu_memory_utilization
        num_bytes = self._profile(self._at_start, run_largest_step, part)
        return num_bytes, f"gpu_memory_utilization={part:g}"

    def note_kv_cache(self, kv: KVCacheConfig, bytes_per_block: int) -> None:
        """Count the cache that was allocated."""
        self._kv_bytes = kv.num_blocks * bytes_per_block
        self._kv_tokens = kv.num_blocks * kv.block_size

    def capture(self, capture: Callable[[], int]) -> int:
        """Run `capture`, which gives a number, and count the memory of the graphs that it makes."""
        if self._device.type != "cuda":
            return capture()
        before = self._settled()
        num_sizes = capture()
        after = self._settled()
        self._graph_bytes = max(before.free_bytes - after.free_bytes, 0)
        return num_sizes

    def report(self) -> MemoryReport:
        """What is known by now, beside what was planned."""
        is_gpu = self._device.type == "cuda"
        measured = MemoryItems(
            weight_bytes=self._weight_bytes,
            activation_bytes=self._activation_bytes,
            graph_bytes=self._graph_bytes,
            context_bytes=self._context_bytes,
            kv_bytes=self._kv_bytes,
            kv_tokens=self._kv_tokens,
        )
        return MemoryReport(
            rank=self._plan.rank,
            device=str(self._device),
            device_uuid=device_uuid(self._device),
            planned=known_items(self._planned.items),
            measured=known_items(measured),
            free_bytes=torch.cuda.mem_get_info(self._device)[0] if is_gpu else None,
        )

    def _profile(
        self, at_start: GpuMemory, run_largest_step: Callable[[], None], part: float
    ) -> int:
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        run_largest_step()
        after = self._settled()
        self._activation_bytes = after.torch_peak_bytes - before
        return gpu_kv_cache_bytes(
            at_start=at_start,
            after_profile=after,
            gpu_memory_utilization=part,
            graph_bytes=planned_graph_bytes(self._config.plan, self._config.memory_limits),
        )

    def _settled(self) -> GpuMemory:
        """The state of the device when all work is done and torch keeps nothing it could give."""
        torch.cuda.synchronize(self._device)
        gc.collect()
        torch.cuda.empty_cache()
        return measure_gpu(self._device)
