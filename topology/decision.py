"""One choice together with why it was made: what is printed is what is obeyed."""

from dataclasses import dataclass
from typing import Generic, TypeVar

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision(Generic[T_co]):
    """The `value` that was chosen under `name`, with its reasons in the order of their weight."""

    name: str
    value: T_co
    reasons: tuple[str, ...]

    def describe(self) -> str:
        """One line for people: `start_method: spawn (first reason; second reason)`."""
        value = self.value
        shown = ", then ".join(value) if isinstance(value, tuple) else str(value)
        return f"{self.name}: {shown} ({'; '.join(self.reasons)})"
