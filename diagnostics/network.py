"""The network interfaces of this host, read from /proc and /sys, and the variables that name them.

Each variable has the grammar of whoever reads it.
"""

import re
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from vcli.diagnostics.pci import numa_node_at, pci_path_at
from vcli.topology import NicFacts

#: Interfaces that lead out of no machine.
_VIRTUAL: Final = re.compile(r"^(veth|docker|br-|virbr|cni|flannel|cali|tun|tap|dummy)")
#: Variable -> whether it has NCCL's grammar of prefixes; the others list exact names.
INTERFACE_VARIABLES: Final = {
    "NCCL_SOCKET_IFNAME": True,
    "GLOO_SOCKET_IFNAME": False,
    "TP_SOCKET_IFNAME": False,
}


def collect_nics(root: Path = Path("/")) -> tuple[NicFacts, ...]:
    """Observe the interfaces, virtual ones of containers left out."""
    folder = root / "sys/class/net"
    try:
        entries = sorted(folder.iterdir())
    except OSError:
        return ()
    addresses = _addresses(root)
    rdma = _rdma_devices(root)
    return tuple(
        _nic(entry, addresses.get(entry.name, ()), rdma.get(entry.name))
        for entry in entries
        if not _VIRTUAL.match(entry.name)
    )


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


def _nic(entry: Path, addresses: tuple[str, ...], rdma_device: str | None) -> NicFacts:
    speed, mtu = _read(entry / "speed").strip(), _read(entry / "mtu").strip()
    state = _read(entry / "operstate").strip()
    return NicFacts(
        name=entry.name,
        addresses=addresses,
        mtu=int(mtu) if mtu.isdigit() else None,
        # An interface without a fixed speed says -1, or refuses to be read.
        speed_mbit=int(speed) if speed.isdigit() and int(speed) else None,
        is_up=state in ("up", "unknown"),
        is_loopback=_read(entry / "type").strip() == "772",
        rdma_device=rdma_device,
        numa_node=numa_node_at(entry / "device"),
        pci_path=pci_path_at(entry / "device"),
    )


def _rdma_devices(root: Path) -> dict[str, str]:
    """Interface -> RDMA device on the same card."""
    found: dict[str, str] = {}
    try:
        for device in sorted((root / "sys/class/infiniband").iterdir()):
            for interface in sorted((device / "device/net").iterdir()):
                found[interface.name] = device.name
    except OSError:
        return found
    return found


def _addresses(root: Path) -> dict[str, tuple[str, ...]]:
    """Addresses by interface: IPv6 from /proc, IPv4 from the routing trie by its local routes."""
    found: dict[str, list[str]] = {}
    for line in _read(root / "proc/net/if_inet6").splitlines():
        words = line.split()
        if len(words) == 6:
            packed = bytes.fromhex(words[0])
            found.setdefault(words[5], []).append(socket.inet_ntop(socket.AF_INET6, packed))
    networks = _networks(root)
    for address in _local_addresses(root):
        number = struct.unpack("!I", socket.inet_aton(address))[0]
        for name, network, mask in networks:
            if number & mask == network:
                found.setdefault(name, []).insert(0, address)
                break
    return {name: tuple(values) for name, values in found.items()}


def _networks(root: Path) -> list[tuple[str, int, int]]:
    """(interface, network, mask) of the direct IPv4 routes, the narrowest first."""
    rows = []
    for line in _read(root / "proc/net/route").splitlines()[1:]:
        words = line.split()
        if len(words) >= 8 and words[1] != "00000000":
            network, mask = (
                struct.unpack("!I", struct.pack("<I", int(words[column], 16)))[0]
                for column in (1, 7)
            )
            rows.append((words[0], network, mask))
    rows.append(("lo", 0x7F000000, 0xFF000000))
    return sorted(rows, key=lambda row: -row[2])


def _local_addresses(root: Path) -> list[str]:
    """IPv4 addresses of this host, from the lines `/32 host LOCAL` of the trie."""
    found: list[str] = []
    address = ""
    for line in _read(root / "proc/net/fib_trie").splitlines():
        text = line.strip()
        if text.startswith("|--"):
            address = text.removeprefix("|--").strip()
        elif text == "/32 host LOCAL" and address not in found:
            found.append(address)
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
