"""Values of a JSON body: which are numbers, and how a wrong one is shown."""

from typing import Annotated, Any, Final

import msgspec
from pydantic import BeforeValidator

_LONGEST_SHOWN: Final = 60


def shown(value: object) -> str:
    """`value` as the client wrote it, cut where it is long."""
    try:
        text = msgspec.json.encode(value).decode()
    except (OverflowError, RecursionError, ValueError):  # an integer of more than 64 bits, mostly
        text = str(value) if isinstance(value, int) and abs(value) < 10**40 else "a huge value"
    return shortened(text)


def shortened(text: str) -> str:
    """`text`, cut where it is long."""
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def _no_boolean(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("must be a number")
    return value


Integer = Annotated[int, BeforeValidator(_no_boolean)]
Number = Annotated[float, BeforeValidator(_no_boolean)]
