"""Single values of a config.json, checked: what somebody else's file holds may be anything."""

import math
from collections.abc import Mapping
from typing import Any, Final, TypeGuard

from vcli.topology.errors import ConfigError

DAMAGED_HINT: Final = "the checkpoint's config.json is damaged; download it again"

#: Largest value of a size: well above every model, and small enough to count with.
_LARGEST: Final[Mapping[str, int]] = {
    "num_hidden_layers": 10_000,
    "num_attention_heads": 65_536,
    "num_key_value_heads": 65_536,
    "head_dim": 65_536,
    "hidden_size": 1 << 20,
    "vocab_size": 1 << 24,
    "num_experts": 65_536,
    "num_local_experts": 65_536,
}
_LARGEST_OTHER: Final = (1 << 31) - 1


def size(config: Mapping[str, Any], name: str, source: str) -> int:
    """A whole number above 0, not beyond all models.

    Raises:
        ConfigError: missing, of another type, or out of range.
    """
    value = config.get(name)
    if not _is_whole(value) or value < 1:
        raise ConfigError(
            f"{source}: {name} must be a whole number above 0, got {shown(value)}",
            hint=DAMAGED_HINT,
        )
    largest = _LARGEST.get(name, _LARGEST_OTHER)
    if value > largest:
        raise ConfigError(
            f"{source}: {name}={shown(value)} is above {largest}, more than any model has",
            hint=DAMAGED_HINT,
        )
    return value


def flag(config: Mapping[str, Any], name: str, source: str) -> bool:
    """True or false; false where it is missing or null.

    Raises:
        ConfigError: anything else.
    """
    value = config.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise ConfigError(
            f"{source}: {name} must be true or false, got {shown(value)}", hint=DAMAGED_HINT
        )
    return value


def finite_number(config: Mapping[str, Any], name: str, source: str) -> float:
    """A number that is neither infinite nor NaN.

    Raises:
        ConfigError: missing, of another type, or out of range.
    """
    value = config.get(name)
    if isinstance(value, int | float):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number):
            return number
    raise ConfigError(f"{source}: {name} must be a number, got {shown(value)}", hint=DAMAGED_HINT)


def positive_number(config: Mapping[str, Any], name: str, source: str) -> float:
    """A finite number above 0.

    Raises:
        ConfigError: missing, of another type, or out of range.
    """
    value = config.get(name)
    number = 0.0 if isinstance(value, bool) else finite_number(config, name, source)
    if number <= 0:
        raise ConfigError(
            f"{source}: {name} must be a number above 0, got {shown(value)}", hint=DAMAGED_HINT
        )
    return number


def whole_numbers(config: Mapping[str, Any], name: str, source: str) -> tuple[int, ...]:
    """Whole numbers from 0: a list of them, one alone, or none where it is missing or null.

    Raises:
        ConfigError: anything else.
    """
    value = config.get(name)
    if value is None:
        return ()
    numbers = value if isinstance(value, list) else [value]
    if not all(_is_whole(number) and 0 <= number <= _LARGEST_OTHER for number in numbers):
        raise ConfigError(
            f"{source}: {name} must be a whole number from 0 or a list of them, got {shown(value)}",
            hint=DAMAGED_HINT,
        )
    return tuple(numbers)


def optional_mapping(config: Mapping[str, Any], name: str, source: str) -> Mapping[str, Any]:
    """A JSON object; an empty one where it is missing or null.

    Raises:
        ConfigError: anything else.
    """
    value = config.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"{source}: {name} must be a JSON object, got {shown(value)}", hint=DAMAGED_HINT
        )
    return value


def shown(value: object) -> str:
    """`value` as it stands in a message, which stays one line; a huge number has no digits."""
    try:
        text = repr(value)
    except ValueError:
        return "a number of thousands of digits"
    return text if len(text) <= _SHOWN_LETTERS else text[:_SHOWN_LETTERS] + "..."


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


_SHOWN_LETTERS: Final = 60
