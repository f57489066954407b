"""What was typed, as configuration; not yet judged against a model."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Final

from vcli.cli.build import ModelSettings, parse_bytes, parse_partition
from vcli.runtime.config import CacheConfig, DeadlineConfig, SchedulerConfig
from vcli.topology import ParallelConfig

#: Flags that have the name and the meaning of a field.
_MODEL: Final = (
    "dtype",
    "max_model_len",
    "load_format",
    "seed",
    "device",
    "device_ids",
    "attention_backend",
    "enforce_eager",
    "worker_extension_cls",
    "kv_cache_memory",
)
_CACHE: Final = ("block_size", "enable_prefix_caching", "gpu_memory_utilization")
_SCHEDULER: Final = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "enable_chunked_prefill",
    "async_scheduling",
)


def parallel_config(values: Mapping[str, Any]) -> ParallelConfig:
    """The sizes and coordinates; `values` has the command's parameters by name.

    A flag that a command lacks keeps the default.

    Raises:
        ConfigError: a rule is broken.
    """
    typed = {
        field.name: values[field.name] for field in fields(ParallelConfig) if field.name in values
    }
    typed["pp_layer_partition"] = parse_partition(values["pp_layer_partition"])
    typed["is_moe"] = bool(values.get("moe")) or values["enable_expert_parallel"]
    return ParallelConfig(**typed)


def model_settings(values: Mapping[str, Any]) -> ModelSettings:
    """The model's settings; `values` has the command's parameters by name.

    Raises:
        ConfigError: a value out of its range.
    """
    return ModelSettings(
        **_named(values, _MODEL),
        served_name=values["served_model_name"],
        deadlines=DeadlineConfig(
            start_s=values["start_timeout"],
            execute_model_s=values["execute_model_timeout"],
            stall_s=values["stall_timeout"],
            drain_s=values["shutdown_timeout"],
        ),
        log_level=values["log_level"].upper(),
        cache=CacheConfig(
            **_named(values, _CACHE),
            kv_cache_memory_bytes=parse_bytes("--kv-cache-memory", values["kv_cache_memory"]),
        ),
        scheduler=SchedulerConfig(**_named(values, _SCHEDULER)),
    )


def _named(values: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: values[name] for name in names}
