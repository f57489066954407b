"""The built-in checks, a module for each group."""

from vcli.diagnostics.check import Check
from vcli.diagnostics.checks import (
    capacity,
    cuda,
    devices,
    disk,
    environment,
    fit,
    gpu,
    gpu_health,
    host,
    hub,
    infiniband,
    interfaces,
    known_faults,
    leftovers,
    limits,
    link,
    network,
    numa,
    nvlink,
    packages,
    ray,
    start,
)

__all__ = ["builtin_checks"]


def builtin_checks() -> tuple[Check, ...]:
    """All checks that need nothing but this host."""
    return (
        *host.CHECKS,
        *disk.CHECKS,
        *leftovers.CHECKS,
        *packages.CHECKS,
        *environment.CHECKS,
        *hub.CHECKS,
        *cuda.CHECKS,
        *devices.CHECKS,
        *gpu.CHECKS,
        *gpu_health.CHECKS,
        *link.CHECKS,
        *nvlink.CHECKS,
        *numa.CHECKS,
        *limits.CHECKS,
        *network.CHECKS,
        *interfaces.CHECKS,
        *infiniband.CHECKS,
        *start.CHECKS,
        *fit.CHECKS,
        *capacity.CHECKS,
        *known_faults.CHECKS,
        *ray.CHECKS,
    )
