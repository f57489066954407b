"""Frozen configuration of the engine, composed of parts; everything in it is already decided."""

import time
from dataclasses import dataclass, replace
from pathlib import Path

from vcli.topology.config import ParallelConfig
from vcli.topology.model_spec import ModelSpec
from vcli.topology.planner import TopologyPlan
from vcli.topology.rank_memory import MemoryLimits, RankMemoryPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The model and how it is held. `dtype` is resolved (`float32`, `bfloat16`, `float16`)."""

    path: Path
    served_name: str
    spec: ModelSpec
    dtype: str
    max_model_len: int
    seed: int = 0
    load_format: str = "safetensors"
    """`safetensors`, or `dummy` for random weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The KV cache of one rank."""

    block_size: int = 16
    """Tokens per KV block."""
    enable_prefix_caching: bool = True
    kv_cache_memory_bytes: int | None = None
    """Bytes for the KV cache of each rank; None: measured, a quarter of the free on CPU."""
    gpu_memory_utilization: float = 0.9
    """Part of a GPU's memory that vcli may fill, weights and activations included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of one step."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    enable_chunked_prefill: bool = True
    async_scheduling: bool | None = None
    """Prepare a step while the one before it runs; None: where the back end can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlineConfig:
    """Longest waits, in seconds. None of them is infinite."""

    start_s: float = 600.0
    """From the first process to ready."""
    start_end_s: float | None = None
    """When that is over, on this host's monotonic clock; None as long as nothing is started."""
    execute_model_s: float = 300.0
    """One step on all ranks."""
    shutdown_s: float = 5.0
    """From the request to stop until SIGKILL."""
    stall_s: float = 60.0
    """A step that takes so long is stuck: all stacks, and who is behind, are told."""
    drain_s: float = 2.5
    """What running requests may still take once a signal has come; with the end of the processes
    after it, five seconds by default."""

    def begun(self) -> "DeadlineConfig":
        """The same for a start that begins now."""
        return replace(self, start_end_s=time.monotonic() + self.start_s)

    def start_left_s(self) -> float:
        """Seconds that the start may still take: one deadline for all of its steps."""
        if self.start_end_s is None:
            return self.start_s
        return max(0.0, self.start_end_s - time.monotonic())


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedRank:
    """Who this process is, by the word of what started it (torchrun, mpirun)."""

    rank: int
    local_rank: int
    world_size: int
    master_addr: str
    master_port: int
    is_store_hosted: bool = False
    """The launcher runs the rendezvous store itself; else rank 0 does."""
    store_prefix: str = ""
    """Keeps the keys of this attempt apart from those of an earlier one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything that the engine core and its workers need; picklable."""

    model: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    parallel: ParallelConfig
    plan: TopologyPlan
    device_type: str
    """`cpu` or `cuda`."""
    deadlines: DeadlineConfig = DeadlineConfig()
    worker_extension_cls: str | None = None
    """`module:Class` or `module.Class` whose public methods are added to the worker's."""
    enforce_eager: bool = False
    launched: LaunchedRank | None = None
    """For the back end `external_launcher`."""
    visible_devices: str | None = None
    """CUDA_VISIBLE_DEVICES of the children on this node; None: they inherit it."""
    memory_plan: tuple[RankMemoryPlan, ...] = ()
    """What each rank is expected to take; () where nobody planned it."""
    log_level: str = "INFO"

    @property
    def device_environ(self) -> dict[str, str]:
        """Additions to the environment of every process that may use a device."""
        return (
            {} if self.visible_devices is None else {"CUDA_VISIBLE_DEVICES": self.visible_devices}
        )

    @property
    def memory_limits(self) -> MemoryLimits:
        """What the memory of each rank has to hold."""
        return MemoryLimits(
            utilization=self.cache.gpu_memory_utilization,
            block_size=self.cache.block_size,
            max_num_seqs=self.scheduler.max_num_seqs,
            max_num_batched_tokens=self.scheduler.max_num_batched_tokens,
            max_model_len=self.model.max_model_len,
            kv_cache_memory_bytes=self.cache.kv_cache_memory_bytes,
            enforce_eager=self.enforce_eager,
        )
