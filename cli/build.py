"""From typed flags to the frozen configuration that the runtime obeys."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from vcli.cli.cache_fit import asked_cache, check_cache_size, check_machine_holds_cache
from vcli.cli.device_ids import check_device_ids
from vcli.cli.durations import check_deadlines
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
    plan_topology,
)
from vcli.topology.attention import AUTO, check_attention_backend
from vcli.topology.rank_memory import plan_rank_memory
from vcli.topology.sizes import EXTERNAL_LAUNCHER

_UNITS: Final[Mapping[str, int]] = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_BYTES: Final = re.compile(r"^([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(?:i?B)?$", re.IGNORECASE)
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
#: Lowest and highest of a flag; the highest are far above what any machine runs.
_RANGES: Final[Mapping[str, tuple[int, int]]] = {
    "--batch": (1, 2**20),
    "--block-size": (1, 1024),
    "--context": (1, 2**31 - 1),
    "--max-model-len": (1, 2**31 - 1),
    "--max-num-batched-tokens": (1, 2**24),
    "--max-num-seqs": (1, 2**16),
    "--port": (0, 65535),
    "--seed": (0, 2**63 - 1),
}
#: Longest number that is read as a size: larger ones have no machine.
_MAX_DIGITS: Final = 18
_MAX_STAGES_DIGITS: Final = 9
#: A prompt token and one of the answer.
_MIN_MODEL_LEN: Final = 2
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
    attention_backend: str
    enforce_eager: bool
    worker_extension_cls: str | None
    log_level: str
    cache: CacheConfig
    scheduler: SchedulerConfig
    deadlines: DeadlineConfig
    device_ids: str | None = None
    kv_cache_memory: str | None = None
    """As it was typed; `cache` has the bytes."""

    def __post_init__(self) -> None:
        if self.load_format not in ("safetensors", "dummy"):
            raise ConfigError(
                f"load_format={self.load_format!r} is unknown", hint="safetensors or dummy"
            )
        if self.device not in ("auto", "cpu", "cuda"):
            raise ConfigError(f"device={self.device!r} is unknown", hint="auto, cpu or cuda")
        check_device_ids(self.device_ids, self.device)
        if self.attention_backend != AUTO:
            check_attention_backend(self.attention_backend)
        if self.log_level not in _LOG_LEVELS:
            raise ConfigError(
                f"log_level={self.log_level!r} is unknown", hint=", ".join(_LOG_LEVELS)
            )
        check_range("--max-num-seqs", self.scheduler.max_num_seqs)
        check_range("--max-num-batched-tokens", self.scheduler.max_num_batched_tokens)
        check_range("--block-size", self.cache.block_size)
        if self.max_model_len is not None:
            check_range("--max-model-len", self.max_model_len)
            _check_length(f"--max-model-len {self.max_model_len}", self.max_model_len)
        check_range("--seed", self.seed)
        check_deadlines(self.deadlines)
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
    visible_devices: str | None = None,
) -> EngineConfig:
    """Judge the settings against the model and the host, and plan.

    Raises:
        ConfigError: sizes that do not fit the model, an unknown type, or too long a context.
    """
    from vcli.runtime.executor.backends import refuse_unserved_backend

    dtype = resolve_dtype(settings.dtype, spec)
    device_type = resolve_device(settings.device)
    plan = plan_topology(
        parallel,
        host=host,
        process=process,
        model=spec,
        dtype=dtype,
        device_type=device_type,
        flashinfer_available=find_spec("flashinfer") is not None,
        attention_backend=settings.attention_backend,
    )
    refuse_unserved_backend(plan.backend.value)  # Ray's, where its placement group chose it
    max_model_len = _resolve_length(settings, spec)
    _check_name(settings.served_name if settings.served_name is not None else name)
    asked = asked_cache(settings.cache, settings.kv_cache_memory)
    check_cache_size(asked, plan, max_model_len, block_size=settings.cache.block_size)
    check_machine_holds_cache(asked, plan, host, node_rank=parallel.node_rank)
    config = EngineConfig(
        model=ModelConfig(
            path=path,
            served_name=settings.served_name or name,
            spec=plan.model or spec,
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
        deadlines=settings.deadlines,
        worker_extension_cls=settings.worker_extension_cls,
        enforce_eager=settings.enforce_eager,
        visible_devices=visible_devices,
        log_level=settings.log_level,
    )
    return replace(config, memory_plan=plan_rank_memory(plan, config.memory_limits, host))


def refuse_unserved_sizes(parallel: ParallelConfig) -> None:
    """Say which sizes `topo` can plan but `serve` cannot run.

    Raises:
        ConfigError: one of them is asked for.
    """
    if parallel.distributed_executor_backend == EXTERNAL_LAUNCHER:
        whose = f" on each of the {parallel.nnodes} nodes" if parallel.nnodes > 1 else ""
        raise ConfigError(
            "--distributed-executor-backend external_launcher: its ranks are processes that "
            f"torchrun or mpirun started{whose}; serve and launch start the ranks themselves",
            hint="--distributed-executor-backend mp; or use the engine as a library under torchrun",
        )
    if parallel.unserved_flags:
        raise ConfigError(
            f"{', '.join(parallel.unserved_flags)}: topo plans this; serve does not run it yet",
            hint="see the plan with vcli topo and the same flags; serve runs -tp and -pp",
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
    if match and len(match[1]) > _MAX_DIGITS:
        raise ConfigError(
            f"{flag} {typed[:_MAX_DIGITS]}... is larger than any machine", hint=f"{flag} 2G"
        )
    size = int(Decimal(match[1]) * _UNITS[match[2].upper()]) if match else 0
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
    if not all(_is_count(part) for part in parts):
        raise ConfigError(
            f"--pp-layer-partition {typed!r} is no list of numbers",
            hint="--pp-layer-partition 8,8,7,7",
        )
    return tuple(int(part) for part in parts)


def check_range(flag: str, value: int) -> None:
    """Whether a flag's number lies where such numbers can lie.

    Raises:
        ConfigError: it does not; the hint has the nearest that does.
    """
    lowest, highest = _RANGES[flag]
    if value < lowest:
        raise ConfigError(f"{flag} {value} must be at least {lowest}", hint=f"{flag} {lowest}")
    if value > highest:
        raise ConfigError(f"{flag} {value} must be at most {highest}", hint=f"{flag} {highest}")


def _is_count(part: str) -> bool:
    return part.isascii() and part.isdigit() and len(part) <= _MAX_STAGES_DIGITS


def _check_name(name: str) -> None:
    if not name or not name.isprintable():
        raise ConfigError(
            f"the model's name {name!r} cannot stand in the API: it is empty, or not text",
            hint="--served-model-name NAME",
        )


def _check_length(what: str, length: int) -> None:
    if length < _MIN_MODEL_LEN:
        raise ConfigError(
            f"{what} can answer nothing: a prompt and its answer are at least {_MIN_MODEL_LEN} "
            "tokens",
            hint="--max-model-len 2048, or leave it out for the model's; topo plans any length",
        )


def _resolve_length(settings: ModelSettings, spec: ModelSpec) -> int:
    limit = spec.max_position_embeddings
    length = settings.max_model_len or limit
    _check_length(f"the model's {limit} positions", limit)
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
