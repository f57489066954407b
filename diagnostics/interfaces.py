"""Variables that name network interfaces, in the grammar of whoever reads them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

#: Variable -> whether it has NCCL's grammar of prefixes; the others list exact names.
INTERFACE_VARIABLES: Final = {
    "NCCL_SOCKET_IFNAME": True,
    "GLOO_SOCKET_IFNAME": False,
    "TP_SOCKET_IFNAME": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class InterfaceRule:
    """What one variable asks for."""

    names: tuple[str, ...]
    is_prefix: bool
    is_excluding: bool

    def matches(self, interfaces: Sequence[str]) -> tuple[str, ...]:
        """The interfaces that remain."""
        return tuple(name for name in interfaces if self._is_named(name) != self.is_excluding)

    def unmatched(self, interfaces: Sequence[str]) -> tuple[str, ...]:
        """The names of the variable that fit no interface."""
        return tuple(
            name
            for name in self.names
            if not any(self._fits(name, interface) for interface in interfaces)
        )

    def _is_named(self, interface: str) -> bool:
        return any(self._fits(name, interface) for name in self.names)

    def _fits(self, name: str, interface: str) -> bool:
        return interface.startswith(name) if self.is_prefix else interface == name


def parse_interface_rule(value: str, *, has_prefixes: bool) -> InterfaceRule:
    """`eth,ib` prefixes, `=eth0` exact, `^docker` all but these prefixes, `^=lo` all but lo."""
    rest, is_excluding, is_prefix = value.strip(), False, has_prefixes
    if has_prefixes and rest.startswith("^"):
        rest, is_excluding = rest[1:], True
    if has_prefixes and rest.startswith("="):
        rest, is_prefix = rest[1:], False
    names = tuple(name.split(":")[0].strip() for name in rest.split(",") if name.strip())
    return InterfaceRule(names=names, is_prefix=is_prefix, is_excluding=is_excluding)
