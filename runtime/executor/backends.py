"""Which class runs a back end: one of ours by its name, or any other `Executor`."""

import importlib
import inspect

from vcli.runtime.executor.base import Executor
from vcli.topology.backend import EXECUTOR
from vcli.topology.errors import ConfigError

#: By path: only the one that runs is imported.
_BACKENDS = {
    "uni": "vcli.runtime.executor.uniproc.UniProcExecutor",
    "mp": "vcli.runtime.executor.multiproc.MultiprocExecutor",
    "multinode": "vcli.runtime.executor.multinode.MultiNodeExecutor",
    "colocated": "vcli.runtime.executor.colocated.ColocatedExecutor",
    "external_launcher": "vcli.runtime.executor.external_launcher.ExternalLauncherExecutor",
}
_HINT = "--distributed-executor-backend mp"


def get_executor_class(backend: str | type) -> type[Executor]:
    """The class that runs a back end: `uni`, `mp`, the dotted path of a class, or the class itself.

    Raises:
        ConfigError: a back end that is planned but can't be run yet, a path that can't be imported,
            or what is no complete subclass of `Executor`.
    """
    found = _imported(backend) if isinstance(backend, str) else backend
    if not (isinstance(found, type) and issubclass(found, Executor)):
        raise ConfigError(f"executor {backend!r} is no subclass of {EXECUTOR}", hint=_HINT)
    if inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise ConfigError(f"executor {backend!r} does not implement {missing}", hint=_HINT)
    return found


def _imported(backend: str) -> object:
    module_name, _, class_name = _BACKENDS.get(backend, backend).rpartition(".")
    if not module_name:
        raise ConfigError(
            f"topo plans the back end {backend!r}; serve does not run it yet", hint=_HINT
        )
    # border: what importing a user's module raises is the user's.
    try:
        return vars(importlib.import_module(module_name)).get(class_name)
    except Exception as error:
        raise ConfigError(f"executor {backend!r} can't be imported: {error}", hint=_HINT) from error
