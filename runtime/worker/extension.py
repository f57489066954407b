"""Adds the public methods of a user's class to the worker's, so that RPC can call them."""

import importlib
from typing import TypeVar

from vcli.topology.errors import ConfigError

T = TypeVar("T")

_HINT = "--worker-extension-cls package.module:Class"


def extended_class(base: type[T], name: str) -> type[T]:
    """`base` with what the class `name` (`module:Class` or `module.Class`) defines besides.

    The extension's methods run with the worker as `self`.

    Raises:
        ConfigError: `name` cannot be loaded, or it defines something that the worker has.
    """
    extension = _load(name)
    clashes = sorted(
        attribute
        for attribute in dir(extension)
        if not attribute.startswith("__") and hasattr(base, attribute)
    )
    if clashes:
        raise ConfigError(
            f"worker extension {name} defines {', '.join(clashes)}, which {base.__name__} has",
            hint="rename them in the extension; it can add methods, not replace them",
        )
    return type(base.__name__, (base, extension), {"__module__": base.__module__})


def _load(name: str) -> type:
    module_name, colon, class_name = name.partition(":")
    if not colon:
        module_name, _, class_name = name.rpartition(".")
    if not (module_name and class_name):
        raise ConfigError(f"worker extension {name!r} names no class", hint=_HINT)
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"worker extension {name}: {module_name} cannot be imported: {error}", hint=_HINT
        ) from error
    extension = vars(module).get(class_name)
    if not isinstance(extension, type):
        raise ConfigError(
            f"worker extension {name}: {module_name} has no class {class_name}", hint=_HINT
        )
    return extension
