"""Which class runs a back end: one of ours by its name, or any other `Executor`."""

import importlib
import inspect

from vcli.runtime.executor.base import Executor
from vcli.topology.backend import BACKEND_CLASSES, BACKENDS, EXECUTOR
from vcli.topology.errors import ConfigError

_HINT = "--distributed-executor-backend mp"


def get_executor_class(backend: str) -> type[Executor]:
    """The class that runs a back end: `uni`, `mp`, or the dotted path of a class.

    Raises:
        ConfigError: a back end that is planned but can't be run yet, a path that can't be imported,
            or what is no complete subclass of `Executor`.
    """
    refuse_unserved_backend(backend)
    found = _imported(backend)
    if not (isinstance(found, type) and issubclass(found, Executor)):
        raise ConfigError(f"executor {backend!r} is no subclass of {EXECUTOR}", hint=_HINT)
    if inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise ConfigError(f"executor {backend!r} does not implement {missing}", hint=_HINT)
    return found


def refuse_unserved_backend(backend: str) -> None:
    """Say which back ends `topo` can plan but nothing here runs.

    Raises:
        ConfigError: it is one of them.
    """
    if backend in BACKENDS and backend not in BACKEND_CLASSES:
        raise ConfigError(
            f"--distributed-executor-backend {backend}: topo plans this; serve does not run it yet",
            hint=_HINT,
        )


def _imported(backend: str) -> object:
    module_name, _, class_name = BACKEND_CLASSES.get(backend, backend).rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # border: what a user's module raises is the user's
        what = f"{type(error).__name__}: {error}"
        raise ConfigError(f"executor {backend!r} can't be imported: {what}", hint=_HINT) from error
    try:
        return vars(module)[class_name]
    except KeyError:
        raise ConfigError(
            f"executor {backend!r}: {module_name} has no {class_name}", hint=_HINT
        ) from None
