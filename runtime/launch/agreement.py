"""What must be equal on all nodes, as texts by name; and what differs, in words.

The flags come first, so that a difference is named as what was typed. The plan's fingerprint covers
whatever follows from them; it is told only when no flag explains it.
"""

import hashlib
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from vcli.runtime.config import EngineConfig
from vcli.runtime.launch.join_messages import PROTOCOL

_PLAN: Final = "plan"
_WEIGHTS: Final = "weights "
_SHOWN: Final = 8


def job_document(config: EngineConfig) -> dict[str, str]:
    """Everything about this node's start that the others must have too."""
    parallel, cache, scheduler = config.parallel, config.cache, config.scheduler
    values = {
        "--tensor-parallel-size (-tp)": parallel.tp,
        "--pipeline-parallel-size (-pp)": parallel.pp,
        "--data-parallel-size (-dp)": parallel.dp,
        "--prefill-context-parallel-size (-pcp)": parallel.pcp,
        "--decode-context-parallel-size (-dcp)": parallel.dcp,
        "--enable-expert-parallel (-ep)": parallel.enable_expert_parallel,
        "--nnodes (-n)": parallel.nnodes,
        "--master-port": parallel.master_port,
        "--pp-layer-partition": parallel.pp_layer_partition,
        "--distributed-executor-backend": config.plan.backend.value,
        "--device": config.device_type,
        "--dtype": config.model.dtype,
        "--max-model-len": config.model.max_model_len,
        "--load-format": config.model.load_format,
        "--seed": config.model.seed,
        "--block-size": cache.block_size,
        "--enable-prefix-caching": cache.enable_prefix_caching,
        "--max-num-seqs": scheduler.max_num_seqs,
        "--max-num-batched-tokens": scheduler.max_num_batched_tokens,
        "--enable-chunked-prefill": scheduler.enable_chunked_prefill,
        "--async-scheduling": scheduler.async_scheduling,
        "--enforce-eager": config.enforce_eager,
        "--worker-extension-cls": config.worker_extension_cls,
        "join protocol": PROTOCOL,
        "vcli version": _version("vcli-toolkit"),
        "torch version": _version("torch"),
        "Python version": ".".join(platform.python_version_tuple()[:2]),
    }
    return {
        **{name: str(value) for name, value in values.items()},
        **_model_identity(config),
        _PLAN: config.plan.fingerprint(),
    }


def differences(here: Mapping[str, str], there: Mapping[str, str], *, node_rank: int) -> list[str]:
    """What node `node_rank` has (`there`) that node 0 (`here`) has not, one line a field."""
    names = [name for name in {**here, **there} if here.get(name) != there.get(name)]
    if len(names) > 1 and _PLAN in names:
        names.remove(_PLAN)
    lines = [
        f"{name}: node 0 has {here.get(name, 'none')}, "
        f"node {node_rank} has {there.get(name, 'none')}"
        for name in names[:_SHOWN]
    ]
    if len(names) > _SHOWN:
        lines.append(f"and {len(names) - _SHOWN} more")
    return lines


def _model_identity(config: EngineConfig) -> dict[str, str]:
    """The model by what is in its folder; where the folder is may differ."""
    folder = config.model.path
    identity = {"config.json": _hash_of(folder / "config.json")}
    if config.model.load_format == "safetensors":
        for path in sorted(folder.glob("*.safetensors")):
            identity[f"{_WEIGHTS}{path.name}"] = f"{path.stat().st_size} bytes"
    return identity


def _hash_of(path: Path) -> str:
    try:
        return hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()
    except FileNotFoundError:
        return "none"


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "unknown"
