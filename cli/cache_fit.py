"""Whether `--kv-cache-memory` is a size that model and machine can make use of."""

from dataclasses import dataclass

from vcli.cli.views.text import bytes_text
from vcli.runtime.config import CacheConfig, EngineConfig
from vcli.runtime.core.kv_config import size_argument
from vcli.topology import ConfigError, HostFacts, TopologyPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedCache:
    """A size that was asked for, and how it was typed."""

    num_bytes: int
    typed: str

    def __str__(self) -> str:
        return f"--kv-cache-memory {self.typed} ({bytes_text(self.num_bytes)})"


def asked_cache(cache: CacheConfig, typed: str | None) -> AskedCache | None:
    """The size that was asked for; None where the start measures it."""
    num_bytes = cache.kv_cache_memory_bytes
    if num_bytes is None:
        return None
    return AskedCache(num_bytes=num_bytes, typed=typed or str(num_bytes))


def check_cache_size(
    asked: AskedCache | None, plan: TopologyPlan, max_model_len: int, *, block_size: int
) -> None:
    """A given size holds at least one request of the longest kind, on every rank.

    Raises:
        ConfigError: it does not; the message has both sizes.
    """
    if asked is None or plan.memory is None:
        return
    num_blocks = -(-max_model_len // block_size)
    per_token = max(rank.kv_bytes_per_token for rank in plan.memory.ranks)
    needed = num_blocks * block_size * per_token
    if needed > asked.num_bytes:
        fitting = asked.num_bytes // (per_token * block_size) * block_size
        raise ConfigError(
            f"{asked} is too small for one request of --max-model-len {max_model_len} tokens, "
            f"which needs {bytes_text(needed)} on each rank",
            hint=f"--kv-cache-memory {size_argument(needed)}"
            + (f", or --max-model-len {fitting}" if fitting else ""),
        )


def check_machine_holds_cache(
    asked: AskedCache | None, plan: TopologyPlan, host: HostFacts, *, node_rank: int
) -> None:
    """A given size is not above what this machine has; what is free now, the start will see.

    Raises:
        ConfigError: it is; the message has both sizes.
    """
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
    if total is None or asked.num_bytes * num_ranks <= total:
        return
    ranks = f" on each of {num_ranks} ranks" if num_ranks > 1 else ""
    raise ConfigError(
        f"{asked}{ranks} is more than {whose} has: {bytes_text(total)}",
        hint=f"--kv-cache-memory {size_argument(total // num_ranks // 4)}, or leave it out",
    )


def cache_notes(config: EngineConfig, typed: str | None = None) -> tuple[str, ...]:
    """What of `--kv-cache-memory`, as it was `typed`, will not be used, as lines for people."""
    asked, memory = asked_cache(config.cache, typed), config.plan.memory
    if asked is None or memory is None:
        return ()
    block_size, num_seqs = config.cache.block_size, config.scheduler.max_num_seqs
    tokens = -(-config.model.max_model_len // block_size) * block_size * num_seqs
    usable = tokens * max(rank.kv_bytes_per_token for rank in memory.ranks)
    if usable >= asked.num_bytes:
        return ()
    return (
        f"! {asked} is more than can ever be used: {num_seqs} requests of "
        f"{config.model.max_model_len} tokens take {bytes_text(usable)}, and no more is allocated",
    )
