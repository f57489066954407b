"""From typed flags to the frozen configuration that the runtime obeys."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from vcli.diagnostics import has_nvidia_gpu
from vcli.runtime.config import (
    CacheConfig,
    DeadlineConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
)
from vcli.topology import (
    ConfigError,
    HostFacts,
    ModelSpec,
    ParallelConfig,
    ProcessFacts,
    TopologyPlan,
    check_model_fits,
    plan_topology,
)

_UNITS: Final[Mapping[str, int]] = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_BYTES: Final = re.compile(r"^(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?$", re.IGNORECASE)
_DTYPES: Final[Mapping[str, str]] = {
    "float32": "float32",
    "float": "float32",
    "fp32": "float32",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "half": "float16",
    "fp16": "float16",
}
_LOG_LEVELS: Final = ("DEBUG", "INFO", "WARNING", "ERROR")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """What was typed about the model and its memory, not yet judged against a model."""

    dtype: str
    max_model_len: int | None
    served_name: str | None
    load_format: str
    seed: int
    device: str
    enforce_eager: bool
    worker_extension_cls: str | None
    start_timeout_s: float
    log_level: str
    cache: CacheConfig
    scheduler: SchedulerConfig

    def __post_init__(self) -> None:
        if self.load_format not in ("safetensors", "dummy"):
            raise ConfigError(
                f"load_format={self.load_format!r} is unknown", hint="safetensors or dummy"
            )
        if self.device not in ("auto", "cpu", "cuda"):
            raise ConfigError(f"device={self.device!r} is unknown", hint="auto, cpu or cuda")
        if self.log_level not in _LOG_LEVELS:
            raise ConfigError(
                f"log_level={self.log_level!r} is unknown", hint=", ".join(_LOG_LEVELS)
            )
        _at_least_one("--max-num-seqs", self.scheduler.max_num_seqs)
        _at_least_one("--max-num-batched-tokens", self.scheduler.max_num_batched_tokens)
        _at_least_one("--block-size", self.cache.block_size)
        if self.max_model_len is not None:
            _at_least_one("--max-model-len", self.max_model_len)
        if not 0 < self.start_timeout_s < 7 * 86400:
            raise ConfigError(
                f"--start-timeout {self.start_timeout_s:g} must be above 0 seconds",
                hint="--start-timeout 600",
            )
        if not 0 < self.cache.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"--gpu-memory-utilization {self.cache.gpu_memory_utilization:g} must be "
                "above 0 and at most 1",
                hint="--gpu-memory-utilization 0.9",
            )
        if self.scheduler.max_num_batched_tokens < self.scheduler.max_num_seqs:
            raise ConfigError(
                f"--max-num-batched-tokens {self.scheduler.max_num_batched_tokens} must be at "
                f"least --max-num-seqs {self.scheduler.max_num_seqs}: each running request "
                "needs one token in a step",
                hint=f"--max-num-seqs {self.scheduler.max_num_batched_tokens}",
            )


def build_engine_config(
    settings: ModelSettings,
    parallel: ParallelConfig,
    spec: ModelSpec,
    *,
    path: Path,
    name: str,
    host: HostFacts,
    process: ProcessFacts,
) -> EngineConfig:
    """Judge the settings against the model and the host, and plan.

    Raises:
        ConfigError: sizes that do not fit the model, an unknown type, or too long a context.
    """
    check_model_fits(spec, parallel)
    dtype = resolve_dtype(settings.dtype, spec)
    device_type = resolve_device(settings.device)
    plan = plan_topology(
        parallel, host=host, process=process, model=spec, dtype=dtype, device_type=device_type
    )
    max_model_len = _resolve_length(settings, spec)
    _check_kv_cache_memory(settings.cache, plan, max_model_len)
    return EngineConfig(
        model=ModelConfig(
            path=path,
            served_name=settings.served_name or name,
            spec=spec,
            dtype=dtype,
            max_model_len=max_model_len,
            seed=settings.seed,
            load_format=settings.load_format,
        ),
        cache=settings.cache,
        scheduler=settings.scheduler,
        parallel=parallel,
        plan=plan,
        device_type=device_type,
        deadlines=DeadlineConfig(start_s=settings.start_timeout_s),
        worker_extension_cls=settings.worker_extension_cls,
        enforce_eager=settings.enforce_eager,
        log_level=settings.log_level,
    )


def refuse_unserved_sizes(parallel: ParallelConfig) -> None:
    """Say which sizes `topo` can plan but `serve` cannot run.

    Raises:
        ConfigError: one of them is asked for.
    """
    asked = {
        "--data-parallel-size": parallel.dp > 1,
        "--prefill-context-parallel-size": parallel.pcp > 1,
        "--decode-context-parallel-size": parallel.dcp > 1,
        "--enable-expert-parallel": parallel.enable_expert_parallel,
        "--nnodes": parallel.nnodes > 1,
    }
    flags = [flag for flag, is_asked in asked.items() if is_asked]
    if flags:
        raise ConfigError(
            f"{', '.join(flags)}: topo plans this; serve does not run it yet",
            hint="see the plan with vcli topo and the same flags; serve runs -tp and -pp on one "
            "node",
        )


def resolve_dtype(typed: str, spec: ModelSpec) -> str:
    """The type that `--dtype` means for this model.

    Raises:
        ConfigError: no type that vcli computes in.
    """
    wanted = spec.dtype if typed == "auto" else typed
    dtype = _DTYPES.get(wanted.lower())
    if dtype is None:
        whose = "the checkpoint's dtype" if typed == "auto" else "--dtype"
        raise ConfigError(
            f"{whose} {wanted!r} is not supported",
            hint="--dtype auto, float32, bfloat16 or float16",
        )
    return dtype


def resolve_device(typed: str) -> str:
    """`cpu` or `cuda`; `auto` is cuda where the NVIDIA driver shows a GPU."""
    if typed == "auto":
        return "cuda" if has_nvidia_gpu() else "cpu"
    if typed == "cuda" and not has_nvidia_gpu():
        raise ConfigError("--device cuda: this machine shows no NVIDIA GPU", hint="--device cpu")
    return typed


def parse_bytes(flag: str, typed: str | None) -> int | None:
    """`2G`, `512MiB` or a plain number as bytes (units of 1024).

    Raises:
        ConfigError: not a size.
    """
    if typed is None:
        return None
    match = _BYTES.match(typed.strip())
    size = int(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
    if size < 1:
        raise ConfigError(f"{flag} {typed!r} is no size above 0", hint=f"{flag} 2G")
    return size


def parse_partition(typed: str | None) -> tuple[int, ...] | None:
    """`8,8,7,7` as numbers.

    Raises:
        ConfigError: not a list of whole numbers.
    """
    if typed is None:
        return None
    parts = [part.strip() for part in typed.split(",")]
    if not all(part.isdigit() for part in parts):
        raise ConfigError(
            f"--pp-layer-partition {typed!r} is no list of numbers",
            hint="--pp-layer-partition 8,8,7,7",
        )
    return tuple(int(part) for part in parts)


def _resolve_length(settings: ModelSettings, spec: ModelSpec) -> int:
    limit = spec.max_position_embeddings
    length = settings.max_model_len or limit
    if length > limit:
        raise ConfigError(
            f"--max-model-len {length} is above the model's {limit} positions",
            hint=f"--max-model-len {limit}",
        )
    scheduler = settings.scheduler
    if not scheduler.enable_chunked_prefill and length > scheduler.max_num_batched_tokens:
        raise ConfigError(
            f"without chunked prefill a prompt of up to {length} tokens must fit "
            f"--max-num-batched-tokens {scheduler.max_num_batched_tokens}",
            hint=f"--max-num-batched-tokens {length}, or --max-model-len "
            f"{scheduler.max_num_batched_tokens}, or --enable-chunked-prefill",
        )
    return length


def _check_kv_cache_memory(cache: CacheConfig, plan: TopologyPlan, max_model_len: int) -> None:
    """A given size holds at least one request of the longest kind, on every rank."""
    if cache.kv_cache_memory_bytes is None or plan.memory is None:
        return
    num_blocks = -(-max_model_len // cache.block_size)
    per_token = max(rank.kv_bytes_per_token for rank in plan.memory.ranks)
    needed = num_blocks * cache.block_size * per_token
    if needed > cache.kv_cache_memory_bytes:
        fitting = cache.kv_cache_memory_bytes // (per_token * cache.block_size) * cache.block_size
        raise ConfigError(
            f"--kv-cache-memory {cache.kv_cache_memory_bytes} bytes is too small for one request "
            f"of --max-model-len {max_model_len} tokens, which needs {needed} on each rank",
            hint=f"--kv-cache-memory {needed}"
            + (f", or --max-model-len {fitting}" if fitting else ""),
        )


def _at_least_one(flag: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{flag} {value} must be at least 1", hint=f"{flag} 1")
