"""Which code a name stands for: the worker class, and the methods that RPC may call on it.

Torch-free by itself; the worker class that is loaded here may not be.
"""

import importlib
import inspect
import socket
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast, runtime_checkable

import msgspec

from vcli.runtime.config import EngineConfig
from vcli.runtime.messages import SchedulerOutput
from vcli.runtime.process.entry import unset_hint
from vcli.runtime.process.failures import one_line
from vcli.runtime.worker.progress import ProgressLine
from vcli.topology.errors import ConfigError, ExitStatus, VcliError

DEFAULT_WORKER_CLS = "vcli.runtime.worker.worker:Worker"

#: For the worker's own process; a call from outside makes no sense.
_LOOP_METHODS = frozenset({"bind_thread", "trace_collectives"})

ReportState = Callable[[str, float | None, str], None]


class RankWorker(Protocol):
    """What the loop itself needs of a worker; the rest is called by name."""

    def init_device(self) -> None:
        """Take the device and join the groups."""

    def load_model(self) -> None:
        """Build the model and read its weights."""

    def execute_model(self, output: SchedulerOutput) -> Any:
        """Run one step: a `ModelRunnerOutput`, a `PendingResult` that gives one, or None."""

    def shutdown(self) -> None:
        """Give back what was taken."""


@runtime_checkable
class DeviceWorker(Protocol):
    """A worker with a device: other threads of its process have to choose it too."""

    def bind_thread(self) -> None:
        """Use the worker's device in this thread."""


@runtime_checkable
class CollectiveWorker(Protocol):
    """A worker whose ranks meet in collectives."""

    def trace_collectives(self, line: ProgressLine) -> None:
        """Note each collective in `line`; called once, before `init_device`."""


class WorkerLoadError(VcliError):
    """The worker's class is there, and what it imports can't be loaded."""

    exit_status = ExitStatus.START_FAILED


class StoreAddress(msgspec.Struct, frozen=True, kw_only=True):
    """The store of a world over several nodes; rank 0 inherits the socket that listens for it."""

    host: str
    port: int
    listen_fd: int | None = None


def make_worker(
    worker_cls: str,
    config: EngineConfig,
    rank: int,
    *,
    rendezvous_path: str | None,
    report: ReportState,
    store: StoreAddress | None = None,
) -> RankWorker:
    """An instance of the class `module:Class`; a rank of a larger world gets its rendezvous.

    A class with `joins_world = False` has no torch world and gets none, so torch stays out.

    Raises:
        ConfigError: there is no such class.
        WorkerLoadError: there is, but a library that it needs is missing or can't be loaded.
    """
    factory = _load_class(worker_cls)
    rendezvous = None
    if getattr(factory, "joins_world", True):
        rendezvous = _rendezvous(config, rendezvous_path, store)
    return cast(RankWorker, factory(config, rank, rendezvous=rendezvous, report=report))


def _load_class(worker_cls: str) -> type[Any]:
    """The class `module:Class`.

    Raises:
        ConfigError: there is no such class.
        WorkerLoadError: there is, but a library that it needs is missing or can't be loaded.
    """
    module_name, _, class_name = worker_cls.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            raise ConfigError(f"there is no worker class {worker_cls!r}: {error}") from None
        raise _load_error(worker_cls, error, hint=f"install {error.name}") from error
    except (ImportError, OSError, MemoryError) as error:
        # What the loader says of an address space that is too small comes as an ImportError;
        # its message says it all, a second traceback nothing more.
        hint = "give it memory: `ulimit -v unlimited`; if that is not it, reinstall torch"
        raise _load_error(worker_cls, error, hint=hint) from None
    except Exception as error:  # border: torch fails in many ways at its import
        raise _load_error(worker_cls, error, hint="python -c 'import torch' shows where") from error
    try:
        return cast("type[Any]", vars(module)[class_name])
    except KeyError:
        raise ConfigError(
            f"there is no worker class {worker_cls!r}: {module_name} has no {class_name!r}"
        ) from None


def _load_error(worker_cls: str, error: Exception, *, hint: str) -> WorkerLoadError:
    return WorkerLoadError(
        f"worker class {worker_cls!r} can't be loaded: {one_line(error)}",
        hint=unset_hint(error) or hint,
    )


def _rendezvous(
    config: EngineConfig, path: str | None, store: StoreAddress | None
) -> object | None:
    launched = config.launched
    if path is None and store is None and (launched is None or launched.world_size == 1):
        return None
    from vcli.runtime.distributed.rendezvous import RendezvousTarget

    if store is not None:
        return RendezvousTarget(host=store.host, port=store.port, listen_fd=store.listen_fd)
    if path is not None or launched is None:
        return RendezvousTarget(path=path or "")
    listen_fd = None
    if launched.rank == 0 and not launched.is_store_hosted:
        # Left to itself, torch listens on all interfaces.
        address = (launched.master_addr, launched.master_port)
        family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
        listen_fd = socket.create_server(address, family=family).detach()
    return RendezvousTarget(
        host=launched.master_addr,
        port=launched.master_port,
        listen_fd=listen_fd,
        is_hosted=launched.is_store_hosted,
        prefix=launched.store_prefix,
    )


def rpc_methods(worker: RankWorker) -> Mapping[str, Callable[..., Any]]:
    """The public methods of the worker's class and its extension, bound, by name."""
    names = (
        name
        for name, member in inspect.getmembers(type(worker), callable)
        if not name.startswith("_") and name not in _LOOP_METHODS
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
