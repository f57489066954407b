"""Which code a name stands for: the worker class, and the methods that RPC may call on it.

Torch-free by itself; the worker class that is loaded here may not be.
"""

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast

from vcli.runtime.config import EngineConfig
from vcli.runtime.messages import ModelRunnerOutput, SchedulerOutput
from vcli.topology.errors import ConfigError

DEFAULT_WORKER_CLS = "vcli.runtime.worker.worker:Worker"

ReportState = Callable[[str, float | None, str], None]


class RankWorker(Protocol):
    """What the loop itself needs of a worker; the rest is called by name."""

    def init_device(self) -> None:
        """Take the device and join the groups."""

    def load_model(self) -> None:
        """Build the model and read its weights."""

    def execute_model(self, output: SchedulerOutput) -> ModelRunnerOutput | None:
        """Run one step."""

    def shutdown(self) -> None:
        """Give back what was taken."""


def make_worker(
    worker_cls: str,
    config: EngineConfig,
    rank: int,
    *,
    rendezvous_path: str | None,
    report: ReportState,
) -> RankWorker:
    """An instance of the class `module:Class`; a rank of a larger world gets its rendezvous.

    A class with `joins_world = False` has no torch world and gets none, so torch stays out.

    Raises:
        ConfigError: there is no such class.
    """
    module_name, _, class_name = worker_cls.partition(":")
    try:
        factory = vars(importlib.import_module(module_name))[class_name]
    except (ImportError, KeyError) as error:
        raise ConfigError(f"worker class {worker_cls!r} can't be loaded: {error}") from error
    rendezvous = None
    if rendezvous_path is not None and getattr(factory, "joins_world", True):
        from vcli.runtime.distributed.rendezvous import RendezvousTarget

        rendezvous = RendezvousTarget(path=rendezvous_path)
    return cast(RankWorker, factory(config, rank, rendezvous=rendezvous, report=report))


def rpc_methods(worker: RankWorker) -> Mapping[str, Callable[..., Any]]:
    """The public methods of the worker's class and its extension, bound, by name."""
    names = (
        name
        for name, member in inspect.getmembers(type(worker), callable)
        if not name.startswith("_")
    )
    return {name: getattr(worker, name) for name in names}


def check_rpc_method(name: str, known: Mapping[str, object] | frozenset[str]) -> None:
    """Refuse a method that is not in `known`.

    Raises:
        ConfigError: names those that are.
    """
    if name in known:
        return
    what = "is private" if name.startswith("_") else "is unknown"
    raise ConfigError(
        f"the worker method {name!r} {what}", hint=f"methods: {', '.join(sorted(known))}"
    )
