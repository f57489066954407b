"""The network interfaces and NUMA nodes of this host; read from /proc and /sys."""

import re
import socket
import struct
from pathlib import Path

from vcli.diagnostics.pci import numa_node_at, pci_path_at
from vcli.topology import NicFacts

#: Interfaces that lead out of no machine.
_VIRTUAL = re.compile(r"^(veth|docker|br-|virbr|cni|flannel|cali|tun|tap|dummy)")


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


def collect_numa_cpus(root: Path = Path("/")) -> tuple[tuple[int, ...], ...]:
    """The CPUs of each NUMA node; empty where the kernel does not say."""
    folder = root / "sys/devices/system/node"
    try:
        found = [entry for entry in folder.iterdir() if re.fullmatch(r"node\d+", entry.name)]
    except OSError:
        return ()
    found.sort(key=lambda entry: int(entry.name.removeprefix("node")))
    return tuple(parse_cpu_list(_read(entry / "cpulist")) for entry in found)


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """`0-3,8` as numbers; what is no number is left out."""
    cpus: list[int] = []
    for part in text.strip().split(","):
        first, separator, last = part.partition("-")
        if first.isdigit() and (not separator or last.isdigit()):
            cpus += range(int(first), int(last if separator else first) + 1)
    return tuple(cpus)


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
