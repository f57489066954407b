"""Adds the public methods of a user's class to the worker's, so that RPC can call them."""

import importlib
import inspect
from typing import TypeVar

from vcli.topology.errors import ConfigError

T = TypeVar("T")

_HINT = "--worker-extension-cls package.module:Class"


def extended_class(base: type[T], name: str) -> type[T]:
    """`base` with what the class `name` (`module:Class` or `module.Class`) defines besides.

    The extension's methods run with the worker as `self`.

    Raises:
        ConfigError: `name` cannot be loaded, it defines something that the worker has, or it is
            no class that can be added to another.
    """
    extension = _load_extension(name)
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
    try:
        extended = type(base.__name__, (base, extension), {"__module__": base.__module__})
    except TypeError as error:  # its layout or its metaclass
        raise _not_addable(name, str(error)) from error
    new: object = extension.__new__
    if new is not object.__new__:
        # A built-in type, or a class with another idea of how its instances are made.
        raise _not_addable(name, "it makes its instances in a way of its own (__new__)")
    if inspect.isabstract(extended):
        missing = ", ".join(sorted(getattr(extended, "__abstractmethods__", ())))
        raise _not_addable(name, f"{missing} is abstract")
    return extended


def _load_extension(name: str) -> type:
    """The class `name` as it is, without the worker.

    Raises:
        ConfigError: it cannot be loaded.
    """
    module_name, colon, class_name = name.partition(":")
    if not colon:
        module_name, _, class_name = name.rpartition(".")
    if not (class_name.isidentifier() and all(map(str.isidentifier, module_name.split(".")))):
        raise ConfigError(f"worker extension {name!r} names no class", hint=_HINT)
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # border: what a user's module raises is the user's
        what = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"worker extension {name}: {module_name} cannot be imported: {what}", hint=_HINT
        ) from error
    extension = vars(module).get(class_name)
    if not isinstance(extension, type):
        found = "" if extension is None else f", it is a {type(extension).__name__}"
        raise ConfigError(
            f"worker extension {name}: {module_name} has no class {class_name}{found}", hint=_HINT
        )
    return extension


def _not_addable(name: str, reason: str) -> ConfigError:
    return ConfigError(
        f"worker extension {name} can't be added to the worker: {reason}",
        hint="give a plain class whose methods are to be added",
    )
