"""Whether `--kv-cache-memory` is a size that model and machine can make use of."""

from vcli.runtime.config import CacheConfig, EngineConfig
from vcli.topology import ConfigError, HostFacts, TopologyPlan


def check_cache_size(cache: CacheConfig, plan: TopologyPlan, max_model_len: int) -> None:
    """A given size holds at least one request of the longest kind, on every rank.

    Raises:
        ConfigError: it does not; the message has both sizes.
    """
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


def check_machine_holds_cache(
    cache: CacheConfig, plan: TopologyPlan, host: HostFacts, *, node_rank: int
) -> None:
    """A given size is not above what this machine has; what is free now, the start will see.

    Raises:
        ConfigError: it is; the message has both sizes.
    """
    asked = cache.kv_cache_memory_bytes
    if asked is None or host.is_assumed:
        return
    num_ranks = 1
    if plan.device_type == "cuda":
        sizes = [gpu.memory_total_bytes for gpu in host.gpus if gpu.memory_total_bytes]
        total, whose = max(sizes, default=None), "the largest GPU here"
    else:
        limits = (host.memory_total_bytes, host.memory_limit_bytes)
        total = min((size for size in limits if size), default=None)
        num_ranks = max(len(plan.local_ranks(node_rank)), 1)
        whose = "this machine"
    if total is None or asked * num_ranks <= total:
        return
    ranks = f" on each of {num_ranks} ranks" if num_ranks > 1 else ""
    raise ConfigError(
        f"--kv-cache-memory {asked} bytes{ranks} is more than {whose} has: {total}",
        hint=f"--kv-cache-memory {total // num_ranks // 4}, or leave it out",
    )


def cache_notes(config: EngineConfig) -> tuple[str, ...]:
    """What of `--kv-cache-memory` will not be used, as lines for people."""
    asked, memory = config.cache.kv_cache_memory_bytes, config.plan.memory
    if asked is None or memory is None:
        return ()
    block_size, num_seqs = config.cache.block_size, config.scheduler.max_num_seqs
    tokens = -(-config.model.max_model_len // block_size) * block_size * num_seqs
    usable = tokens * max(rank.kv_bytes_per_token for rank in memory.ranks)
    if usable >= asked:
        return ()
    return (
        f"! --kv-cache-memory {asked} bytes is more than can ever be used: {num_seqs} requests of "
        f"{config.model.max_model_len} tokens take {usable}, and no more is allocated",
    )
