"""Which executor runs the workers of a replica."""

from types import MappingProxyType
from typing import Final

from vcli.topology.decision import Decision
from vcli.topology.errors import ConfigError
from vcli.topology.facts import ProcessFacts
from vcli.topology.sizes import EXTERNAL_LAUNCHER, ParallelSizes

#: What every executor derives from; topology imports nothing of the runtime, so by name.
EXECUTOR: Final = "vcli.runtime.executor.base.Executor"
#: Ours that can be run, by the class that does; the runtime imports the one that is wanted.
BACKEND_CLASSES: Final = MappingProxyType(
    {
        "uni": "vcli.runtime.executor.uniproc.UniProcExecutor",
        "mp": "vcli.runtime.executor.multiproc.MultiprocExecutor",
        "multinode": "vcli.runtime.executor.multinode.MultiNodeExecutor",
        "colocated": "vcli.runtime.executor.colocated.ColocatedExecutor",
        EXTERNAL_LAUNCHER: "vcli.runtime.executor.external_launcher.ExternalLauncherExecutor",
    }
)
BACKENDS: Final = ("uni", "mp", "colocated", "ray", EXTERNAL_LAUNCHER)
#: Back ends that work over several nodes by themselves.
_MULTI_NODE: Final = ("mp", "uni", EXTERNAL_LAUNCHER)


def choose_backend(config: ParallelSizes, process: ProcessFacts | None = None) -> Decision[str]:
    """`uni`, `mp`, `colocated`, `ray`, `external_launcher` or the dotted path of a class.

    Raises:
        ConfigError: an unknown name, or a back end that cannot do these sizes.
    """
    requested = config.distributed_executor_backend
    if requested is None or requested == "auto":
        value, reason = _default_backend(config, process or ProcessFacts())
    else:
        value, reason = backend_name(requested), "asked for"
        _check_known(value)
    _check_sizes(value, config)
    return Decision(name="backend", value=value, reasons=(reason,))


def backend_name(requested: object) -> str:
    """A back end as a name: an `Executor` class is its dotted path, as processes need it.

    One of ours, as a class or a path, has its own name, by which it is judged and planned.

    Raises:
        ConfigError: neither a name nor such a class, or a class that other processes can't import.
    """
    if isinstance(requested, str):
        return next(
            (name for name, path in BACKEND_CLASSES.items() if path == requested), requested
        )
    bases = requested.__mro__ if isinstance(requested, type) else ()
    if not any(f"{base.__module__}.{base.__qualname__}" == EXECUTOR for base in bases):
        raise ConfigError(
            f"distributed_executor_backend={requested!r} is no subclass of {EXECUTOR}",
            hint=f"give one of {', '.join(BACKENDS)}, or an Executor class or its dotted path",
        )
    assert isinstance(requested, type)
    if requested.__module__ == "__main__" or "." in requested.__qualname__:
        raise ConfigError(
            f"distributed_executor_backend={requested!r} can't be imported by other processes",
            hint="define the class at the top of a module of its own, not of the main program",
        )
    return backend_name(f"{requested.__module__}.{requested.__qualname__}")


def _default_backend(config: ParallelSizes, process: ProcessFacts) -> tuple[str, str]:
    if config.world_size_across_dp == 1 and config.external_data_parallel_size == 1:
        return "uni", "one rank runs inside its engine core"
    if config.external_data_parallel_size > 1:
        return "mp", f"{config.torch_world} ranks, a process for each"
    if config.nnodes > 1:
        return "mp", f"{config.world_size} ranks a replica over {config.nnodes} nodes"
    if config.data_parallel_backend == "ray":
        return "ray", "data_parallel_backend is ray"
    if process.in_ray_placement_group:
        return "ray", "this process runs inside a Ray placement group"
    return "mp", f"{config.world_size_across_dp} ranks on one node, a process for each"


def _check_known(value: str) -> None:
    if value in BACKENDS:
        return
    parts = value.split(".")
    if len(parts) > 1 and all(part.isidentifier() for part in parts):
        return
    raise ConfigError(
        f"distributed_executor_backend={value!r} is unknown",
        hint=f"--distributed-executor-backend: {', '.join(BACKENDS)}, or the dotted path of an "
        "Executor class",
    )


def _check_sizes(value: str, config: ParallelSizes) -> None:
    if value == "uni" and config.world_size > 1:
        raise ConfigError(
            f"distributed_executor_backend=uni runs one rank, the replica has {config.world_size}",
            hint="--distributed-executor-backend mp",
        )
    if config.nnodes > 1 and value not in _MULTI_NODE:
        raise ConfigError(
            f"nnodes={config.nnodes} needs one of {', '.join(_MULTI_NODE)}, got {value}",
            hint="--distributed-executor-backend mp",
        )
