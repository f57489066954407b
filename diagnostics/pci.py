"""Where a PCI device hangs and which NUMA node is near; read from /sys."""

import re
from pathlib import Path

_ADDRESS = re.compile(r"^[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$")


def numa_node_of(root: Path, bus_id: str) -> int | None:
    """The NUMA node near the device; None where the firmware does not say (-1)."""
    return numa_node_at(root / "sys/bus/pci/devices" / bus_id) if bus_id else None


def numa_node_at(device: Path) -> int | None:
    """The same for the folder of a device."""
    try:
        node = int((device / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def pci_path_of(root: Path, bus_id: str) -> tuple[str, ...]:
    """The PCI addresses from the root complex down to the device; empty if not known."""
    return pci_path_at(root / "sys/bus/pci/devices" / bus_id) if bus_id else ()


def pci_path_at(device: Path) -> tuple[str, ...]:
    """The same for the folder of a device."""
    try:
        parts = device.resolve(strict=True).parts
    except OSError:
        return ()
    roots = tuple(part for part in parts if re.match(r"^pci[0-9a-f]{4}:", part))
    return (*roots, *(part for part in parts if _ADDRESS.match(part)))
